"""Draws shapes at random and compares attention on this GPU with the oracle, forward and backward, under a watchdog.

    python -m benchmarks.attention_stress --shapes 3000 --seed 1
    python -m benchmarks.attention_stress --seed 1 --number 1234    # that shape alone

Several processes share the GPU. Each takes the shapes of some kinds (width of the tiles, dtype, mask), so that no two
compile the same kernels. A call that does not come back within seconds, as a kernel in a deadlock would, ends its
process with the shape that it was given, and the run with it. Exit code 1: a result was wrong; 2: a call hung.
"""

import argparse
import itertools
import math
import os
import random
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.attention.drawing import SPREADS, size_for
from kernels.attention.flash_triton import flash_attention
from kernels.attention.oracle import limits
from kernels.attention.problem import AttentionProblem
from kernels.attention.reference import attention
from kernels.attention.triton.tilings import padded_width
from kernels.registry import ATTENTION, FEATURES
from kernels.tolerance import error

DEVICE = "cuda"
HEAD_DIMS = (40, 64, 64, 72, 80, 96, 128, 128, 160, 256)
LONGEST = 1500
PATIENCE_S = 60.0
"""Longest call: the first of its kind compiles its kernels, while other processes do the same."""
HUNG = 2
"""Exit code of a process in which a call hung."""
RESULTS = ("out", "dq", "dk", "dv")


@dataclass(frozen=True)
class Shape:
    batch: int
    queries: int
    keys: int
    head_dim: int
    problem: AttentionProblem
    dtype: torch.dtype
    heads_last: bool
    """True: the heads' axis lies behind the rows' in memory."""

    def kind(self) -> str:
        """Return the properties for which the kernels are compiled."""
        mask = "causal" if self.problem.is_causal else "full"
        options = sorted(self.problem.features - {"num_kv_heads", "scale"})
        return " ".join([str(padded_width(self.head_dim)), str(self.dtype).removeprefix("torch."), mask, *options])


class Verdict(NamedTuple):
    share: float
    """The largest error, as a part of its limit."""
    reason: str | None
    """The fault; None if the result is right."""


def draw_shape(rng: random.Random, features: Set[str] = FEATURES) -> Shape:
    """Draw a problem, with these features at most; short lengths are as likely as long ones."""

    def length() -> int:
        return int(LONGEST ** rng.random())

    queries, keys, documents = length(), length(), None
    if rng.random() < 0.3 and "document_lengths" in features:
        queries = keys = max(queries, keys)
        ends = sorted(rng.choices(range(queries + 1), k=rng.randint(0, 12)))  # some are the same: of length 0
        documents = tuple(end - start for start, end in itertools.pairwise([0, *ends, queries]))
    key_heads, head_dim = rng.choice((1, 2, 3)), rng.choice(HEAD_DIMS)
    problem = AttentionProblem(
        num_heads=key_heads * rng.choice((1, 1, 2, 4)), num_kv_heads=key_heads, is_causal=rng.random() < 0.6,
        bottom_right=rng.random() < 0.3 and "bottom_right" in features,
        window=length() if rng.random() < 0.3 and "window" in features else None,
        document_lengths=documents,
        scale=rng.uniform(0.3, 2) / math.sqrt(head_dim) if rng.random() < 0.3 and "scale" in features else None,
        softcap=rng.uniform(1, 50) if rng.random() < 0.2 and "softcap" in features else None,
        return_lse=rng.random() < 0.2 and "return_lse" in features,
    )  # fmt: skip
    return Shape(
        rng.choice((1, 2, 5)), queries, keys, head_dim, problem,
        rng.choice((torch.bfloat16, torch.float16)), rng.random() < 0.3,
    )  # fmt: skip


def draw_shapes(number: int, seed: int, features: Set[str] = FEATURES) -> list[Shape]:
    """Draw as many problems as are asked for; the first are the same for every number."""
    rng = random.Random(seed)
    return [draw_shape(rng, features) for _ in range(number)]


def compare(shape: Shape, seed: int, name: str = "triton") -> Verdict:
    """Compare an implementation's results on inputs drawn with `seed` with the float64 oracle's.

    It is called twice: the first call of a kind goes another way than those behind it (`hopper.native`).
    """
    function = flash_attention if name == "triton" else ATTENTION.load(name).function
    generator, problem = torch.Generator(DEVICE).manual_seed(seed), shape.problem
    spread = spread_of(seed)
    size = 1.0 if spread is None else size_for(spread, problem, shape.head_dim)
    q = _draw(shape, problem.num_heads, shape.queries, generator, size)
    key_heads = problem.num_kv_heads or problem.num_heads
    k = _draw(shape, key_heads, shape.keys, generator, size)
    v = _draw(shape, key_heads, shape.keys, generator)
    gradient = _draw(shape, problem.num_heads, shape.queries, generator)
    tensors = q, k, v, gradient, torch.randn(q.shape[:-1], generator=generator, device=DEVICE)
    calls = [_results(function, problem, *tensors) for _ in range(2)]
    rights = _results(attention, problem, *(tensor.double() for tensor in tensors))
    plains = _results(attention, problem, *tensors)
    allowed = limits(plains[:4], rights[:4], problem, size)
    scaled = size * (1.0 if problem.scale is None else problem.scale * math.sqrt(shape.head_dim))
    scales = 1.0, scaled, scaled, 1.0
    share, wrong = 0.0, []
    for call, results in enumerate(calls, start=1):
        for result, given, right, limit, scale in zip(RESULTS, results, rights, allowed, scales, strict=False):
            found = error(given, right, scale)
            share = max(share, *found.shares(limit).values())
            if reason := found.why_wrong(limit):
                wrong.append(f"{result} of call {call}: {reason}")
        if problem.return_lse:
            part = _error_of_logsumexp(results[4], rights[4]) / (2 * _error_of_logsumexp(plains[4], rights[4]) + 1e-3)
            share = max(share, part)
            if not part <= 1:
                wrong.append(f"log-sum-exp of call {call}: {part:.1f} times the allowed error")
    return Verdict(share, "; ".join(wrong) or None)


def spread_of(seed: int) -> float | None:
    """Return how far the scores of a problem spread (`kernels.attention.drawing`); None: as normal inputs' do."""
    return random.Random(seed).choice([None, *SPREADS.values()])


def _results(
    function: Any, problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor, gradient: Tensor, lse_gradient: Tensor
) -> tuple[Tensor, ...]:
    """The output and the gradients of q, k and v; with `return_lse` also the log-sum-exp, and its gradient is used."""
    inputs = [one.detach().requires_grad_() for one in (q, k, v)]
    out = function(*inputs, problem.is_causal, **problem.options(q.device))
    if not problem.return_lse:
        return out.detach(), *torch.autograd.grad(out, inputs, gradient)
    out, logsumexp = out
    outputs = out, torch.where(logsumexp.isinf(), 0.0, logsumexp)  # that of a query without keys has no gradient
    return out.detach(), *torch.autograd.grad(outputs, inputs, (gradient, lse_gradient)), logsumexp.detach()


def _error_of_logsumexp(given: Tensor, right: Tensor) -> float:
    """The largest error; infinite if a query that sees no key has another value than −∞, or another query has it."""
    if not torch.equal(given.isneginf(), right.isneginf()):
        return math.inf
    return (given.double() - right).masked_fill(right.isneginf(), 0.0).abs().max().item()


def _draw(shape: Shape, heads: int, rows: int, generator: torch.Generator, size: float = 1.0) -> Tensor:
    sizes = (shape.batch, rows, heads) if shape.heads_last else (shape.batch, heads, rows)
    tensor = torch.randn((*sizes, shape.head_dim), generator=generator, device=DEVICE, dtype=torch.float32)
    tensor = (tensor * size).to(shape.dtype)
    return tensor.transpose(1, 2) if shape.heads_last else tensor


@contextmanager
def watchdog(what: object, patience_s: float = PATIENCE_S) -> Iterator[None]:
    """End the process if the work inside takes too long: a kernel that hangs cannot be stopped otherwise."""

    def end() -> None:
        print(f"hung: {what}", flush=True)
        os._exit(HUNG)

    timer = threading.Timer(patience_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def shares(shapes: Sequence[Shape], processes: int) -> list[list[int]]:
    """Divide the shapes' numbers among processes, whole kinds together; kinds with most shapes first."""
    kinds: dict[str, list[int]] = defaultdict(list)
    for number, shape in enumerate(shapes):
        kinds[shape.kind()].append(number)
    parts: list[list[int]] = [[] for _ in range(max(1, min(processes, len(kinds))))]
    for members in sorted(kinds.values(), key=len, reverse=True):
        min(parts, key=len).extend(members)
    return parts


def work(shapes: Mapping[int, Shape], seed: int, name: str) -> tuple[int, float]:
    """Compare shapes, given by number; prints a line for each wrong shape. Returns how many are wrong, and the largest
    error as a part of its limit."""
    wrong, worst = 0, 0.0
    for number, shape in shapes.items():
        own_seed = random.Random(f"{seed} {number}").randrange(1 << 32)
        with watchdog(f"shape {number}: {shape}"):
            verdict = compare(shape, own_seed, name)
        worst = max(worst, verdict.share)
        if verdict.reason is not None:
            wrong += 1
            spread = spread_of(own_seed)
            print(f"wrong: shape {number}: {shape}, scores spread by {spread}: {verdict.reason}", flush=True)
    return wrong, worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--number", type=int, help="compare this shape alone")
    parser.add_argument("--processes", type=int, default=max(1, min(12, len(os.sched_getaffinity(0)) - 2)))
    parser.add_argument("--implementation", default="triton", help="hopper takes no soft cap")
    options = parser.parse_args()
    number = options.shapes if options.number is None else options.number + 1
    shapes = draw_shapes(number, options.seed, ATTENTION.load(options.implementation).features)
    parts = [[options.number]] if options.number is not None else shares(shapes, options.processes)
    begun = time.monotonic()
    run = partial(work, seed=options.seed, name=options.implementation)
    with ProcessPoolExecutor(len(parts), get_context("spawn")) as pool:
        try:
            done = list(pool.map(run, [{number: shapes[number] for number in part} for part in parts]))
        except BrokenProcessPool:  # the pool has ended the others: the device does nothing else while a kernel hangs
            print("a process ended: its call hung, or crashed")
            raise SystemExit(HUNG) from None
    wrong = sum(count for count, _ in done)
    worst, took_s = max(share for _, share in done), time.monotonic() - begun
    print(
        f"{options.implementation}: {sum(map(len, parts))} shapes, {wrong} wrong, the largest error {worst:.2f} of its "
        f"limit, {took_s:.0f} s in {len(parts)} processes, none hung"
    )
    raise SystemExit(min(wrong, 1))


if __name__ == "__main__":
    main()
