"""Runs `ceiling`: measures the rates at which this device copies memory and multiplies matrices of random numbers.

The numbers are random, since a GPU that multiplies zeros draws less power and clocks higher. The rates go to the host's
record, where jobs that give percentages find them. The record leaves out rates whose size the spec set, or whose times
are doubtful.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from app.specs.ceiling import CeilingCell, CeilingSpec
from workers.jobs._grid import Context, GridRunner, Trial
from workers.jobs._grid.operations import check_timing
from workers.jobs._values import GPU_ONLY, Metric
from workers.outcome import Unsupported
from workers.reporter import Reporter

if TYPE_CHECKING:
    import torch

    from kernels.device_clock import Workload
    from workers.measure.check import Check
    from workers.measure.stopwatch import Stopwatch, Timing

COPY_MIB = {"cpu": 256, "cuda": 2048}
"""Size of the copied tensor by type of device: large enough for the rate to stop growing."""
MATRIX_SIZES = {
    "cpu": {"fp32": 2048, "tf32": 2048, "bf16": 1024, "fp16": 512},
    "cuda": dict.fromkeys(("fp32", "tf32", "bf16", "fp16", "fp8", "fp8_rowwise"), 8192),
}
"""Matrix sizes by type of device and data type: large enough for the rate to stop growing. Data types that a processor
may have to emulate have sizes that take at most a second. The sizes are fixed, since sizes chosen by measuring would
give one case different work by chance."""
FP8 = "fp8"
HOST_LOAD = "host_load"
"""A check that is a note where others use less of the processors than the unit. A ceiling bears no load beside it."""
MIN_SAMPLES = 2
"""Smallest number of samples of a recorded rate. Fewer cannot show a disturbance."""


@dataclass
class CeilingContext(Context):
    """The objects that the copy and the products share."""

    watch: Stopwatch
    generator: torch.Generator
    refused: dict[str | None, str] = field(default_factory=dict)
    """Why rates of this job do not serve as ceilings, by the product's data type; None is the copy."""


class CeilingRunner(GridRunner[CeilingContext]):
    kind = "ceiling"

    def open(self, spec: CeilingSpec, devices: Sequence[torch.device], report: Reporter) -> CeilingContext:
        import torch

        from workers.measure.stopwatch import stopwatch

        generator = torch.Generator(devices[0]).manual_seed(spec.seed)
        return CeilingContext(devices, report, stopwatch(devices[0]), generator)

    def precision_of(self, cell: CeilingCell) -> str | None:
        """Return the product's data type, or None for a copy."""
        return FP8 if cell.dtype is not None and cell.dtype.startswith(FP8) else cell.dtype

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
        """Copy one tensor to another. The rate counts the bytes read and the bytes written."""
        import torch

        from workers.measure.memory import translate_oom

        mib = spec.copy_mib or COPY_MIB[context.device.type]
        numbers = mib * 2**20 // 4
        with translate_oom("the tensors that are copied"):
            source = torch.rand(numbers, generator=context.generator, device=context.device)
            target = torch.empty_like(source)
        timing = self._time(lambda: void(target.copy_(source)), spec, context, trial)
        rate, spread = rate_of(1e-9 * 2 * 4 * numbers, timing)
        trial.values.set("copy_gb_per_s", None, [rate])
        trial.values.set("copy_ms", "copy", timing.samples)
        trial.values.set("copy_mib", None, [mib])
        why_not = why_not_to_record("copy_mib", spec.copy_mib, timing, checks_of(trial))
        record(None, why_not, rate, spread, context)

    def _multiply(self, spec: CeilingSpec, precision: str, context: CeilingContext, trial: Trial) -> None:
        from workers.measure.memory import translate_oom

        with translate_oom("the matrices"):
            if precision.startswith(FP8) and context.device.type == "cpu":
                raise Unsupported(f"{precision}: a CPU only emulates it, so it has no such rate")
            size = spec.matrix_size or MATRIX_SIZES[context.device.type][precision]
            work = self._make_product(size, precision, context)
        timing = self._time(work, spec, context, trial)
        rate, spread = rate_of(1e-12 * 2 * size**3, timing)
        trial.values.set("tflops", None, [rate])
        trial.values.set("product_ms", "product", timing.samples)
        trial.values.set("matrix_size", None, [size])
        why_not = why_not_to_record("matrix_size", spec.matrix_size, timing, checks_of(trial))
        record(precision, why_not, rate, spread, context)

    def _time(self, work: Workload, spec: CeilingSpec, context: CeilingContext, trial: Trial) -> Timing:
        from workers.measure.memory import translate_oom

        trial.monitor.start(warm=False)
        with translate_oom("the call"):
            timing = context.watch.time(work, warmup=spec.warmup_steps, calls=spec.measure_steps)
        trial.checks += check_timing(timing, context.device)
        trial.values.set("host_us", None, timing.host_us, GPU_ONLY)
        return timing

    def _make_product(self, size: int, precision: str, context: CeilingContext) -> Workload:
        import torch

        from workers.measure.linear_products import scaled_product
        from workers.model.precision import PRECISIONS

        dtype = torch.bfloat16 if precision.startswith(FP8) else PRECISIONS[precision].compute_dtype
        device = context.device
        a, b = (torch.randn(size, size, generator=context.generator, device=device).to(dtype) for _ in range(2))
        if precision.startswith(FP8):
            left, right = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
            return scaled_product(left, right, by_row=precision != FP8, fast=True)
        out = torch.empty_like(a)
        return lambda: void(torch.mm(a, b, out=out))


RUNNER = CeilingRunner()


def rate_of(work: float, timing: Timing) -> tuple[float, float]:
    """Return the work of one call per second at the median time, and the fastest sample's rate less the slowest's."""
    samples = timing.samples
    return 1e3 * work / statistics.median(samples), 1e3 * work / min(samples) - 1e3 * work / max(samples)


def checks_of(trial: Trial) -> list[Check]:
    """Return the checks of a rate's times, and those of the devices and the host meanwhile."""
    trial.monitor.watch(last=True)
    return trial.monitor.with_watched(trial.checks)


def why_not_to_record(field: str, size: int | None, timing: Timing, checks: Sequence[Check]) -> str | None:
    """Return the reason why a rate must not serve as a ceiling; None if it may. `field`: the field of the spec that
    chooses the size. `size`: the size that the spec chose; None: the device's own size was taken."""
    if size is not None:
        return f"{field} was chosen, and a device reaches its ceiling at some sizes only: leave it out"
    if len(timing.samples) < MIN_SAMPLES:
        return f"{len(timing.samples)} samples are too few to tell whether anything disturbed them"
    failed = [
        f"{check.name}: {check.detail}"
        for check in checks
        if not check.ok and (check.severity != "note" or check.name == HOST_LOAD)
    ]
    return f"something disturbed it: {'; '.join(failed)}" if failed else None


def record(precision: str | None, reason: str | None, rate: float, spread: float, context: CeilingContext) -> None:
    """Record the rate, with its spread, of the product in `precision` (None: of the copy) for later jobs, or log the
    `reason` against it."""
    from workers.measure.ceilings import Ceilings

    products, copy = ({}, rate) if precision is None else ({precision: rate}, None)
    if reason is None:
        try:
            Ceilings(context.report.ceilings).record(context.device, products, copy, spread=spread)
        except OSError as error:  # the job still reports the rate
            reason = str(error)
    if reason is not None:
        context.refused[precision] = reason
        sys.stderr.write(f"{precision or 'copy'}: not recorded as this device's ceiling: {reason}\n")


def void(_result: object) -> None:
    """Discard a call's result."""
