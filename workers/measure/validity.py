"""Whether measured numbers can be trusted: checks, and the verdict that they add up to.

"invalid": the numbers are of something else than was asked for. "suspect": something disturbed, or may have disturbed,
the measurement. "valid": no check found anything, which for few samples means little: details say so.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from workers.measure import statistics
from workers.measure.compilation import Compilation, compilation
from workers.measure.environment import gpu_by_nvml
from workers.measure.nvml import THROTTLE_REASONS, Gpu, Reading

MAX_VARIATION = 0.10
MAX_DRIFT = 0.10
MAX_CLOCK_DROP = 0.10
MAX_OTHERS_LOAD = 0.10
MIN_LOAD_SPAN_S = 0.3
"""The kernel counts processor time in ticks of 10 ms: shorter spans tell nothing."""
READ_INTERVAL_S = 1.0
POWER_CAP = 0x04
"""How a GPU runs heavy work at its power limit; told, but no fault of the measurement."""


@dataclass(frozen=True)
class Check:
    """One thing looked at. `severity` is what the verdict becomes if it is not ok."""

    name: str
    ok: bool
    detail: str
    severity: Literal["suspect", "invalid"] = "suspect"


def verdict(checks: Sequence[Check]) -> dict[str, Any]:
    """{"verdict": "valid" | "suspect" | "invalid", "checks": [{"name", "ok", "detail"}]}."""
    failed = {check.severity for check in checks if not check.ok}
    worst = "invalid" if "invalid" in failed else "suspect" if failed else "valid"
    return {
        "verdict": worst,
        "checks": [{"name": check.name, "ok": check.ok, "detail": check.detail} for check in checks],
    }


def check_stability(samples: Sequence[float]) -> list[Check]:
    """Spread and trend of the steps' times."""
    variation = statistics.coefficient_of_variation(samples)
    if variation is None:
        spread = Check("variation", True, f"samples: {len(samples)}, too few to judge")
    else:
        spread = Check("variation", variation <= MAX_VARIATION, f"coefficient of variation {variation:.1%}")
    drift = statistics.drift(samples)
    if drift is None:
        return [spread, Check("drift", True, f"samples: {len(samples)}, too few to judge")]
    return [spread, Check("drift", abs(drift) <= MAX_DRIFT, f"last third {drift:+.1%} against the first")]


def check_many(passes: Mapping[str, Sequence[float]]) -> Check:
    """Spread of many measurements' times, by title: as one check, which names the worst."""
    variations = {title: statistics.coefficient_of_variation(samples) for title, samples in passes.items()}
    known = {title: variation for title, variation in variations.items() if variation is not None}
    if not known:
        return Check("variation", True, f"measurements: {len(passes)}, none with samples enough to judge")
    unstable = [variation for variation in known.values() if variation > MAX_VARIATION]
    worst = max(known, key=lambda title: known[title])
    detail = f"above {MAX_VARIATION:.0%} in {len(unstable)} of {len(passes)}; the worst is {known[worst]:.1%}, {worst}"
    return Check("variation", not unstable, detail)


def check_compilation(before: Compilation, after: Compilation, *, warmup_steps: int) -> list[Check]:
    """Recompilation among the measured steps, and functions that were not compiled. For compiled models only."""
    recompiled = after.graphs - before.graphs
    detail = f"{recompiled} graphs compiled during the measured steps"
    if warmup_steps == 0:
        detail += "; there was no warm-up"
    # Without warm-up, the samples hold the compilation because that was asked for.
    recompiles = Check("recompiles", recompiled == 0, detail, "invalid" if warmup_steps else "suspect")
    fell_back = after.graphs == 0 or after.frames_not_compiled > 0
    return [
        recompiles,
        Check(
            "eager_fallback",
            not fell_back,
            f"{after.graphs} graphs, {after.frames_not_compiled} functions left to eager",
            "invalid",
        ),
        Check("graph_breaks", after.graph_breaks == 0, f"{after.graph_breaks} graph breaks"),
        Check("compile_cache", True, f"{after.cache} when the model was compiled"),
    ]


def check_gpu(readings: Sequence[Reading], own_process: int) -> list[Check]:
    """Throttling, clocks and other processes over a GPU's readings."""
    if not readings:
        unknown = "NVML is not available: not known"
        return [Check(name, False, unknown) for name in ("throttling", "clocks", "other_processes")]
    return [_check_throttling(readings), _check_clocks(readings), _check_processes(readings, own_process)]


def _check_throttling(readings: Sequence[Reading]) -> Check:
    masks = [reading.throttle_reasons for reading in readings if reading.throttle_reasons is not None]
    if not masks:
        return Check("throttling", False, "the device does not tell")
    seen = {bit: text for bit, text in THROTTLE_REASONS.items() if any(mask & bit for mask in masks)}
    return Check("throttling", not (set(seen) - {POWER_CAP}), ", ".join(seen.values()) or "none")


def _check_clocks(readings: Sequence[Reading]) -> Check:
    clocks = [reading.sm_clock_mhz for reading in readings if reading.sm_clock_mhz]
    if not clocks:
        return Check("clocks", False, "the device does not tell")
    drop = 1 - min(clocks) / max(clocks)
    return Check("clocks", drop <= MAX_CLOCK_DROP, f"SM clock {min(clocks)} to {max(clocks)} MHz, drop {drop:.1%}")


def _check_processes(readings: Sequence[Reading], own_process: int) -> Check:
    known = [reading.process_ids for reading in readings if reading.process_ids is not None]
    if not known:
        return Check("other_processes", False, "the device does not tell")
    seen = frozenset[int]().union(*known)
    # In a container NVML numbers processes as the host does, so ours may be there under another number.
    others = len(seen - {own_process}) if own_process in seen else max(0, len(seen) - 1)
    return Check("other_processes", others == 0, f"{others} other processes on the device")


@dataclass(frozen=True)
class HostLoad:
    """Processor time in seconds since boot: of everybody, of this process, and what there was to use."""

    busy: float
    own: float
    available: float


def read_host_load(stat: Path = Path("/proc/stat")) -> HostLoad | None:
    """The counters now; None where the kernel has none."""
    try:
        ticks = [int(value) for value in stat.read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    if len(ticks) < 8:
        return None
    idle = ticks[3] + ticks[4]
    own = os.times()
    per_second = os.sysconf("SC_CLK_TCK")
    used = own.user + own.system + own.children_user + own.children_system
    return HostLoad((sum(ticks) - idle) / per_second, used, sum(ticks) / per_second)


def check_host_load(before: HostLoad | None, after: HostLoad | None, span_s: float, *, matters: bool) -> Check:
    """Processor time that others took. It `matters` on a CPU; beside a GPU it is recorded only."""
    if span_s < MIN_LOAD_SPAN_S:
        return Check("host_load", True, f"measured for {span_s:.2f} s: too short to tell")
    if before is None or after is None or after.available <= before.available:
        return Check("host_load", not matters, "this system does not tell")
    others = (after.busy - before.busy) - (after.own - before.own)
    share = max(0.0, others / (after.available - before.available))
    return Check("host_load", not matters or share <= MAX_OTHERS_LOAD, f"others used {share:.1%} of the processors")


class Monitor:
    """Watches host and device over the measured steps: start it, let it watch between steps, ask for the verdict."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._gpu: Gpu | None = gpu_by_nvml(device)
        self._readings: list[Reading] = []
        self._begin()

    def _begin(self) -> None:
        self._compilation = compilation()
        self._load = read_host_load()
        self._started = self._read_at = time.perf_counter()

    def start(self, *, warm: bool) -> None:
        """The measured steps begin; `warm`: the device has just worked, so its clocks now count."""
        self._begin()
        if warm and self._gpu is not None:
            self._readings.append(self._gpu.read())

    def watch(self, *, last: bool = False) -> None:
        """Between steps: read the GPU's state, at most once a second and at the end."""
        now = time.perf_counter()
        if self._gpu is not None and (last or now - self._read_at >= READ_INTERVAL_S):
            self._readings.append(self._gpu.read())
            self._read_at = now

    def verdict(self, samples: Sequence[float], *, compiled: bool, warmup_steps: int) -> dict[str, Any]:
        """The verdict on these samples; on none, after the memory ran out, it tells who else was there."""
        checks = check_stability(samples)
        if compiled:
            checks += check_compilation(self._compilation, compilation(), warmup_steps=warmup_steps)
        return self.conclude(checks)

    def conclude(self, checks: Sequence[Check]) -> dict[str, Any]:
        """The verdict on these checks of the samples, and on what was watched since the start."""
        checks = list(checks)
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            checks += check_gpu(self._readings, os.getpid())
            checks.append(self._neighbours())
        span = time.perf_counter() - self._started
        checks.append(check_host_load(self._load, read_host_load(), span, matters=not on_gpu))
        return verdict(checks)

    def _neighbours(self) -> Check:
        if self._gpu is None:
            return Check("neighbours", True, "not known")
        gpus = self._gpu.neighbours()
        busy = sum(bool(gpu.read().process_ids) for gpu in gpus)
        return Check("neighbours", True, f"{busy} of {len(gpus)} other GPUs of the host in use")
