"""Compares and times ways of building the kernels for compute capability 9.0 that calls do not take, on this device.

    python -m kernels.attention.hopper.tune --batch 8 --heads 16 --length 1024 --head-dim 64

prints a line for each candidate: its error against the first, which is what calls take, and the times of its forward
pass and of forward with backward. What wins goes into `CHOICES` by hand, after `benchmarks.attention_stress`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from kernels.attention.flash_triton import flash_attention
from kernels.attention.hopper import launch
from kernels.attention.hopper.launch import CHOICES, WIDEST, Choice
from kernels.attention.triton.tilings import padded_width

WARMUP_MS, MEASURED_MS = 25, 100


def candidates(width: int) -> Iterator[tuple[str, Choice]]:
    """Yield names and choices: what calls take first."""
    present = CHOICES[width]
    forward = present.forward
    yield "present", present
    if width < WIDEST:
        ahead = replace(forward, query_stages=2)
        yield "queries ahead", Choice(ahead, ahead, present.backward)
        branch = replace(ahead, mask_first=False)
        yield "queries ahead, first tile masked by a branch", Choice(branch, branch, present.backward)
    if width == min(CHOICES):
        deep = replace(forward, stages=4, query_stages=2, mask_first=False)
        yield "the same with four stages", Choice(deep, deep, present.backward)
        yield "three consumers", Choice(present.forward_long, present.forward_long, present.backward)
        narrow = replace(present.backward, queries=64)
        yield "64 queries backward", Choice(forward, present.forward_long, narrow)
    if width == WIDEST:
        yield "four numbers together", Choice(forward, forward, replace(present.backward, together=4))


@contextmanager
def taken(width: int, choice: Choice) -> Iterator[None]:
    """Let calls take a choice inside."""
    present = CHOICES[width]
    CHOICES[width] = choice
    _forget()
    try:
        yield
    finally:
        CHOICES[width] = present
        _forget()


def _forget() -> None:
    launch._forward_launch.cache_clear()
    launch._backward_launches.cache_clear()


def main() -> None:
    """Compare the candidates on the problem that the command line names."""
    from triton.testing import do_bench

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("batch", 4), ("heads", 16), ("length", 4096), ("head-dim", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--full", action="store_true", help="without the causal mask")
    options = parser.parse_args()
    shape = options.batch, options.heads, options.length, options.head_dim
    q, k, v, gradient = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    inputs = [tensor.requires_grad_() for tensor in (q, k, v)]

    def forward() -> Tensor:
        return flash_attention(q, k, v, not options.full, only_hopper=True)

    def both() -> tuple[Tensor, ...]:
        out = forward()
        return (out, *torch.autograd.grad(out, inputs, gradient))

    right: tuple[Tensor, ...] = ()
    width = padded_width(options.head_dim)
    for name, choice in list(candidates(width)):
        with taken(width, choice):
            given = both()
            right = right or given
            errors = [((one - other).norm() / other.norm()).item() for one, other in zip(given, right, strict=True)]
            times = [
                do_bench(work, warmup=WARMUP_MS, rep=MEASURED_MS, return_mode="median") for work in (forward, both)
            ]
        print(f"{name}: error {max(errors):.1e}, forward {times[0]:.3f} ms, both {times[1]:.3f} ms", flush=True)


if __name__ == "__main__":
    main()
