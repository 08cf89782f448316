"""Decides what stays: baselines, deleting and pruning."""
