"""Runs `ceiling`: what this device reaches, copying memory and multiplying matrices of random numbers.

Random, since a GPU that multiplies zeros draws less power and clocks higher. The rates go to the host's record, where
the jobs that give percentages find them; a rate stays out of it if its size was chosen, or its times are doubtful.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.specs.ceiling import CeilingCell, CeilingSpec
from workers.jobs._base import Reporter
from workers.jobs._cells import GPU_ONLY, check_timing
from workers.jobs._grid import Context, GridRunner, Trial
from workers.jobs._values import Metric

if TYPE_CHECKING:
    import torch

    from workers.measure.check import Check
    from workers.measure.stopwatch import Stopwatch, Timing

COPY_MIB = {"cpu": 256, "cuda": 2048}
"""By type of device: as large as it takes for the rate to stop growing."""
GPU_MATRIX_SIZE = 8192
CPU_MATRIX_SIZES = (256, 512, 1024, 2048, 4096)
LONG_ENOUGH_S = 0.02
"""A processor, which may have to emulate a data type, gets the first size whose product takes as long."""
MIN_SAMPLES = 2
"""Fewer do not tell whether anything disturbed them."""

Work = Callable[[], None]


@dataclass
class CeilingContext(Context):
    """What the copy and the products share."""

    watch: Stopwatch
    generator: torch.Generator


class CeilingRunner(GridRunner[CeilingContext]):
    """The runner of kind `ceiling`."""

    kind = "ceiling"

    def open(self, spec: CeilingSpec, devices: Sequence[torch.device], report: Reporter) -> CeilingContext:
        import torch

        from workers.measure.stopwatch import stopwatch

        generator = torch.Generator(devices[0]).manual_seed(spec.seed)
        return CeilingContext(devices, report, stopwatch(devices[0]), generator)

    def precision_of(self, cell: CeilingCell) -> str | None:
        """The product's data type; a copy has none."""
        return cell.dtype

    def metrics(self, spec: CeilingSpec, cell: CeilingCell) -> list[Metric]:
        host = Metric("host_us", None, "µs")
        if cell.dtype is None:
            rate, size = Metric("copy_gb_per_s", None, "GB/s"), Metric("copy_mib", None, "MiB")
            return [rate, Metric("copy_ms", "copy", "ms"), host, size]
        rate, size = Metric("tflops", None, "TFLOP/s"), Metric("matrix_size", None, "rows")
        return [rate, Metric("product_ms", "product", "ms"), host, size]

    def measure(self, spec: CeilingSpec, cell: CeilingCell, context: CeilingContext, trial: Trial) -> None:
        if cell.dtype is None:
            self._copy(spec, context, trial)
        else:
            self._multiply(spec, cell.dtype, context, trial)

    def _copy(self, spec: CeilingSpec, context: CeilingContext, trial: Trial) -> None:
        """Copy one tensor to another; bytes count that are read, and those that are written."""
        import torch

        from workers.measure.memory import memory_needed_for

        mib = spec.copy_mib or COPY_MIB[context.device.type]
        numbers = mib * 2**20 // 4
        with memory_needed_for("the tensors that are copied"):
            source = torch.rand(numbers, generator=context.generator, device=context.device)
            target = torch.empty_like(source)
        timing = self._time(lambda: void(target.copy_(source)), spec, context, trial)
        rate = 1e-9 * 2 * 4 * numbers / median_s(timing)
        trial.values.set("copy_gb_per_s", None, [rate])
        trial.values.set("copy_ms", "copy", timing.samples)
        trial.values.set("copy_mib", None, [mib])
        record(None, why_not_to_record("copy_mib", spec.copy_mib, timing, trial.checks), rate, context)

    def _multiply(self, spec: CeilingSpec, precision: str, context: CeilingContext, trial: Trial) -> None:
        """Multiply two square matrices."""
        from workers.measure.memory import memory_needed_for

        with memory_needed_for("the matrices"):
            size = spec.matrix_size or self._matrix_size(precision, context)
            work = self._make_product(size, precision, context)
        timing = self._time(work, spec, context, trial)
        rate = 1e-12 * 2 * size**3 / median_s(timing)
        trial.values.set("tflops", None, [rate])
        trial.values.set("product_ms", "product", timing.samples)
        trial.values.set("matrix_size", None, [size])
        record(precision, why_not_to_record("matrix_size", spec.matrix_size, timing, trial.checks), rate, context)

    def _time(self, work: Work, spec: CeilingSpec, context: CeilingContext, trial: Trial) -> Timing:
        from workers.measure.memory import memory_needed_for

        trial.monitor.start(warm=False)
        with memory_needed_for("the call"):
            timing = context.watch.time(work, warmup=spec.warmup_steps, calls=spec.measure_steps)
        trial.checks += check_timing(timing, context.device)
        trial.values.set("host_us", None, timing.host_us, GPU_ONLY)
        return timing

    def _make_product(self, size: int, precision: str, context: CeilingContext) -> Work:
        import torch

        from workers.model.precision import PRECISIONS

        dtype, device = PRECISIONS[precision].compute_dtype, context.device
        a, b = (torch.randn(size, size, generator=context.generator, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        return lambda: void(torch.mm(a, b, out=out))

    def _matrix_size(self, precision: str, context: CeilingContext) -> int:
        if context.device.type == "cuda":
            return GPU_MATRIX_SIZE
        for size in CPU_MATRIX_SIZES:
            call = self._make_product(size, precision, context)
            if min(context.watch.time(call, warmup=0, calls=2).samples) >= 1e3 * LONG_ENOUGH_S:
                break
        return size


RUNNER = CeilingRunner()


def median_s(timing: Timing) -> float:
    """The median time of one call, in seconds."""
    return 1e-3 * statistics.median(timing.samples)


def why_not_to_record(field: str, size: int | None, timing: Timing, checks: Sequence[Check]) -> str | None:
    """Why a rate is no ceiling to measure others by; None if it is.

    Args:
        field: The field of the spec that chooses the size.
        size: What the spec chose; None: the device's own size was taken.
        timing: The times that the rate follows from.
        checks: What they tell of their validity.
    """
    if size is not None:
        return f"{field} was chosen, and a device reaches its ceiling at some sizes only: leave it out"
    if len(timing.samples) < MIN_SAMPLES:
        return f"{len(timing.samples)} samples are too few to tell whether anything disturbed them"
    failed = [f"{check.name}: {check.detail}" for check in checks if not check.ok and check.severity != "note"]
    return f"something disturbed it: {'; '.join(failed)}" if failed else None


def record(precision: str | None, reason: str | None, rate: float, context: CeilingContext) -> None:
    """Keep the rate of the product in `precision` (None: of the copy) for the jobs to come; or log why not."""
    from workers.measure.ceilings import Ceilings

    products, copy = ({}, rate) if precision is None else ({precision: rate}, None)
    if reason is None:
        try:
            Ceilings(context.report.ceilings).record(context.device, products, copy)
        except OSError as error:  # the rate itself was measured all the same
            reason = str(error)
    if reason is not None:
        sys.stderr.write(f"{precision or 'copy'}: not recorded as this device's ceiling: {reason}\n")


def void(_result: object) -> None:
    """A call's result is of no interest."""
