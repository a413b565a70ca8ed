"""Would a test notice if a promise were broken? Each bug in `bugs` is planted in a copy of the source, and tests must fail.

`python -m tests.planted.run` plants them one after the other and prints which were caught.
"""
