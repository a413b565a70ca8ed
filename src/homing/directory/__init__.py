"""Which worker owns that session?"""
