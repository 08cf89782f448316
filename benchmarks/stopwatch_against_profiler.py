"""Compares the stopwatch to CUPTI: how long a GPU works on short calls, attention at lengths 128 to 1024.

    python -m benchmarks.stopwatch_against_profiler [--lengths 128 256 512 1024] [--calls 50]

Needs torch and Triton, not the service. Medians in µs. The stopwatch is read twice, alone and while the profiler runs:
"span" is CUPTI's time from the begin of the call's first kernel to the end of its last, "sum" is the time of its
kernels, copies and fills without the gaps between them. The profiler itself slows some calls down (it waits between a
fill and the kernel after it): that is the difference between the two readings of the stopwatch.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Sequence

import torch

from kernels.device_clock import Workload
from kernels.registry import ATTENTION
from workers.measure.busy import Span, device_work
from workers.measure.stopwatch import stopwatch

IMPLEMENTATIONS = ("triton", "sdpa_flash", "sdpa_cudnn")
SHAPE = (8, 16, 64)
"""Batch, heads, head dimension."""
DELAY_KERNEL = "spin_kernel"


def works(name: str, length: int) -> dict[str, Workload]:
    """Return calls of one implementation, causal in bfloat16."""
    batch, heads, head_dim = SHAPE
    function = ATTENTION.load(name).function
    shape = batch, heads, length, head_dim
    q, k, v, gradient = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    inputs = [one.clone().requires_grad_() for one in (q, k, v)]

    def forward() -> None:
        with torch.no_grad():
            function(q, k, v, True)

    def both() -> None:
        torch.autograd.grad(function(*inputs, True), inputs, gradient)

    return {"forward": forward, "forward_backward": both}


def calls_in(spans: Sequence[Span]) -> list[Sequence[Span]]:
    """Return the work that ran between each delay and the flush before the next one."""
    delays = [index for index, span in enumerate(spans) if DELAY_KERNEL in span.name]
    ends = [*(index - 1 for index in delays[1:]), len(spans)]
    return [spans[begin + 1 : end] for begin, end in zip(delays, ends, strict=True)]


def row(name: str, length: int, what: str, work: Workload, calls: int) -> dict[str, str]:
    """Measure one row of the table."""
    watch = stopwatch(torch.device("cuda"))
    alone = watch.time(work, warmup=None, calls=calls)
    profiled = [alone]
    spans = device_work(lambda: profiled.append(watch.time(work, warmup=5, calls=calls)))
    parts = [part for part in calls_in(spans) if part]
    span_us = statistics.median(1e-3 * (part[-1].end_ns - part[0].begin_ns) for part in parts)
    sum_us = statistics.median(1e-3 * sum(one.end_ns - one.begin_ns for one in part) for part in parts)
    alone_us, profiled_us = (1e3 * statistics.median(timing.samples) for timing in (alone, profiled[-1]))
    return {
        "by": name,
        "length": str(length),
        "pass": what,
        "alone": f"{alone_us:.2f}",
        "profiled": f"{profiled_us:.2f}",
        "span": f"{span_us:.2f}",
        "sum": f"{sum_us:.2f}",
        "launches": f"{statistics.median(map(len, parts)):.0f}",
        "profiled ÷ span": f"{profiled_us / span_us - 1:+.1%}",
        "alone ÷ span": f"{alone_us / span_us - 1:+.1%}",
        "alone ÷ sum": f"{alone_us / sum_us - 1:+.1%}",
        "host": f"{statistics.median(alone.host_us or [0.0]):.0f}",
        "host-bound": "yes" if alone.host_bound else "no",
    }


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="+", type=int, default=[128, 256, 512, 1024])
    parser.add_argument("--calls", type=int, default=50)
    options = parser.parse_args()
    torch.manual_seed(0)
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; bfloat16, causal; batch, heads, head dim: {SHAPE}"
    )
    for number, (length, name) in enumerate(itertools.product(options.lengths, IMPLEMENTATIONS)):
        for what, work in works(name, length).items():
            cells = row(name, length, what, work, options.calls)
            if number == 0 and what == "forward":
                print(f"\n| {' | '.join(cells)} |\n|{'---|' * len(cells)}")
            print(f"| {' | '.join(cells.values())} |", flush=True)


if __name__ == "__main__":
    main()
