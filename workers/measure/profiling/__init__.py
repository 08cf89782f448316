"""Profiles of a few steps: from torch's profiler to tables of kernels, shares of classes, a trace and a flame graph.

`recording` runs the profiler and turns its events into plain data. All else here are functions of that data:
`attribution` finds the phase, the named range and the operator that each piece of work belongs to; `classes`, `usage`,
`timeline` and `attention` sum it up; `trace`, `stacks` and `flame_graph` make the files.
"""
