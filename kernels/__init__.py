"""Attention and other kernels, each with its plain PyTorch reference.

Nothing here may import the service (app), workers or parallel, or know of jobs and specs. Importing this package or its
registry imports neither torch nor Triton: an implementation is loaded when it is asked for.
"""
