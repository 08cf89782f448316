"""Profiles of a few steps: from torch's profiler to tables of kernels, shares of classes, a trace and a flame graph.

`recording` runs the profiler and turns its events into plain data, which the other modules read: `attribution` assigns
each piece of work to a phase, named range and operator; `classes`, `usage`, `timeline` and `attention` sum it up;
`trace`, `stacks` and `flame_graph` make the files.
"""
