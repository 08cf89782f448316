"""Measuring: timing, statistics, memory, the environment's fingerprint, and validity checks.

Nothing here may import the service (app): GPU hosts may lack its dependencies. torch alone is needed; NVML is used
where it is installed.
"""
