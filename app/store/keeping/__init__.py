"""Decides what stays: baselines keep jobs, people delete jobs, and pruning deletes old rows.

A file that no row refers to any more is removed by ArtifactFiles.remove_unreferenced (app/store/files/artifacts.py),
which the server calls every quarter of an hour.
"""
