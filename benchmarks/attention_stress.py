"""Draws shapes at random and compares attention on this GPU with the oracle, forward and backward, under a watchdog.

    python -m benchmarks.attention_stress --shapes 3000 --seed 1

A call that does not come back within seconds, as a kernel in a deadlock would, ends the process with the shape that it
was given. Exit code 1: a result was wrong; 2: a call hung.
"""

from __future__ import annotations

import argparse
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention.flash_triton import flash_attention
from kernels.attention.oracle import limits
from kernels.attention.reference import attention
from kernels.registry import ATTENTION
from kernels.tolerance import error

HEAD_DIMS = (40, 64, 64, 72, 80, 96, 128, 128, 160, 256)
LONGEST = 1500
PATIENCE_S = 60.0
"""Longest call: the first of its kind compiles three kernels."""


@dataclass(frozen=True)
class Shape:
    """One problem."""

    batch: int
    heads: int
    key_heads: int
    queries: int
    keys: int
    head_dim: int
    is_causal: bool
    dtype: torch.dtype
    heads_last: bool
    """True: the heads' axis lies behind the rows' in memory."""


def draw_shape(rng: random.Random) -> Shape:
    """Draw a problem; short lengths are as likely as long ones."""
    key_heads = rng.choice((1, 2, 3))

    def length() -> int:
        return int(LONGEST ** rng.random())

    return Shape(
        rng.choice((1, 2, 5)), key_heads * rng.choice((1, 1, 2, 4)), key_heads, length(), length(),
        rng.choice(HEAD_DIMS), rng.random() < 0.6, rng.choice((torch.bfloat16, torch.float16)), rng.random() < 0.3,
    )  # fmt: skip


def why_wrong(shape: Shape, rng: random.Random, name: str = "hopper") -> str | None:
    """Say what is wrong with an implementation's results; None if they are right."""
    function = flash_attention if name == "triton" else ATTENTION.load(name).function
    generator = torch.Generator("cuda").manual_seed(rng.randrange(1 << 32))
    q = _draw(shape, shape.heads, shape.queries, generator).requires_grad_()
    k, v = (_draw(shape, shape.key_heads, shape.keys, generator).requires_grad_() for _ in range(2))
    gradient = _draw(shape, shape.heads, shape.queries, generator)
    out = function(q, k, v, shape.is_causal)
    gradients = torch.autograd.grad(out, (q, k, v), gradient)
    rights = _written_out(shape, q.double(), k.double(), v.double(), gradient.double())
    plains = _written_out(shape, q, k, v, gradient)
    allowed = limits(plains, rights, shape.is_causal)
    results = zip(("out", "dq", "dk", "dv"), (out.detach(), *gradients), rights, allowed, strict=True)
    for result, given, right, limit in results:
        if reason := error(given, right).why_wrong(limit):
            return f"{result}: {reason}"
    return None


def _written_out(shape: Shape, q: Tensor, k: Tensor, v: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
    """The reference's output and gradients, in the inputs' dtype."""
    inputs = [one.detach().requires_grad_() for one in (q, k, v)]
    keys, values = (one.repeat_interleave(shape.heads // shape.key_heads, 1) for one in inputs[1:])
    out = attention(inputs[0], keys, values, shape.is_causal)
    return out.detach(), *torch.autograd.grad(out, inputs, gradient)


def _draw(shape: Shape, heads: int, rows: int, generator: torch.Generator) -> Tensor:
    sizes = (shape.batch, rows, heads) if shape.heads_last else (shape.batch, heads, rows)
    tensor = torch.randn((*sizes, shape.head_dim), generator=generator, device="cuda", dtype=torch.float32)
    tensor = tensor.to(shape.dtype)
    return tensor.transpose(1, 2) if shape.heads_last else tensor


@contextmanager
def watchdog(what: object) -> Iterator[None]:
    """End the process if the work inside takes too long: a kernel that hangs cannot be stopped otherwise."""

    def end() -> None:
        print(f"hung: {what}", flush=True)
        os._exit(2)

    timer = threading.Timer(PATIENCE_S, end)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def main() -> None:
    """Compare as many shapes as the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=int, default=3000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--implementation", default="hopper")
    options = parser.parse_args()
    rng, began, wrong, number = random.Random(options.seed), time.monotonic(), 0, 0
    for number in range(1, options.shapes + 1):  # noqa: B007 - shown below
        shape = draw_shape(rng)
        with watchdog(shape):
            reason = why_wrong(shape, rng, options.implementation)
            torch.cuda.synchronize()
        if reason is not None:
            wrong += 1
            print(f"wrong: {shape}: {reason}", flush=True)
        if time.monotonic() - began > options.seconds:
            break
    print(f"{options.implementation}: {number} shapes, {wrong} wrong, {time.monotonic() - began:.0f} s, none hung")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
