"""Compiles attention's Triton kernels for devices that are not here, with the tilings that they would be given.

    python compile_for.py 89 100    # compute capabilities 8.9 and 10.0

Prints a line of JSON for each kernel: what it is, and the shared memory and the tensor memory that it takes. Triton
knows both before it makes code of a kernel, which takes most of its time and is left out: what it leaves in
$TRITON_CACHE_DIR is of no use to anybody else.
"""

import json
import sys
from typing import Any

import torch
import triton
from triton._C.libtriton import ir, nvidia, passes
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend, get_ptx_version_from_options
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kernels import launching
from kernels.attention.triton import decoding, inputs, launch, tilings

LENGTH = 1024


class Absent:
    """As much of Triton's driver as compiling needs. Each capability is a device of its own."""

    capability = 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, _device: int) -> int:
        return 0


def compile_instead(self: Any, _grid: Any) -> Any:
    def compile_it(*arguments: Any, **options: Any) -> None:
        compiled.append(self.run(*arguments, grid=(1,), warmup=True, **options))

    return compile_it


def allocate(self: Any, module: Any, metadata: dict[str, Any], options: Any, capability: int) -> str:
    """The first part of `make_llir` of Triton 3.6 and 3.7, which gives each tensor its memory."""
    ptx_version = get_ptx_version_from_options(options, self.target.arch)
    manager = ir.pass_manager(module.context)
    passes.ttgpuir.add_combine_tensor_select_and_if(manager)
    passes.ttgpuir.add_allocate_warp_groups(manager)
    passes.convert.add_scf_to_cf(manager)
    passes.gluon.add_inliner(manager)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, capability, ptx_version)
    nvidia.passes.ttnvgpuir.add_allocate_tensor_memory(manager)
    manager.run(module, "allocate")
    metadata["shared"] = module.get_int_attr("ttg.shared")
    metadata["tmem_size"] = module.get_int_attr("ttg.tensor_memory_size")
    return ""


def no_assembly(_backend: Any, _code: Any, metadata: dict[str, Any], *_options: Any) -> str:
    metadata["name"] = "not assembled"
    return ""


def no_binary(*_arguments: Any) -> bytes:
    return b""


def compile_all(width: int, precision: str, dtype: torch.dtype) -> None:
    tensors = [torch.empty(1, 1, LENGTH, width, dtype=dtype) for _ in range(4)]
    q, k, v, out = tensors
    results = [torch.empty_like(out) for _ in range(3)]
    q, k, v, gradient = [tensor.bfloat16().repeat(3, 1, 1, 1) if precision == "split" else tensor for tensor in tensors]
    numbers = torch.empty(1, 1, LENGTH)
    problems: list[tuple[launch.Scoring, Any]] = [(launch.Scoring.of(q, k, True), None)]
    if (width, precision) == (256, "ieee"):  # the tightest
        windowed = launch.Scoring.of(q, k, True, window=99, softcap=9.0, documents=True)
        problems.append((windowed, torch.empty(2, LENGTH, dtype=torch.int32)))
    for scoring, bounds in problems:
        launch.forward(q, k, v, out, numbers, scoring, precision, bounds=bounds)
        launch.keys(q, k, v, gradient, numbers, numbers, results[0], results[1], scoring, precision, bounds=bounds)
        launch.queries(q, k, v, gradient, numbers, numbers, results[2], scoring, precision, bounds=bounds)
    if dtype != torch.float32:
        decoding.decode(q[:, :, :1], k, v, out[:, :, :1], numbers, launch.Scoring.of(q[:, :, :1], k, False))


def compile_each_width_and_dtype() -> None:
    for width in (128, 256):
        for dtype in (torch.bfloat16, torch.float32):
            exact = tilings.exact_precision(torch.device("cpu"), width)
            compile_all(width, "ieee" if dtype == torch.bfloat16 else exact, dtype)
            for kernel in compiled:
                facts = {"capability": absent.capability, "kernel": kernel.src.name, "width": width}
                facts |= {"dtype": str(dtype), "shared": kernel.metadata.shared}
                print(json.dumps(facts | {"tensor": getattr(kernel.metadata, "tmem_size", 0) or 0}), flush=True)
            compiled.clear()


compiled: list[Any] = []
absent = Absent()
driver.set_active(absent)
JITFunction.__getitem__ = compile_instead
CUDABackend.make_ptx, CUDABackend.make_cubin = no_assembly, no_binary
if triton.__version__.startswith(("3.6.", "3.7.")):
    CUDABackend.make_llir = allocate
inputs.capability = tilings.capability = lambda _device: divmod(absent.capability, 10)
launching.make_context_current = lambda _device: None
assert not triton.knobs.runtime.interpret
for argument in sys.argv[1:]:
    absent.capability = int(argument)
    compile_each_width_and_dtype()
