"""Writes and parses what people read and type: cases, numbers, times, verdicts. Standard library only.

The server, the command line and the client share it.
"""
