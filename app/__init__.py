"""The service: routes, pages, command line, Python client, specs and the store.

Nothing here imports torch, triton, kernels, parallel or workers: the server runs where none of them is installed.
pandas is imported by app.client alone, and only when a frame is asked for.
"""
