"""The service: routes, pages, command line, Python client, specs and the store.

Nothing here imports torch, triton, kernels, parallel or workers: the server runs where none of them is installed. Of
the modules here, only flopwatch.client imports pandas, and only when a caller asks for a frame.
"""
