"""What buckets of gradients should add to a step, by their size: `parallel.bucket_size` with the ranks' own all-reduce.

The ranks time all-reduces after the steps, as kind `collective` does, of sizes up to that of all gradients. Latency,
bandwidth and the backward pass without communication then tell what a bucket of any size leaves exposed.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from app.specs.ddp import WITH_BUCKETS, DdpSpec
from parallel.bucket_size import Fit, Line, exposed, fit
from workers.jobs._latency_fits import BENT, FIT_COLUMNS, NO_LINE, fit_rows
from workers.jobs._values import Values
from workers.measure.table import Column, Scalar
from workers.reporter import Reporter

if TYPE_CHECKING:
    from workers.jobs.ddp.context import RankContext

MB = 2**20
PREDICTED = "predicted_exposed_ms"
WARM_UP, CALLS = 2, 10
"""Calls of each size that leave no sample, and that do."""
SMALLEST, LARGEST = 2**12, 2**27
"""Bytes of the tensors, each four times as large as the one before, and all gradients at most."""
POINTS = 24
"""Bucket sizes of the table, evenly on a logarithmic scale."""
COLUMNS = (
    *Column.parse(
        "what, size_mb: number MB, low_mb: number MB, high_mb: number MB, buckets: number, "
        "communication_ms: number ms, hidden_ms: number ms"
    ),
    Column(PREDICTED, "number", "ms"),
    *Column.parse(
        "predicted_low_ms: number ms, predicted_high_ms: number ms, exposed_communication_ms: number ms, note"
    ),
)
"""Columns of the table `bucket-size`; MB are 2²⁰ bytes, as in `bucket_size_mb`."""


def has_buckets(spec: DdpSpec) -> bool:
    """Return True if the strategy has buckets that travel."""
    return spec.strategy in WITH_BUCKETS and spec.world_size > 1 and spec.step_code is None


def predicts(spec: DdpSpec) -> bool:
    """Return True if its buckets are predicted: on a CPU, messages take the cores that compute, and torch divides
    gradients in its own way."""
    return has_buckets(spec) and spec.strategy == "bucketed" and spec.backend == "nccl"


def time_all_reduces(context: RankContext, total: int) -> dict[str, list[float]] | None:
    """Time all-reduces on this rank: ms of each size's calls; None if a rank has no memory for a tensor. `total`: bytes
    of all gradients."""
    from workers.measure.collective_timing import CellTimer, TimedCollective

    sizes, size = [], SMALLEST
    while size < min(total, LARGEST):
        sizes.append(size)
        size *= 4
    timer = CellTimer(context.rank, WARM_UP, CALLS, context.spec.seed)
    times = {}
    for position, size in enumerate([*sizes, min(total, LARGEST)]):
        cell = TimedCollective(position, "all_reduce", context.spec.parameter_dtype, size / MB)
        found = timer.timed(cell)
        if found["event"] == "oom":
            return None
        times[str(found["bytes"])] = found["times_ms"]
        context.free_memory()
    return times


def report_buckets(
    spec: DdpSpec,
    found: Sequence[Mapping[str, Any]],
    silent: Sequence[Sequence[Mapping[str, Any]]],
    values: Values,
    report: Reporter,
) -> tuple[float | None, str | None]:
    """Set the predicted exposed communication, and report the tables `fit` and `bucket-size`; return the size of the
    best bucket in MB, None if it is not known, and why the prediction may be wrong.

    `silent` has the turns without communication, as each rank saw them.
    """
    each = [rank["all_reduce"] for rank in found]
    if not all(each):
        values.set(PREDICTED, None, None, "there was no memory for the tensors whose all-reduce is timed")
        return None, None
    times = {
        int(size): [1e-3 * max(call) for call in zip(*(rank[size] for rank in each), strict=True)] for size in each[0]
    }
    report.table("fit", FIT_COLUMNS, fit_rows({("all_reduce", spec.parameter_dtype): times}, spec.seed))
    try:
        line = fit(times, spec.seed)
    except ValueError as error:
        values.set(PREDICTED, None, None, f"all gradients are too small: {error}")
        return None, None
    ranks = [rank for turn in silent for rank in turn]
    backward = [time_ms for rank in ranks for time_ms in rank["phases_ms"].get("backward", ())]
    if not backward:
        values.set(PREDICTED, None, None, "the backward pass was not timed inside the CUDA graph")
        return None, None
    backward_s = 1e-3 * statistics.median(backward)
    gradients, exposed_ms = found[0]["gradient_bytes"], values.samples("exposed_communication_ms", None)
    rows = bucket_rows(spec, line, gradients, backward_s, exposed_ms)
    bent = line.largest_error > BENT
    values.set(PREDICTED, None, None if bent else [float(rows[0][7] or 0)], f"all-reduces: {NO_LINE}")
    report.table("bucket-size", COLUMNS, rows)
    return float(rows[1][1] or 0), None if rows[0][-1] is None else str(rows[0][-1])


def bucket_rows(
    spec: DdpSpec, line: Fit, gradients: Sequence[int], backward_s: float, measured: Sequence[float] | None
) -> list[list[Scalar]]:
    """Return the rows of `bucket-size`: this job's bucket, the best one, and a curve.

    The first two say in their notes why the prediction may be wrong.

    Args:
        line: Through the times of its all-reduces.
        gradients: Bytes of each gradient, in the order of the parameters.
        backward_s: Time of the backward pass without communication.
        measured: Samples of the communication that is exposed in ms; None if it was not measured.
    """
    # Below the smallest size nothing was timed.
    total, least = sum(gradients), min(sum(gradients), min(line.errors))
    ratio = (total / least) ** (1 / (POINTS - 1))
    steps: list[float] = [*(least * ratio**number for number in range(POINTS - 1)), float(total)]
    curve = {size: packed(gradients, size) for size in steps}

    def best_of(one: Line) -> float:
        return min(curve, key=lambda size: exposed(one, curve[size], backward_s))

    own = total if spec.bucket_size_mb is None else min(total, spec.bucket_size_mb * MB)
    low, high = line.interval(best_of)
    exposed_ms = None if measured is None else statistics.median(measured)
    best = best_of(line.line)
    sizes: list[tuple[str, float, list[int], float | None, float | None, float | None]] = [
        ("this job", own, packed(gradients, own), None, None, exposed_ms),
        ("best", best, curve[best], low / MB, high / MB, None),
        *(("curve", size, buckets, None, None, None) for size, buckets in curve.items()),
    ]
    rows = [
        [what, size / MB, low_mb, high_mb, *predicted(line, buckets, backward_s), known_ms]
        for what, size, buckets, low_mb, high_mb, known_ms in sizes
    ]
    note = doubt(line, exposed_ms, *map(float, rows[0][-3:-1]))  # type: ignore[arg-type]
    return [[*row, None if row[0] == "curve" else note] for row in rows]


def packed(gradients: Sequence[int], limit: float) -> list[int]:
    """Return the bytes of the buckets into which `parallel.BucketedDataParallel` divides gradients of so many bytes."""
    import torch

    from parallel.data_parallel import into_buckets

    with torch.device("meta"):
        parameters = [("", torch.nn.Parameter(torch.empty(size, dtype=torch.uint8), False)) for size in gradients]
    return [sum(one.nbytes for _, one in bucket) for bucket in into_buckets(parameters[::-1], limit)]


def doubt(line: Fit, measured_ms: float | None, low_ms: float, high_ms: float) -> str | None:
    """Return why a prediction may be wrong: no line fits, or this job's steps contradict it."""
    if line.largest_error > BENT:
        return NO_LINE
    if measured_ms is not None and not (1 - BENT) * low_ms <= measured_ms <= (1 + BENT) * high_ms:
        return (
            f"this job's steps leave {measured_ms:.4g} ms exposed, not {low_ms:.4g} to {high_ms:.4g}: calls cost more "
            "or less than the wires alone, such as the host's work; compare measured sizes by a sweep"
        )
    return None


def predicted(line: Fit, buckets: Sequence[int], backward_s: float) -> list[Scalar]:
    """Return the number of buckets, and ms: of all calls, hidden, exposed, and the interval of the last."""
    calls, left = sum(map(line.line.seconds, buckets)), exposed(line.line, buckets, backward_s)
    interval = line.interval(lambda drawn: exposed(drawn, buckets, backward_s))
    return [len(buckets), *(1e3 * seconds for seconds in (calls, calls - left, left, *interval))]
