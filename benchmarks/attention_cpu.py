"""The C++ attention side by side with torch's fused one, on the CPU.

Each round calls all implementations in turn, so that a disturbance of the host meets them alike. A ratio compares the
least times, which a disturbance can only raise; beside it stands the median over the rounds of the ratio within one
round.

    python -m benchmarks.attention_cpu [--threads 2] [--rounds 15]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks._shared import print_report
from kernels.attention import cpu
from kernels.attention.cpu.build import COMPILER_FLAGS
from workers.measure.stopwatch import HostStopwatch, Stopwatch

SDPA = "torch SDPA"
Call = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)

    small, large = (1, 4, 1024, 32), (1, 8, 4096, 64)
    table = [
        *rows(small, "forward", forward(small, slow=True), arguments.rounds),
        *rows(large, "forward", forward(large, slow=False), max(3, arguments.rounds // 3)),
        *rows(small, "forward + backward", forward_backward(small), arguments.rounds),
    ]
    flags = " ".join(COMPILER_FLAGS)
    print_report(f"Attention on the CPU, float32, {arguments.threads} threads, all C++ built with {flags}", table)


def forward(shape: tuple[int, int, int, int], *, slow: bool) -> dict[str, Call]:
    """Return the calls to time; `slow` adds those that take seconds where sequences are long."""
    q, k, v = (torch.randn(shape) for _ in range(3))
    calls: dict[str, Call] = {
        SDPA: partial(scaled_dot_product_attention, q, k, v),
        "flash": partial(cpu.flash, q, k, v),
    }
    if slow:
        calls |= {function.__name__: partial(function, q, k, v) for function in (cpu.naive, cpu.blocked, cpu.fused)}
    return calls


def forward_backward(shape: tuple[int, int, int, int]) -> dict[str, Call]:
    tensors = [torch.randn(shape, requires_grad=True) for _ in range(3)]
    grad = torch.randn(shape)

    def both(function: Callable[..., Tensor]) -> object:
        return torch.autograd.grad(function(*tensors), tensors, grad)

    return {SDPA: partial(both, scaled_dot_product_attention), "flash": partial(both, cpu.flash)}


def rows(shape: tuple[int, int, int, int], passes: str, calls: Mapping[str, Call], rounds: int) -> list[dict[str, str]]:
    """Return a table row for each of `calls`."""
    samples = measure(calls, rounds)
    return [
        {
            "shape": str(shape),
            "pass": passes,
            "implementation": name,
            "least ms": f"{min(samples[name]):.2f}",
            "median ms": f"{statistics.median(samples[name]):.2f}",
            "times as fast as SDPA": ratio(samples, SDPA, name),
            "as naive": ratio(samples, "naive", name),
            "intermediates": intermediates(name, shape) if passes == "forward" else "",
        }
        for name in calls
    ]


def measure(calls: Mapping[str, Call], rounds: int, watch: Stopwatch | None = None) -> dict[str, list[float]]:
    """Milliseconds of each round's best call; what is quick is called more often, to get past the host's noise.

    Args:
        calls: What is timed, by name.
        rounds: How often all of them have their turn.
        watch: Times them; the host's stopwatch, as in jobs, unless another is given.
    """
    watch = watch or HostStopwatch()
    samples: dict[str, list[float]] = {name: [] for name in calls}
    # The first call builds the library: it is not the one that tells how often to call.
    firsts = {name: watch.time(work(call), warmup=1, calls=1).samples[0] for name, call in calls.items()}
    repeats = {name: min(20, max(1, round(100 / first))) for name, first in firsts.items()}
    for _ in range(rounds):
        for name, call in calls.items():
            samples[name].append(min(watch.time(work(call), warmup=0, calls=repeats[name]).samples))
    return samples


def work(call: Call) -> Callable[[], None]:
    """The call as stopwatches take it: its result is of no interest."""

    def run() -> None:
        call()

    return run


def ratio(samples: Mapping[str, list[float]], baseline: str, name: str) -> str:
    """Write how many times as fast as the baseline: by least times, and in brackets the median over the rounds."""
    if baseline not in samples:
        return ""
    within = statistics.median(a / b for a, b in zip(samples[baseline], samples[name], strict=True))
    return f"{min(samples[baseline]) / min(samples[name]):.2f} ({within:.2f})"


def intermediates(name: str, shape: tuple[int, int, int, int]) -> str:
    if name == SDPA:
        return ""
    batch, heads, length, head_dim = shape
    memory = cpu.memory(name, batch, heads, length, length, head_dim)
    return f"{memory.working / 2**10:.1f} KiB, with the output {memory.total / 2**20:.2f} MiB"


if __name__ == "__main__":
    main()
