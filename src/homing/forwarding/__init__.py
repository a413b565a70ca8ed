"""How does a request reach its owner?"""
