"""Measures the published attention rows on this GPU, beside what they were on an H200 (docs/measurements.md).

    python -m benchmarks.published [--rounds N]

Needs torch and Triton only. Times are of forward plus backward pass in bfloat16, medians of `triton.testing.do_bench`
and of the rounds, in which both implementations take turns. On an H200 the ratios of single runs are within 0.07 of the
published ones; rows of 8192 positions or more run at the chip's power limit.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Row:
    """A problem, and the published times in ms."""

    batch: int
    heads: int
    length: int
    head_dim: int
    is_causal: bool
    triton_ms: float
    cudnn_ms: float

    @property
    def published(self) -> float:
        """The published ratio of our time to cuDNN's."""
        return self.triton_ms / self.cudnn_ms


ROWS = (
    Row(1, 16, 16_384, 64, True, 3.52, 4.22),
    Row(1, 16, 16_384, 64, False, 7.02, 8.29),
    Row(1, 16, 16_384, 128, True, 6.08, 6.74),
    Row(2, 32, 32_768, 128, True, 101, 112),
    Row(2, 32, 8192, 256, True, 15.1, 17.4),
    Row(4, 16, 4096, 64, True, 1.03, 1.26),
    Row(4, 16, 4096, 128, False, 3.04, 3.26),
    Row(4, 32, 2048, 80, True, 0.779, 1.02),
    Row(8, 16, 1024, 64, True, 0.220, 0.253),
)
"""The table of docs/measurements.md, but for its shortest row: `do_bench` counts the host's time there."""


def by_turns(row: Row, rounds: int) -> tuple[float, float]:
    """Return our time and cuDNN's in ms."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention
    from triton.testing import do_bench

    from kernels.attention.flash_triton import flash_attention

    shape = (row.batch, row.heads, row.length, row.head_dim)
    q, k, v, gradient = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    for tensor in (q, k, v):
        tensor.requires_grad_()

    def cudnn() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q, k, v, is_causal=row.is_causal)

    def both_passes(forward: Callable[[], Tensor]) -> Callable[[], None]:
        def run() -> None:
            q.grad = k.grad = v.grad = None
            forward().backward(gradient)  # type: ignore[no-untyped-call]

        return run

    ours = both_passes(lambda: flash_attention(q, k, v, is_causal=row.is_causal))
    theirs = both_passes(cudnn)
    times: dict[Any, list[float]] = {ours: [], theirs: []}
    for _ in range(rounds):
        for call, measured in times.items():
            measured.append(do_bench(call, warmup=50, rep=200, return_mode="median"))
    return statistics.median(times[ours]), statistics.median(times[theirs])


def table(measured: Iterable[tuple[Row, tuple[float, float]]]) -> str:
    """Return the Markdown table."""
    lines = [
        "| batch, heads, length, head dim | triton, ms | cuDNN, ms | ratio | published |",
        "|---|---:|---:|---:|---:|",
    ]
    for row, (ours, cudnn) in measured:
        mask = "causal" if row.is_causal else "no mask"
        name = f"{row.batch}, {row.heads}, {row.length}, {row.head_dim}, {mask}"
        lines.append(f"| {name} | {ours:.3f} | {cudnn:.3f} | {ours / cudnn:.3f} | {row.published:.3f} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    import triton

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}\n")
    print(table((row, by_turns(row, rounds)) for row in ROWS))


if __name__ == "__main__":
    main()
