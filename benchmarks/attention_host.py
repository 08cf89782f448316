"""Times the host's part of a call of attention, and a user's loop of short calls, beside torch's own attention.

    python -m benchmarks.attention_host [--shape 4x25x512x64 --shape 8x16x1024x64] [--compiled]

One row per shape and implementation: microseconds in which the host issues a forward pass, and forward with backward,
each call timed by itself after the device was idle; and microseconds per call of a loop of either, until the device has
done the last call. A loop's later calls cost the host less than its first ones. In brackets is the ratio to cuDNN, the
median of the rounds' ratios: implementations take turns in each round, since a host's speed drifts. torch's backend is
chosen once, outside the loops. `--compiled` times the same calls inside a function that torch.compile has compiled.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

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
DEVICE = "cuda"
COLUMNS = ("shape", "by", "host: forward, µs", "both", "loop: forward, µs a call", "both")

Call = Callable[[], object]


def issue_us(call: Call) -> float:
    """Return the time in which the host issues a call, after the device was idle."""
    torch.cuda.synchronize()
    issued = []
    for _ in range(ISSUED):
        begun = time.perf_counter()
        call()
        issued.append(time.perf_counter() - begun)
    return 1e6 * statistics.median(issued)


def loop_us(call: Call) -> float:
    """Return the time per call of a loop, until the device is done."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(LOOP):
        call()
    torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - begun) / LOOP


def chosen(name: str) -> AbstractContextManager[None]:
    """Return the context in which torch takes a backend, or none."""
    backend = BACKENDS[name]
    return nullcontext() if backend is None else sdpa_kernel(backend)


def passes(name: str, shape: tuple[int, ...], *, compiled: bool) -> tuple[Call, Call]:
    """Return a forward pass, and forward with backward, of new inputs, causal in bfloat16."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    q, k, v, gradient = (torch.randn(shape, device=DEVICE, generator=generator).bfloat16() for _ in range(4))
    leaves = [one.detach().requires_grad_() for one in (q, k, v)]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if name == "triton":
            out: Tensor = flash_attention(q, k, v, True)
            return out
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    if compiled:
        torch._dynamo.reset()  # each of these functions is one piece of code to it, and it compiles that so often only
        attend = torch.compile(attend, fullgraph=True, dynamic=False)
    return lambda: attend(q, k, v), lambda: torch.autograd.grad(attend(*leaves), leaves, gradient)


def rows(shape: tuple[int, ...], rounds: int, *, compiled: bool) -> Iterator[list[str]]:
    """Measure all implementations in turns; yield a row of the table for each."""
    calls = {name: passes(name, shape, compiled=compiled) for name in BACKENDS}
    for name, both in calls.items():
        with chosen(name):
            for call in WARMUP * both:
                call()
    taken: dict[str, list[list[float]]] = {name: [] for name in BACKENDS}
    for _ in range(rounds):
        for name, both in calls.items():
            with chosen(name):
                taken[name].append([measure(call) for measure in (issue_us, loop_us) for call in both])
    title = f"{'x'.join(map(str, shape))}{', compiled' if compiled else ''}"
    for name, samples in taken.items():
        cells = []
        for mine, others in zip(zip(*samples, strict=True), zip(*taken[REFERENCE], strict=True), strict=True):
            ratio = statistics.median(one / other for one, other in zip(mine, others, strict=True))
            cells.append(f"{statistics.median(mine):.1f} ({ratio:.2f})")
        yield [title, name, *cells]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", help="batch x heads x length x head dimension")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--compiled", action="store_true", help="inside a function that torch.compile has compiled")
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}\n")
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for text in options.shape or ["4x25x512x64", "8x16x1024x64"]:
        for row in rows(tuple(map(int, text.split("x"))), options.rounds, compiled=options.compiled):
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
