"""Runs `ceiling`: what this device reaches, copying memory and multiplying matrices of random numbers.

Random, since a GPU that multiplies zeros draws less power and clocks higher. The median of each goes to the host's
record, where the jobs that give percentages find it; unless a size was chosen for it, or its times vary too much.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from app.settings import Settings
from app.specs.ceiling import CeilingSpec
from workers.jobs._base import Reporter, Unit
from workers.outcome import RunnerError, Unsupported
from workers.torch_host import choose_device, set_precision, why_no_precision

if TYPE_CHECKING:
    import torch

    from workers.measure.operations import Stopwatch

COPY_MIB = {"cpu": 256, "cuda": 2048}
"""By type of device: as large as it takes for the rate to stop growing."""
GPU_MATRIX_SIZE = 8192
CPU_MATRIX_SIZES = (256, 512, 1024, 2048, 4096)
LONG_ENOUGH_S = 0.02
"""A processor, which may have to emulate a data type, gets the first size whose product takes as long."""


class CeilingRunner:
    """The runner of kind `ceiling`."""

    kind = "ceiling"

    def plan(self, spec: CeilingSpec) -> list[Unit]:
        """One unit for all."""
        return [Unit(title="copy and matrix product")]

    def run(self, spec: CeilingSpec, unit: Unit, report: Reporter) -> None:
        """Measure, report, and record for the jobs to come.

        Raises:
            Unsupported: there is no such device.
        """
        from workers.measure import environment
        from workers.measure.ceilings import Ceilings
        from workers.measure.operations import stopwatch
        from workers.measure.validity import Monitor, check_many

        device = choose_device(spec.device)
        report.environment(environment.fingerprint(device))
        monitor = Monitor(device)
        bench = Bench(spec, device, stopwatch(device))
        found: dict[str | None, Sequence[float]] = {}
        """Rates by precision; None: of the copy."""
        total = 1 + len(spec.dtypes)
        for index, precision in enumerate([None, *spec.dtypes]):
            report.progress(index, total, "copy" if precision is None else f"matrix product, {precision}")
            rates = bench.copy(report) if precision is None else bench.product(precision, report)
            if rates:
                found[precision] = rates
            monitor.watch(last=index + 1 == total)
        report.validity(monitor.conclude([check_many({f"{key or 'copy'}": rates for key, rates in found.items()})]))
        medians = {
            precision: statistics.median(rates)
            for precision, rates in found.items()
            if not tell(precision, why_not_to_record(spec, precision, rates))
        }
        copy = medians.pop(None, None)
        if medians or copy is not None:
            Ceilings(Settings().ceilings_dir).record(device, {str(name): rate for name, rate in medians.items()}, copy)
        report.progress(total, total, "done")


RUNNER = CeilingRunner()


class Bench:
    """One process at work on a job."""

    def __init__(self, spec: CeilingSpec, device: torch.device, watch: Stopwatch) -> None:
        import torch

        self._spec = spec
        self._device = device
        self._watch = watch
        self._generator = torch.Generator(device).manual_seed(spec.seed)

    def copy(self, report: Reporter) -> list[float]:
        """Rates in GB/s, read and written, of copying one tensor to another; empty if that was impossible."""
        import torch

        mib = self._spec.copy_mib or COPY_MIB[self._device.type]
        numbers = mib * 2**20 // 4

        def make() -> Callable[[], None]:
            source = torch.rand(numbers, generator=self._generator, device=self._device)
            target = torch.empty_like(source)
            return lambda: void(target.copy_(source))

        case = {"operation": "copy", "dtype": "fp32", "matrix_size": None, "copy_mib": mib}
        return self._rates(make, 1e-9 * 2 * 4 * numbers, ("copy_gb_per_s", "GB/s"), case, report)

    def product(self, precision: str, report: Reporter) -> list[float]:
        """Rates in TFLOP/s of the product of two square matrices; empty if that was impossible."""
        size = self._spec.matrix_size or self._matrix_size(precision)

        def make() -> Callable[[], None]:
            if reason := why_no_precision(self._device, precision):
                raise Unsupported(reason)
            set_precision(precision)
            return self._make_product(size, precision)

        case = {"operation": "matrix product", "dtype": precision, "matrix_size": size, "copy_mib": None}
        return self._rates(make, 1e-12 * 2 * size**3, ("tflops", "TFLOP/s"), case, report)

    def _make_product(self, size: int, precision: str) -> Callable[[], None]:
        import torch

        from workers.model.precision import PRECISIONS

        dtype = PRECISIONS[precision].compute_dtype
        a, b = (torch.randn(size, size, generator=self._generator, device=self._device).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        return lambda: void(torch.mm(a, b, out=out))

    def _matrix_size(self, precision: str) -> int:
        if self._device.type == "cuda":
            return GPU_MATRIX_SIZE
        for size in CPU_MATRIX_SIZES:
            call = self._make_product(size, precision)
            if min(self._watch.time(call, prepare=nothing, warmup=0, calls=2)) >= 1e3 * LONG_ENOUGH_S:
                break
        return size

    def _rates(
        self,
        make: Callable[[], Callable[[], None]],
        amount: float,
        metric: tuple[str, str],
        case: dict[str, Any],
        report: Reporter,
    ) -> list[float]:
        """Report `amount` per second of the call that `make` gives, with random operands of its own."""
        from workers.measure.environment import device_name
        from workers.measure.measurement import Measurement
        from workers.measure.memory import OutOfMemory, memory_needed_for

        case |= {"device": device_name(self._device), "warmup_steps": self._spec.warmup_steps}
        spec = self._spec
        outcome, reason, rates = "ok", None, list[float]()
        try:
            with memory_needed_for("the operands or the call"):
                call = make()
                times = self._watch.time(call, prepare=nothing, warmup=spec.warmup_steps, calls=spec.measure_steps)
            rates = [1e3 * amount / milliseconds for milliseconds in times]
        except OutOfMemory as error:
            outcome, reason = "oom", str(error)
        except RunnerError as error:
            outcome, reason = error.code, str(error)
        report.measure(Measurement(case, None, *metric, outcome, reason, rates or None))
        return rates


def why_not_to_record(spec: CeilingSpec, precision: str | None, rates: Sequence[float]) -> str | None:
    """Why these rates, of the products in `precision` or of the copy (None), are no ceiling to measure others by; None
    if they are.
    """
    from workers.measure.statistics import coefficient_of_variation
    from workers.measure.validity import MAX_VARIATION

    field, size = ("copy_mib", spec.copy_mib) if precision is None else ("matrix_size", spec.matrix_size)
    if size is not None:
        return f"{field} was chosen, and a device reaches its ceiling at some sizes only: leave it out"
    variation = coefficient_of_variation(rates)
    if variation is None:
        return f"{len(rates)} samples are too few to tell whether anything disturbed them"
    if variation > MAX_VARIATION:
        return f"something disturbed it: coefficient of variation {variation:.1%}, limit {MAX_VARIATION:.0%}"
    return None


def tell(precision: str | None, reason: str | None) -> str | None:
    """The reason, which the job's log has, too."""
    if reason is not None:
        sys.stderr.write(f"{precision or 'copy'}: not recorded as this device's ceiling: {reason}\n")
    return reason


def void(_result: object) -> None:
    """A call's result is of no interest."""


def nothing() -> None:
    """Operands stay as they are between calls."""
