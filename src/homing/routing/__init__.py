"""What does this worker do with a request?"""
