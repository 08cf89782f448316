"""Collectives and data parallelism.

Nothing here may import the service (app), workers or kernels, or know of jobs, specs and databases: the package works
on any host with torch alone. Ranks are started by process_group only, and only from inside a job's process.
"""
