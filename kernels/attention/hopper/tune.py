"""Compares and times ways of building the kernels for compute capability 9.0 that calls do not take, on this device.

    python -m kernels.attention.hopper.tune --head-dim 64 --shape 4x25x512 --shape 8x16x1024

prints a line for each candidate and shape: its largest error against the float64 oracle in odd shapes, as a part of the
tolerance, its error against cuDNN's results, and the device's time of the forward pass, of forward with backward, and
of the three kernels of the backward pass. The winner goes into `CHOICES` by hand, after `benchmarks.attention_stress`.

Each candidate has a process of its own, which is ended if it does not answer: a kernel in a deadlock costs seconds. All
compile and are compared at the same time; then they take turns, and are timed several times over, since the device's
clock drifts by more than candidates differ.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ...device_clock import DeviceClock
from ...tolerance import TOLERANCES, error
from ..flash_triton import flash_attention
from ..library import sdpa_cudnn
from ..reference import attention
from ..triton.launch import kind
from ..triton.tilings import padded_width
from . import plans, rules
from .rules import CHOICES, Backward, KernelChoice, TwoPasses

CUDNN = "cuDNN"
ODD_SHAPES = (
    *((2, 4, 2, 515, 515), (1, 3, 3, 300, 1111), (2, 4, 1, 1111, 300)),
    *((1, 2, 2, 64, 2000), (1, 2, 2, 129, 1), (3, 2, 2, 1200, 1200)),
)
"""(batch, heads, key heads, queries, keys)."""
READY_S, TURN_S = 180.0, 60.0
"""Longest time that a candidate may take to compile and be compared, and for one turn."""
Pass = Callable[[Tensor, Tensor, Tensor, bool], Tensor]


def candidates(width: int) -> Iterator[tuple[str, KernelChoice]]:
    """Yield names and choices: what calls take first."""
    present = CHOICES[width]
    yield "present", present
    forward, backward = present.forward, present.backward
    if isinstance(backward, TwoPasses):
        small = replace(backward, keys=32, key_stages=3, value_stages=3)
        yield "32 keys for dQ", replace(present, backward=small)
    elif width > min(CHOICES):
        short = replace(forward, keys=64, stages=4)
        yield "forward, 64 keys", replace(present, forward=short, forward_long=short)
    else:
        for queries in (64, 128):
            yield f"backward {queries}", replace(present, backward=Backward(queries, 128))
        ahead = replace(forward, query_stages=3 - forward.query_stages)
        yield f"forward, {ahead.query_stages} query stages", replace(present, forward=ahead, forward_long=ahead)
        whole = replace(forward, halves=False)
        yield "forward, the whole of the last tile", replace(present, forward=whole, forward_long=whole)
        yield "forward, three consumers", replace(present, forward=present.forward_long)


def largest_error(head_dim: int) -> float:
    """Return the largest error of the present choice against the oracle, as a fraction of the tolerance.

    Inputs are bfloat16; both passes run with and without the causal mask.
    """
    worst = 0.0
    generator = torch.Generator("cuda").manual_seed(0)
    for is_causal in (False, True):
        for batch, heads, key_heads, queries, keys in ODD_SHAPES:
            sizes = (heads, queries), (key_heads, keys), (key_heads, keys), (heads, queries)
            q, k, v, gradient = (
                torch.randn(batch, *size, head_dim, device="cuda", generator=generator).bfloat16() for size in sizes
            )
            results = passes(_ours, (q, k, v), gradient, is_causal)
            double = [tensor.double() for tensor in (q, k, v)]
            right = passes(attention, double, gradient.double(), is_causal)
            for result, oracle in zip(results, right, strict=True):
                vanishing = oracle.norm() < 1e-2 * right[3].norm()
                target = torch.zeros_like(oracle) if vanishing else oracle
                worst = max(worst, error(result, target).relative / TOLERANCES[result.dtype])
    return worst


def _ours(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    out: Tensor = flash_attention(q, k, v, is_causal, only_hopper=True)
    return out


def passes(
    function: Pass, inputs: list[Tensor] | tuple[Tensor, ...], gradient: Tensor, is_causal: bool
) -> list[Tensor]:
    """Return the output and the gradients of q, k and v."""
    q, k, v = (tensor.detach().requires_grad_() for tensor in inputs)
    out = function(q, k, v, is_causal)
    return [tensor.detach() for tensor in (out, *torch.autograd.grad(out, (q, k, v), gradient))]


def time_one(
    clock: DeviceClock, function: Pass, shape: tuple[int, ...], is_causal: bool
) -> tuple[list[float], list[float]]:
    """Return medians in ms and the errors relative to cuDNN.

    The medians are of forward, of both passes, and, for our kernels, of each kernel of the backward pass.
    """
    generator = torch.Generator("cuda").manual_seed(0)
    inputs = [torch.randn(shape, device="cuda", generator=generator).bfloat16() for _ in range(4)]
    q, k, v = (tensor.requires_grad_() for tensor in inputs[:3])
    gradient = inputs[3]
    works: list[Callable[[], object]] = [
        lambda: function(q, k, v, is_causal),
        lambda: torch.autograd.grad(function(q, k, v, is_causal), (q, k, v), gradient),
    ]
    errors = []
    if function is _ours:
        pairs = zip(
            *(passes(each, (q, k, v), gradient, is_causal) for each in (_ours, sdpa_cudnn.function)), strict=True
        )
        errors = [((ours - theirs).float().norm() / theirs.float().norm()).item() for ours, theirs in pairs]
        works += backward_kernels(q.detach(), gradient, is_causal)
    return [_median_ms(clock, work) for work in works], errors


def backward_kernels(q: Tensor, gradient: Tensor, is_causal: bool) -> list[Callable[[], object]]:
    """Return one call for each kernel of the backward pass; the tensors' values are arbitrary."""
    launches = plans.backward_launches(
        plans.BackwardProblem((kind(q),) * 7, q.stride(), False, is_causal, q.shape[-1] ** -0.5)
    )
    assert launches is not None
    buffer, numbers = torch.empty(launches.size, device="cuda"), torch.zeros(q.shape[:3], device="cuda")
    room = [torch.empty_like(q) for _ in range(3)]
    return [
        lambda: launches.rows((gradient, gradient, numbers, numbers, buffer)),
        lambda: launches.keys((q, q, q, gradient, buffer, room[0], room[1])),
        lambda: launches.queries((q, q, q, gradient, buffer, room[2])),
    ]


def _median_ms(clock: DeviceClock, work: Callable[[], object]) -> float:
    clock.forget()

    def call() -> None:
        work()

    first = clock.lap(call).device_ms
    laps = 5 if first > 1 else 15
    return statistics.median(clock.lap(call).device_ms for _ in range(laps))


def serve(options: argparse.Namespace) -> None:
    """Run one candidate's process: compare it with the oracle, then time it once per line on standard input."""
    width, name = padded_width(options.head_dim), options.candidate
    head = "-"
    if name != CUDNN:
        CHOICES[width] = dict(candidates(width))[name]
        head = f"{100 * largest_error(options.head_dim):.0f}%"
    clock = DeviceClock(torch.device("cuda", torch.cuda.current_device()))
    print("ready", flush=True)
    for _turn in sys.stdin:
        for text in options.shape:
            shape = *map(int, text.split("x")), options.head_dim
            times, errors = time_one(clock, sdpa_cudnn.function if name == CUDNN else _ours, shape, not options.full)
            columns = [f"{ms:.4f}" for ms in times], [f"{error:.0e}" for error in errors]
            print(f"{name:40} {text:>12} {head:>4} | {' '.join(columns[0])} | {' '.join(columns[1])}", flush=True)
        print("done", flush=True)


class Candidate:
    """A process that runs `serve` for one candidate."""

    def __init__(self, name: str, arguments: list[str]) -> None:
        command = [sys.executable, "-m", __spec__.name, *arguments, "--candidate", name]
        self.name = name
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def wait(self, word: str, seconds: float) -> bool:
        """Print the process's lines until one equals `word`; kill it and return False if none does in time."""
        assert self._process.stdout is not None
        timer = threading.Timer(seconds, self._process.kill)
        timer.start()
        try:
            for line in self._process.stdout:
                if line.strip() == word:
                    return True
                print(line, end="", flush=True)
        finally:
            timer.cancel()
        print(f"{self.name}: ended with {self._process.wait()} after at most {seconds:.0f} s", flush=True)
        return False

    def ask(self) -> None:
        """Ask the process to time its candidate once."""
        assert self._process.stdin is not None
        self._process.stdin.write("turn\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def main() -> None:
    """Compare the candidates in the shapes that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--shape", action="append", required=True, help="batch x heads x length, as 4x16x4096")
    parser.add_argument("--full", action="store_true", help="without the causal mask")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--candidate", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.candidate:
        serve(options)
        return
    if not torch.cuda.is_available() or not rules.runs_on(torch.device("cuda", 0)):
        raise SystemExit("this tunes kernels for compute capability 9.0, with the Triton that they are for")
    began = time.monotonic()
    names = [CUDNN, *(name for name, _ in candidates(padded_width(options.head_dim)))]
    started = [Candidate(name, sys.argv[1:]) for name in names]
    try:
        ready = [
            candidate for candidate in started if candidate.wait("ready", max(1, READY_S - (time.monotonic() - began)))
        ]
        print(f"compiled and compared in {time.monotonic() - began:.0f} s; ms of: forward, both, rows, keys, queries")
        for _turn in range(options.turns):
            for candidate in list(ready):
                candidate.ask()
                if not candidate.wait("done", TURN_S):
                    ready.remove(candidate)
    finally:
        for candidate in started:
            candidate.close()


if __name__ == "__main__":
    main()
