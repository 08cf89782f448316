"""Times implementations of attention in turns, in one process, and prints how their times compare.

    python -m benchmarks.attention_turns    # the rows of docs/measurements.md, after compiling for them
    python -m benchmarks.attention_turns --implementations triton flash_attn_4 --turns 20 --only 16384,64

In each turn every implementation makes some calls, in an order drawn anew. Cells are of the forward pass / both passes:
the median of the turns' times in ms and, beside the others, the median of the first one's time divided by theirs in the
same turn, with its interval of 95 %; and the largest relative difference of their results from the first one's. What is
not installed, or does not compute a row, is told and left out. Torch and Triton are enough to run it.
"""

import argparse
import random
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flopwatch.intervals import median_interval
from kernels.device_clock import DeviceClock, host_lap_ms
from kernels.registry import ATTENTION

CALLS = 5
"""Calls of a turn, of which the median counts."""
LENGTHS = [
    421, 80, 266, 80, 129, 344, 522, 59, 1511, 117, 1064, 87, 111, 904, 235, 495, 42, 279, 107, 808, 326, 876,
    390, 208, 190, 215, 159, 678, 214, 161, 547, 352, 1414, 155, 693, 167, 62, 153, 360, 1403
]  # fmt: skip
"""Lengths of 40 documents, 16 384 positions in all."""


class Row(NamedTuple):
    batch: int
    heads: int
    length: int
    head_dim: int
    mask: str = "causal"

    def __str__(self) -> str:
        return ", ".join(map(str, self))


ROWS = [
    Row(1, 16, 16384, 64), Row(1, 16, 16384, 64, "no mask"), Row(1, 16, 16384, 128), Row(2, 32, 32768, 128),
    Row(4, 16, 4096, 64), Row(4, 16, 4096, 128, "no mask"), Row(2, 32, 8192, 256), Row(4, 32, 2048, 80),
    Row(8, 16, 1024, 64), Row(4, 25, 512, 64),
    *(Row(1, 16, 16384, head_dim, "window") for head_dim in (64, 80, 128, 256)),
    *(Row(1, 16, 16384, head_dim, "documents") for head_dim in (64, 80, 128)),
]  # fmt: skip
Passes = Callable[[bool], list[Tensor]]


def passes(name: str, row: Row, device: torch.device) -> Passes:
    """Return what makes the forward pass, or both of them if it is told so, and gives the results.

    FlashAttention gets its inputs as it stores them, all heads of a position side by side.
    """
    function, is_causal = ATTENTION.load(name).function, row.mask != "no mask"
    options: dict[str, Any] = {"window": 1024} if row.mask == "window" else {}
    if row.mask == "documents":
        ends = torch.tensor(LENGTHS, dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
        options["document_ends"] = ends.clamp(max=row.length)
    torch.manual_seed(0)
    shape = row.batch, row.length, row.heads, row.head_dim
    rows = [torch.randn(shape, dtype=torch.bfloat16, device=device).transpose(1, 2) for _ in range(4)]
    *inputs, gradient = rows if name.startswith("flash_attn") else map(torch.Tensor.contiguous, rows)
    inputs = [one.requires_grad_() for one in inputs]

    def call(both: bool) -> list[Tensor]:
        with torch.set_grad_enabled(both):
            out = function(*inputs, is_causal, **options)
        return [out.detach(), *(torch.autograd.grad(out, inputs, gradient) if both else ())]

    return call


def take_turns(calls: Sequence[Passes], both: bool, turns: int, clock: DeviceClock | None) -> list[list[float]]:
    """Return each call's times in the turns, in ms: of the device, or of the host if there is no clock."""
    times: list[list[float]] = [[] for _ in calls]
    order = random.Random(0)
    for _ in range(turns):
        for place in order.sample(range(len(calls)), len(calls)):
            work: Any = partial(calls[place], both)
            if clock is not None:
                clock.forget()
            laps = [host_lap_ms(work) if clock is None else clock.lap(work).device_ms for _ in range(CALLS)]
            times[place].append(statistics.median(laps))
    return times


def against(first: list[float], times: list[float]) -> str:
    """Return the median of a ratio, with its interval."""
    ratios = [one / other for one, other in zip(first, times, strict=True)]
    low, high = median_interval(ratios) or (min(ratios), max(ratios))
    return f"{statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})"


def compare(row: Row, names: Sequence[str], turns: int, clock: DeviceClock | None, device: torch.device) -> None:
    """Print a table's lines: one for each implementation that computes the row."""
    calls: list[Passes] = []
    told: list[tuple[str, float]] = []
    expected: list[Tensor] = []
    for name in names:
        try:
            results = (call := passes(name, row, device))(True)
        except RuntimeError as error:
            print(f"{name}: {row}: {error}"[:300])
            if not calls:  # what the others are compared with
                return
            continue
        expected = expected or results
        pairs = [(one.float(), other.float()) for one, other in zip(results, expected, strict=True)]
        told.append((name, max(float((one - other).norm() / other.norm()) for one, other in pairs)))
        calls.append(call)
    times = [take_turns(calls, both, turns, clock) for both in (False, True)]
    for place, (name, difference) in enumerate(told):
        medians = " / ".join(f"{statistics.median(one[place]):.4g}" for one in times)
        ratios = " / ".join(against(one[0], one[place]) for one in times) if place else ""
        print(f"| {row} | {name} | {medians} | {ratios} | {difference:.1g} |", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--implementations", nargs="+", default=["triton", "flash_attn_4", "sdpa_cudnn"])
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--only", nargs="+", default=[""], help="words, one of which a row has: 'documents' '4096, 64'")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    options = parser.parse_args(arguments)
    clock = DeviceClock(options.device) if options.device.type == "cuda" else None
    print("| batch, heads, length, head dim, mask | implementation | ms | first's ÷ its | difference |")
    print("|---|---|---|---|---|")
    for row in ROWS:
        if any(word in str(row) for word in options.only):
            compare(row, options.implementations, options.turns, clock, options.device)


if __name__ == "__main__":
    main()
