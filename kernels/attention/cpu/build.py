"""Builds and loads the C++ of this folder.

The library is plain C functions over pointers: neither Python's nor torch's headers are needed, and it builds in
seconds.
"""

import ctypes
import functools
from pathlib import Path

from ...building import Library

COMPILER_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-Wall", "-Wextra")
"""Flags of all implementations. No -ffast-math: NaN and infinity must propagate."""
LIBRARY = Library(
    name="flopwatch_cpu_attention",
    sources=Path(__file__).with_name("source"),
    what="the cpu_* attention implementations",
    compiler_flags=COMPILER_FLAGS,
    linker_flags=("-fopenmp",),
)


class Problem(ctypes.Structure):
    """`Problem` of source/problem.h: the same fields in the same order."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("batch", "heads", "key_heads", "queries", "keys", "head_dim", "br", "bc", "is_causal", "threads")
    ]


@functools.cache
def library() -> ctypes.CDLL:
    """Return the library, with its functions' types set; build it now if the cache has none.

    Raises:
        CompilerMissing: no compiler (`c++`, or what CXX names).
        BuildError: the compiler or ninja failed; the message ends with their output.
        OSError: the cache (TORCH_EXTENSIONS_DIR, or ~/.cache/flopwatch) cannot be written.
    """
    loaded = ctypes.CDLL(str(LIBRARY.file()))
    pointer, problem = ctypes.c_void_p, ctypes.POINTER(Problem)
    for name, tensors in {"naive": 5, "blocked": 5, "fused": 5, "flash": 6, "flash_backward": 10}.items():
        function, scratch = getattr(loaded, name), getattr(loaded, f"{name}_scratch")
        function.argtypes, function.restype = [problem, *[pointer] * tensors], None
        scratch.argtypes, scratch.restype = [problem], ctypes.c_int64
    indices = ctypes.POINTER(ctypes.c_int64)
    loaded.read_element.argtypes, loaded.read_element.restype = [pointer, indices, indices], ctypes.c_float
    loaded.write_element.argtypes = [pointer, indices, indices, ctypes.c_float]
    loaded.write_element.restype = None
    return loaded
