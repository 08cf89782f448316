"""Measuring: timing, statistics, memory, where it was measured, and whether the numbers can be trusted.

Nothing here may import the service (app): GPU hosts may lack its dependencies. torch alone is needed; NVML is used
where it is installed.
"""
