"""Kernels of a training step beside torch.compile and Liger-Kernel, and beside a copy: times on this GPU.

    python -m benchmarks.fused_kernels [--kernels rms_norm …] [--rows 16384] [--widths 1600 4096 8192]

Needs torch, Triton and this checkout only; Liger-Kernel is measured where it is installed. One line per kernel, size
and implementation: for each pass microseconds of the device with a cold L2 cache, GB/s of what has to be read and
written, and the percentage of the GB/s of a copy of 1 GiB; in brackets, of a copy that moves as many bytes as this
pass. For `linear_cross_entropy`, which computes its gradients forward, TFLOP/s of both passes' products. `error` is the
output's relative error against plain float32.

Lines that no job can have: `rms_norm_cast` has float32 inputs and a bfloat16 result, as norms in a model have under
autocast; Liger-Kernel's backward pass of `swiglu`, which overwrites its inputs; its `rope`, which turns other pairs.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import kernels
from kernels import liger, operations
from kernels.device_clock import DeviceClock, nothing
from kernels.registry import KERNELS, Implementation, Kernel

NAMES = ("rms_norm", "rms_norm_cast", "swiglu", "rope", "linear_cross_entropy")
HIDDEN = {1600: 6400, 4096: 11_008, 8192: 28_672}
"""Width of the feed-forward layer, by that of the model."""
DEVICE = "cuda"
COPY_BYTES = 2**30
WARMUP = 3
HAS_LIGER = importlib.util.find_spec("liger_kernel") is not None
LIGER_ROPE = "liger, other pairs"


class Bench:
    """Times passes on the current device."""

    def __init__(self, clock: DeviceClock, samples: int) -> None:
        self.clock = clock
        self.samples = samples
        self._copies: dict[int, float] = {}

    def us(self, work: Callable[[], Any], prepare: Callable[[], Any] = nothing) -> float:
        """Return the median time in microseconds."""
        self.clock.forget()
        laps = [self.clock.lap(lambda: void(work()), lambda: void(prepare())) for _ in range(WARMUP + self.samples)]
        return 1e3 * statistics.median(lap.device_ms for lap in laps[WARMUP:])

    def copy_rate(self, moved: int) -> float:
        """Return the GB/s of a copy that reads and writes so many bytes together."""
        if moved not in self._copies:
            source = torch.empty(moved // 2, dtype=torch.uint8, device=DEVICE)
            target = torch.empty_like(source)
            self._copies[moved] = 1e-3 * moved / self.us(lambda: target.copy_(source))
        return self._copies[moved]

    def passes(
        self, kernel: Kernel, function: Callable[..., Any], inputs: Sequence[Tensor]
    ) -> tuple[Tensor, list[tuple[float, int]]]:
        """Return the output, or the first of several, and microseconds and bytes of both passes."""
        leaves = [tensor.requires_grad_() for tensor in inputs]
        held: dict[str, Sequence[Tensor]] = {}

        def forward() -> None:
            out = function(*leaves)
            held["out"] = out if isinstance(out, tuple) else (out,)

        forward()
        out = held["out"][0].detach()
        gradients = [torch.randn_like(out) for out in held["out"]]
        given, made = (sum(tensor.nbytes for tensor in of) for of in (leaves, gradients))
        forward_us = self.us(forward, held.clear)
        backward_us = self.us(lambda: torch.autograd.grad(held["out"], leaves, gradients), forward)
        return out, list(zip((forward_us, backward_us), kernel.moved(given, made), strict=True))

    def rate(self, taken_us: float, moved: int) -> list[str]:
        """Return columns: microseconds, GB/s, percentages of both copies' rates."""
        rate = 1e-3 * moved / taken_us
        large, equal = (100 * rate / self.copy_rate(of) for of in (2 * COPY_BYTES, moved))
        return [f"{taken_us:.1f}", f"{rate:.0f}", f"{large:.0f} ({equal:.0f})"]


def void(_: object) -> None:
    """Drop a result."""


def columns_of(name: str, width: int) -> int:
    """Return the columns of a kernel in a model of this width."""
    if name == "swiglu":
        return HIDDEN.get(width, 4 * width)
    return width // operations.HEAD_DIM if name == "rope" else width


def kernel_of(name: str) -> Kernel:
    """Return an operation of the registry, or the norm whose result is cast."""
    if name != "rms_norm_cast":
        kernel: Kernel = KERNELS.load(name)
        return kernel

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, weight.shape, weight, 1e-5).bfloat16()

    everywhere = {DEVICE: frozenset({"float32"})}
    return Kernel(
        name, operations.rms_norm.shapes, plain,
        [
            Implementation("compiled", operations.compiled(plain), everywhere),
            Implementation(
                "triton", lambda x, weight: kernels.rms_norm(x, weight, out_dtype=torch.bfloat16), everywhere
            ),
        ],
    )  # fmt: skip


def turned_by_liger(rows: int, heads: int, dtype: torch.dtype) -> tuple[Callable[..., Any], list[Tensor]]:
    """Return Liger-Kernel's rotation of queries and keys that have the heads together, and its inputs."""
    cos, sin = (
        torch.cat((table, table), -1)[None].to(DEVICE, dtype)
        for table in operations.rotary_angles(rows, operations.HEAD_DIM, operations.THETA)
    )
    parts = [heads - heads // 2, heads // 2]
    inputs = [torch.randn(1, rows, part, operations.HEAD_DIM, device=DEVICE, dtype=dtype) for part in parts]
    return lambda q, k: liger.rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin), inputs


def lines(bench: Bench, name: str, rows: int, width: int, dtype: torch.dtype) -> None:
    """Print the lines of one operation at one size."""
    kernel, columns = kernel_of(name), columns_of(name, width)
    dtype = torch.float32 if name == "rms_norm_cast" else dtype
    shapes = kernel.shapes(rows, columns)
    generator = torch.Generator(DEVICE).manual_seed(0)
    inputs = [torch.randn(shape, generator=generator, device=DEVICE).to(dtype) for shape in shapes]
    right = kernel.plain(*(tensor.float() for tensor in inputs)).detach().float()
    title = [name, f"{rows} × {columns}", str(dtype).removeprefix("torch.")]
    for one in [kernel.implementation("torch"), *kernel.kernels]:
        if one.name == "liger" and not HAS_LIGER:
            continue
        copies = [tensor.clone() for tensor in inputs]
        out, passes = bench.passes(kernel, one.function, copies)
        error = f"{((out.float() - right).norm() / right.norm()).item():.1e}"
        show([*title, one.name, error], figures(bench, name, copies, passes))
    if name == "rope" and HAS_LIGER:
        _, passes = bench.passes(kernel, *turned_by_liger(rows, columns, dtype))
        show([*title, LIGER_ROPE, "–"], figures(bench, name, inputs, passes))


def figures(bench: Bench, name: str, inputs: Sequence[Tensor], passes: Sequence[tuple[float, int]]) -> list[str]:
    """Return the columns of both passes."""
    if name != "linear_cross_entropy":
        return [column for one in passes for column in bench.rate(*one)]
    (forward_us, _), (backward_us, _) = passes
    hidden, weight, _ = inputs
    tflops = 1e-6 * 3 * 2 * hidden.numel() * len(weight) / (forward_us + backward_us)
    return [f"{forward_us:.1f}", "", "", f"{backward_us:.1f}", "", f"{tflops:.0f} TFLOP/s"]


def show(*parts: Sequence[str]) -> None:
    """Print a line of the table."""
    print(f"| {' | '.join(column for part in parts for column in part)} |", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--rows", type=int, nargs="+", default=[16_384])
    parser.add_argument("--widths", type=int, nargs="+", default=[1600, 4096, 8192])
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--samples", type=int, default=15)
    given = parser.parse_args()
    bench = Bench(DeviceClock(torch.device(DEVICE, torch.cuda.current_device())), given.samples)
    copy = bench.copy_rate(2 * COPY_BYTES)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; a copy: {copy:.0f} GB/s\n")
    passes = (f"{name}, {unit}" for name in ("forward", "backward") for unit in ("µs", "GB/s", "%"))
    columns = ["kernel", "rows × columns", "dtype", "implementation", "error", *passes]
    show(columns)
    show(["---"] * len(columns))
    for name in given.kernels:
        for rows in given.rows:
            for width in given.widths:
                lines(bench, name, rows, width, getattr(torch, given.dtype))
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
