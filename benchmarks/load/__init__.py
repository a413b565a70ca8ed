"""A load generator of our own: each connection keeps its session's cookie, and each reply is checked.

`loader.c` says what it sends and checks. wrk and its kind cannot pin a cookie to a connection, nor choose the worker
that a connection reaches; a load generator in Python would need more CPU than the servers it measures.
"""

from benchmarks.load.loader import Load, Loader, LoaderError, build_loader

__all__ = ["Load", "Loader", "LoaderError", "build_loader"]
