"""In which order is an episode driven, what is closed after it, and how many run at once?"""
