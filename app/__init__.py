"""The service: routes, pages, command line, specs and the store.

Nothing here imports torch, triton, kernels, parallel or workers: the server runs where none of them is installed.
pandas is imported by app.store.results.rendering alone, and only when a table is asked for.
"""
