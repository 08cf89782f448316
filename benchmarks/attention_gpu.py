"""Attention on a GPU: ours beside the libraries, in one run; behind the tables of docs/measurements.md.

    python -m benchmarks.attention_gpu [--tables libraries sweep] [--samples 31]

Times are medians of CUDA events around one call, with the L2 cache flushed before each; implementations take turns, so
that clocks and heat are shared alike. The host runs ahead, as in training: its launches cost nothing, unless they take
longer than the kernels. Outputs and gradients are compared with those of the first implementation in each table.
TFLOP/s count the forward pass's work three times, as jobs do: not the scores that backward passes compute again.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels.registry import ATTENTION
from kernels.tolerance import TOLERANCES

COMPARED = ("sdpa_flash", "flex", "sdpa_cudnn", "triton")
SHAPES = ((1, 16, 16384, 64), (1, 16, 16384, 128), (4, 16, 4096, 64), (2, 32, 32768, 128))
SWEEP = ("eager", "compiled", "triton")
SWEEP_LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)
FLUSHED_BYTES = 256 << 20

Shape = tuple[int, int, int, int]
Pass = Callable[[], tuple[Tensor, ...]]


def draw(shape: Shape, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v, and the output's gradient."""
    return [torch.randn(shape, device="cuda", dtype=dtype).requires_grad_(index < 3) for index in range(4)]


def median_ms(calls: Sequence[Pass], samples: int) -> list[float]:
    """Of each call, in turns."""
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device="cuda")
    events: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in calls]
    for _ in range(samples):
        for call, own in zip(calls, events, strict=True):
            flushed.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            call()
            end.record()
            own.append((start, end))
    torch.cuda.synchronize()
    return [statistics.median(start.elapsed_time(end) for start, end in own) for own in events]


def passes(name: str, inputs: list[Tensor], is_causal: bool) -> tuple[Pass, Pass]:
    """Forward alone, and forward with backward."""
    function = ATTENTION.load(name).function
    q, k, v, gradient = inputs

    def forward() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (function(q, k, v, is_causal),)

    def both() -> tuple[Tensor, ...]:
        out = function(q, k, v, is_causal)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), gradient)

    return forward, both


def check(name: str, given: Sequence[Tensor], right: Sequence[Tensor]) -> None:
    """See whether output and gradients agree.

    Raises:
        SystemExit: they do not. There are no times of wrong results.
    """
    for one, other in zip(given, right, strict=True):
        difference = torch.linalg.vector_norm(one.float() - other.float()) / torch.linalg.vector_norm(other.float())
        if not difference < TOLERANCES[one.dtype]:
            raise SystemExit(f"{name} differs by {difference:.1e} at {tuple(one.shape)}")


def compare(shape: Shape, samples: int) -> None:
    """One row per implementation: bfloat16, causal."""
    inputs = draw(shape, torch.bfloat16)
    calls = [call for name in COMPARED for call in passes(name, inputs, True)]
    expected = calls[1]()
    for name, forward_pass, both_passes in zip(COMPARED, calls[::2], calls[1::2], strict=True):
        check(name, forward_pass(), expected[:1])
        check(name, both_passes(), expected)
    times = median_ms(calls, samples)
    ours = times[2 * COMPARED.index("triton") :][:2]
    batch, heads, length, head_dim = shape
    flops = 2 * batch * heads * length**2 * head_dim  # two products, half of the scores
    for name, forward, both_ms in zip(COMPARED, times[::2], times[1::2], strict=True):
        print(
            f"| {', '.join(map(str, shape))} | {name} | {forward:.3f} | {both_ms:.3f} "
            f"| {3 * flops / both_ms / 1e9:.0f} "
            f"| {forward / ours[0]:.2f} | {both_ms / ours[1]:.2f} |",
            flush=True,
        )


def sweep(head_dim: int, length: int, dtype: torch.dtype, samples: int) -> None:
    """One row: batch 8, one head, no mask; forward and forward with backward of each, and forward's peak memory."""
    inputs = draw((8, 1, length, head_dim), dtype)
    cells = []
    expected: tuple[Tensor, ...] = ()
    for name in SWEEP:
        try:
            forward, both = passes(name, inputs, False)
            forward()
            results = both()
            expected = expected or results
            check(name, results, expected)
            del results
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            out = ATTENTION.load(name).function(*inputs[:3], False)
            peak = (torch.cuda.max_memory_allocated() - before) / 2**20
            del out
            times = median_ms((forward, both), samples)
            cells.append(f"{times[0]:.3f} / {times[1]:.3f} / {peak:.0f}")
        except torch.cuda.OutOfMemoryError:
            cells.append("out of memory")
        torch.cuda.empty_cache()
    print(f"| {str(dtype).removeprefix('torch.')} | {head_dim} | {length} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Print Markdown tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", nargs="+", choices=("libraries", "sweep"), default=["libraries"])
    parser.add_argument("--samples", type=int, default=31)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "There is no CUDA device here.\n")
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    if "libraries" in arguments.tables:
        compare_with_libraries(arguments.samples)
    if "sweep" in arguments.tables:
        classic_sweep(max(5, arguments.samples // 3))


def compare_with_libraries(samples: int) -> None:
    """Causal, in bfloat16."""
    print("| batch, heads, length, head dim | by | forward ms | both ms | TFLOP/s | forward ÷ ours | both ÷ ours |")
    print("|---|---|---|---|---|---|---|")
    for shape in SHAPES:
        compare(shape, samples if shape[2] < 32768 else max(5, samples // 5))


def classic_sweep(samples: int) -> None:
    """Batch 8, one head, no mask, in float32 and bfloat16."""
    print(f"\n| dtype | head dim | length | {' | '.join(f'{name}: forward / both ms / MiB' for name in SWEEP)} |")
    print("|" + "---|" * (3 + len(SWEEP)))
    for dtype in (torch.float32, torch.bfloat16):
        for head_dim in (16, 32, 64, 128):
            for length in SWEEP_LENGTHS:
                sweep(head_dim, length, dtype, samples)


if __name__ == "__main__":
    main()
