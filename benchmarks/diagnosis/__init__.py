"""Planted steps, their diagnoses, and what became of the predictions: `python -m benchmarks.diagnosis`."""
