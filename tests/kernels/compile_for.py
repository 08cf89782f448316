"""Compiles attention's Triton kernels for a device that is not here, with the tilings that it would be given.

    python compile_for.py 89    # compute capability 8.9

Prints a line of JSON for each kernel: what it is, and the shared memory and the tensor memory that it takes.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kernels.attention import triton_launch, triton_tiles, triton_tilings

CAPABILITY = int(sys.argv[1])
LENGTH = 1024


class Absent:
    """As much of Triton's driver as compiling needs."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", CAPABILITY, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


def compile_instead(self: Any, _grid: Any) -> Any:
    def compile_it(*arguments: Any, **options: Any) -> None:
        compiled.append(self.run(*arguments, grid=(1,), warmup=True, **options))

    return compile_it


def compile_all(width: int, precision: str, dtype: torch.dtype) -> None:
    tensors = [torch.empty(1, 1, LENGTH, width, dtype=dtype) for _ in range(4)]
    q, k, v, out = tensors
    results = [torch.empty_like(out) for _ in range(3)]
    q, k, v, gradient = [tensor.bfloat16().repeat(3, 1, 1, 1) if precision == "split" else tensor for tensor in tensors]
    numbers = torch.empty(1, 1, LENGTH)
    triton_launch.forward(q, k, v, out, numbers, True, precision)
    triton_launch.keys(q, k, v, gradient, numbers, numbers, results[0], results[1], True, precision)
    triton_launch.queries(q, k, v, gradient, numbers, numbers, results[2], True, precision)


compiled: list[Any] = []
driver.set_active(Absent())
JITFunction.__getitem__ = compile_instead
triton_tiles.capability = triton_tilings.capability = lambda _device: divmod(CAPABILITY, 10)
triton_tiles._make_context_current = lambda _device: None
assert not triton.knobs.runtime.interpret
for width in (128, 256):
    for dtype in (torch.bfloat16, torch.float32):
        exact = triton_tilings.exact_precision(torch.device("cpu"), width)
        compile_all(width, "ieee" if dtype == torch.bfloat16 else exact, dtype)
        for kernel in compiled:
            facts = {"kernel": kernel.metadata.name, "width": width, "dtype": str(dtype)}
            facts |= {"shared": kernel.metadata.shared, "tensor": getattr(kernel.metadata, "tmem_size", 0) or 0}
            print(json.dumps(facts), flush=True)
        compiled.clear()
