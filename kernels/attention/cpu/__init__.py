"""Attention on the CPU in C++, from the way it is written on paper to a vectorised FlashAttention-2.

`naive`, `blocked`, `fused` and `flash` take float32 tensors (batch, heads, sequence, head_dim), and are
built together, with the same flags, when one of them is first called. `memory` returns how much a call allocates;
`read` and `write` take one number of a tensor by its four indices.
"""

from ...building import BuildError, CompilerMissing
from .accessors import read, write
from .operations import ForwardMemory, blocked, flash, fused, memory, naive

__all__ = [
    "BuildError",
    "CompilerMissing",
    "ForwardMemory",
    "blocked",
    "flash",
    "fused",
    "memory",
    "naive",
    "read",
    "write",
]
