"""Collectives and data parallelism.

Nothing here may import the service (app), workers or kernels, or know of jobs, specs and databases: the package works
on any host with torch alone. Only process_group starts ranks, and only from inside a job's process.
"""
