"""Processes and sockets: how do several workers of one server run?"""
