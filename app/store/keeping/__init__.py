"""Decides what stays: baselines keep jobs, people delete jobs, and pruning deletes old rows.

A file that no row refers to any more is removed by FileStore.remove_unreferenced (app/store/files), which the server
calls every quarter of an hour.
"""
