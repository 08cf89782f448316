"""Times the host's part of a call of attention, and a user's loop of short calls, beside torch's own attention.

    python -m benchmarks.attention_host [--shape 4x25x512x64 --shape 8x16x1024x64] [--compiled]

One line per shape and implementation: microseconds in which the host issues a forward pass, and forward with backward,
each call timed by itself after the device was idle; and microseconds per call of a loop of either, from its first call
until the device has done the last, which is the longer of the host's and the device's time. A loop's later calls cost
the host less than its first ones. In brackets is the ratio to cuDNN, the median of the rounds' ratios. Implementations
take turns in each round, since a host's speed drifts. torch's backend is chosen once, outside the loops. `--compiled`
times the same calls inside a function that torch.compile has compiled.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kernels.attention.flash_triton import flash_attention

REFERENCE = "sdpa_cudnn"
BACKENDS = {
    "triton": None,
    REFERENCE: SDPBackend.CUDNN_ATTENTION,
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
}
ISSUED = 10
"""Calls that the host issues before it waits for the device: few, so that it never waits for room in the queue."""
LOOP = 50
"""Calls of a user's loop."""
WARMUP = 20

Call = Callable[[], object]


@dataclass(frozen=True)
class Times:
    """One round of one call: microseconds."""

    host: float
    """The host issues the call."""
    loop: float
    """Of a loop, per call, until the device is done."""


def measure(call: Call) -> Times:
    """Time a call once in both ways."""
    torch.cuda.synchronize()
    issued = []
    for _ in range(ISSUED):
        begun = time.perf_counter()
        call()
        issued.append(time.perf_counter() - begun)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(LOOP):
        call()
    torch.cuda.synchronize()
    return Times(1e6 * statistics.median(issued), 1e6 * (time.perf_counter() - begun) / LOOP)


def attend(q: Tensor, k: Tensor, v: Tensor, name: str) -> Tensor:
    """Causal attention by one of `BACKENDS`; torch's backend is that of the surrounding context."""
    if name == "triton":
        return flash_attention(q, k, v, True)
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def chosen(name: str) -> AbstractContextManager[None]:
    """The context in which torch takes a backend, or none."""
    backend = BACKENDS[name]
    return nullcontext() if backend is None else sdpa_kernel(backend)


def passes(name: str, shape: tuple[int, ...], *, compiled: bool) -> tuple[Call, Call]:
    """A forward pass, and forward with backward, of new inputs."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, gradient = (torch.randn(shape, device="cuda", generator=generator).bfloat16() for _ in range(4))
    leaves = [one.detach().requires_grad_() for one in (q, k, v)]

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, name)

    if compiled:
        torch._dynamo.reset()  # each of these functions is one piece of code to it, and it compiles that so often only
        function = torch.compile(function, fullgraph=True, dynamic=False)

    def forward() -> object:
        return function(q, k, v)

    def both() -> object:
        return torch.autograd.grad(function(*leaves), leaves, gradient)

    return forward, both


def rows(shape: tuple[int, ...], rounds: int, *, compiled: bool) -> Iterator[str]:
    """Measure all implementations in turns; yield a row of Markdown for each."""
    calls = {name: passes(name, shape, compiled=compiled) for name in BACKENDS}
    for name, pair in calls.items():
        with chosen(name):
            for call in pair:
                for _ in range(WARMUP):
                    call()
    taken: dict[str, list[tuple[Times, Times]]] = {name: [] for name in BACKENDS}
    for _ in range(rounds):
        for name, (forward, both) in calls.items():
            with chosen(name):
                taken[name].append((measure(forward), measure(both)))
    title = f"{'x'.join(map(str, shape))}{', compiled' if compiled else ''}"
    for name, samples in taken.items():
        columns = []
        for which in ("host", "loop"):
            for index in (0, 1):
                mine = [getattr(sample[index], which) for sample in samples]
                others = [getattr(sample[index], which) for sample in taken[REFERENCE]]
                ratio = statistics.median(one / other for one, other in zip(mine, others, strict=True))
                columns.append(f"{statistics.median(mine):.1f} ({ratio:.2f})")
        yield f"| {title} | {name} | {' | '.join(columns)} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", help="batch x heads x length x head dimension")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--compiled", action="store_true", help="inside a function that torch.compile has compiled")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this measures GPU kernels: run it on a host with a GPU")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}")
    print("| shape | by | host: forward, µs | both | loop: forward, µs a call | both |\n|---|---|---:|---:|---:|---:|")
    for text in options.shape or ["4x25x512x64", "8x16x1024x64"]:
        shape = tuple(map(int, text.split("x")))
        for row in rows(shape, options.rounds, compiled=options.compiled):
            print(row, flush=True)


if __name__ == "__main__":
    main()
