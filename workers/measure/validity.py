"""Checks of whether measured numbers can be trusted, and the verdict that follows from them.

"wrong": a result is not that of the reference. "invalid": the measured work is not the work that the spec describes.
"suspect": something disturbed, or may have disturbed, the measurement. "valid": no check failed. With few samples
several cannot judge, and say so.
"""

import os
import sys
import threading
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import torch

from kernels.clock import ended_ns, now_s, processor_ns
from kernels.versions import why_not_hopper
from parallel.process_group import processes
from workers.measure import statistics
from workers.measure.busy import DEVICE_GAP_US, Busy
from workers.measure.ceilings import Rate
from workers.measure.check import SEVERITIES, Check, not_judged
from workers.measure.compilation import Compilation, compilation
from workers.measure.environment import gpu_by_nvml
from workers.measure.nvml import THROTTLE_REASONS, Gpu, Reading, is_available
from workers.measure.stopwatch import Timing

MAX_ERROR = 0.05
"""Largest error of a case's median, as `statistics.error_of_median` has it: what comparisons look for."""
MAX_ERROR_CPU = 0.20
"""On a CPU, a larger error than MAX_ERROR and up to this one is a note, since comparisons take the fastest samples."""
EVENT_JITTER_MS = 1e-3
"""Standard deviation that events alone may have, as seen on an H200 with kernels of 7 µs (0.3 to 0.55 µs)."""
MAX_MEAN = 2.0
"""Largest mean over median: beyond it, few samples have more than half of the time, and the median tells nothing of
it."""
MAX_THREADS = 0.10
"""Largest share of a CPU's time, of one core, in which threads beside the timed one may compute without a note."""
MIN_THREADS_S = 1e-3
"""And largest time, of which a part is that of reading the clocks."""
ENDED = 0
"""Stands for all threads that have ended; no thread has this identity."""
MAX_DRIFT = 0.10
MAX_DRIFT_ERRORS = 3
"""A drift that its standard error explains is noise: 3 of them are 4 % of runs of 10 samples, fewer of longer runs."""
TOO_NOISY = "times are too noisy to tell a drift"
"""Where noise hides more than 100 %, a figure tells nothing."""
MODES_SHARE = 0.92
"""Share of the variance, between two groups of samples, that shows two speeds. One in a hundred runs of 10 samples of
normal noise reaches it; of many samples 0.64 is expected, and 0.75 if they are uniform."""
MAX_CLOCK_DROP = 0.10
MAX_OTHERS_LOAD = 0.10
FULL_HOST = 0.90
"""Share of a CPU in use from which others that have more than MAX_TAKEN of it take it from the measured process."""
MAX_TAKEN = 0.25
"""On full hosts of two cores, others with 32 % to 54 % made medians 1.3 to 1.6 times as long, with 24 % 1 % longer."""
MOST_STEPS_LEFT = 2.5
"""Steps' worth of work that may be left when a loop has ended: the copies of the next two batches, for instance."""
LEAST_LEFT_MS = 10.0
"""Less is not seen: beside a busy thread of Python, whose turns take 5 ms, the host's clock is read that late."""
MAX_LEFT_OF_STEP, LEAST_LEFT_OF_STEP_MS = 0.1, 1.0
"""Share of a step, and ms, by which the times of its phases may be less than its own."""
MAX_WAITING = 0.10
"""Largest share of a step's time in which the device may wait for the host."""
CEILING_MARGINS = {"cuda": 0.05, "cpu": 9.0}
"""Smallest share by which a rate may exceed the measured ceiling, by type of device. One product does not show all that
a device can do; a CPU was perhaps busy with others' work then. Calls that return at once are far beyond both."""
MIN_LOAD_SPAN_S = 0.3
"""Shortest span in seconds for a check of the host's load: the kernel counts processor time in ticks of 10 ms."""
READ_INTERVAL_S = 1.0
POWER_CAP = 0x04
"""The throttle reason of a GPU at its power limit, where heavy work runs. It is reported, but is not a fault."""


def verdict(checks: Sequence[Check]) -> dict[str, Any]:
    """Return {"verdict": the worst severity, or "valid", "checks": [{"name", "ok", "detail", "severity"}]}."""
    failed = {check.severity for check in checks if not check.ok}
    worst = next((severity for severity in SEVERITIES[:-1] if severity in failed), "valid")
    return {"verdict": worst, "checks": [asdict(check) for check in checks]}


def check_stability(samples: Sequence[float], *, on_gpu: bool, metric: str | None = None) -> list[Check]:
    """Check spread and trend of the samples of one case. A GPU that works alone varies less than a processor.

    metric: the metric of the samples; None: the caller names it.
    """
    return [check_variation(samples, on_gpu=on_gpu, metric=metric), check_drift(samples)]


def check_variation(samples: Sequence[float], *, on_gpu: bool, metric: str | None = None) -> Check:
    """Check that the samples, in ms, are of one speed, and tell their median well enough: check `variation`.

    On a shared processor noise is common, and the median's interval says how much it matters, so up to MAX_ERROR_CPU it
    is only a note.
    """
    error = statistics.error_of_median(samples)
    if error is None:
        return not_judged("variation", f"samples: {len(samples)}, too few to judge")
    modes = statistics.modes(samples, share=MODES_SHARE)
    if modes is not None and modes[1] - modes[0] > MAX_DRIFT * median(samples):
        return Check("variation", False, f"two speeds: some samples near {modes[0]:.4g} ms, others near {modes[1]:.4g}")
    found, limit = percents(error, MAX_ERROR if on_gpu else MAX_ERROR_CPU)
    median_of = "median" if metric is None else f"median {metric}"
    detail = f"{median_of} uncertain by ±{found} ({len(samples)} samples); limit {limit}"
    if error > MAX_ERROR and on_gpu and stdev(samples) <= EVENT_JITTER_MS:
        return Check("variation", True, f"{detail}; no more than {1e3 * EVENT_JITTER_MS:g} µs, as events jitter")
    few = fmean(samples) / median(samples)
    if few > MAX_MEAN:
        detail += f"; the mean is {few:.3g} times it: few samples have most of the time"
    ok = error <= MAX_ERROR and few <= MAX_MEAN
    is_note = not ok and error <= (MAX_ERROR if on_gpu else MAX_ERROR_CPU)
    return Check("variation", ok, detail, "note" if is_note else "suspect")


def percents(value: float, limit: float) -> tuple[str, str]:
    """Write a share and its limit in percent, with as many digits as show which one is larger."""
    for digits in range(1, 2 if value == limit else 6):
        found, most = f"{100 * value:.{digits}f}", f"{100 * limit:.{digits}f}".rstrip("0").rstrip(".")
        if float(found) != float(most):
            break
    return f"{found}%", f"{most}%"


def check_drift(samples: Sequence[float]) -> Check:
    """Check the trend of the samples: check `drift`."""
    drift = statistics.drift(samples)
    if drift is None:
        return not_judged("drift", f"samples: {len(samples)}, too few to judge")
    change, error = drift
    limit = max(MAX_DRIFT, MAX_DRIFT_ERRORS * error)
    if limit > 1 and abs(change) <= limit:
        return not_judged("drift", TOO_NOISY)
    speed = "slower" if change > 0 else "faster"
    found, most = percents(abs(change), limit)
    detail = f"last third of the steps {found} {speed} than the first; limit {most}"
    return Check("drift", abs(change) <= limit, detail)


def check_steady(steady: bool | None, warmup: int, *, too_slow: bool = False, hidden: float | None = None) -> Check:
    """Check that times had stopped drifting when measuring began, after `warmup` calls: check `steady`. `steady`: as
    `WarmUp` or `Timing` has it; None: not judged, since calls are `too_slow`, or else their number was fixed. `hidden`:
    the change of times that noise may hide, where it is too large to call them steady."""
    if hidden is not None:
        detail = TOO_NOISY if hidden > 1 else f"in this noise a drift of up to {hidden:.0%} would not show"
        return Check("steady", False, f"{detail}, after a warm-up of {warmup}", "note")
    if too_slow:
        return not_judged("steady", f"too slow to judge: {warmup} calls to warm up")
    if steady is None:
        return not_judged("steady", f"a warm-up of {warmup} was asked for")
    state = "steady" if steady else "times still drifted when the limit was reached"
    return Check("steady", steady, f"{state}, after a warm-up of {warmup}")


def check_host_bound(timing: Timing) -> Check:
    """Check that the host, which issues a call, is not slower than the device: check `host_bound`.

    A failure is only a note if the device was timed by itself: the samples are then right, but a program that makes
    such calls one after the other will see the host's time.
    """
    if timing.host_us is None or not timing.samples:
        return not_judged("host_bound", "no device that works beside the host")
    device_ms, host_ms = median(timing.samples), 1e-3 * median(timing.host_us)
    if not timing.host_bound:
        return Check("host_bound", True, f"issuing takes {host_ms:.4g} ms, the device {device_ms:.4g} ms")
    if timing.exposed:
        detail = f"the host takes {host_ms:.4g} of {device_ms:.4g} ms, and the device waits: the times are the host's"
        return Check("host_bound", False, detail)
    detail = f"the host takes {host_ms:.4g} ms to issue what takes the device {device_ms:.4g} ms; the latter is shown"
    return Check("host_bound", False, detail, "note")


def check_waiting(wall_ms: float, host_us: float | None, busy: Busy | str) -> Check:
    """Check that the device does not wait for the host within a step's wall time: check `host_bound`. `wall_ms`: median
    wall time of a step. `host_us`: median time in which the host issued a step; None on a CPU."""
    if host_us is None:
        return not_judged("host_bound", "no device that works beside the host")
    detail = f"issuing a step takes {1e-3 * host_us:.4g} of its {wall_ms:.4g} ms"
    # The device cannot wait for longer than the host takes.
    waiting_ms = 1e-3 * host_us
    if not isinstance(busy, str):
        detail += f", in which the device is busy for {busy.busy_ms:.4g} ms with {busy.launches} launches"
        waiting_ms = min(waiting_ms, max(0.0, wall_ms - busy.busy_ms - 1e-3 * DEVICE_GAP_US * busy.launches))
    elif waiting_ms > MAX_WAITING * wall_ms:
        return Check("host_bound", False, f"{detail}; how long the device waits for it is unknown: {busy}")
    return Check(
        "host_bound", waiting_ms <= MAX_WAITING * wall_ms, f"{detail} and waits for {waiting_ms:.4g} ms at most"
    )


def check_ceiling(tflops: float, peak: float | None, ceiling: Rate | None, device_type: str) -> Check:
    """Check that a device can have done the work in the measured time: check `ceiling`. `tflops`: the measured rate, in
    TFLOP/s as the others. `peak`: the vendor's; None: unknown. `ceiling`: the measured one; None: unknown."""
    limits = [] if peak is None else [(peak, "the vendor's peak")]
    if ceiling is not None:
        limit = ceiling.value + max(ceiling.spread, CEILING_MARGINS[device_type] * ceiling.value)
        limits.append((limit, f"the ceiling measured at {ceiling.measured_at} with its margin"))
    if not limits:
        return not_judged("ceiling", "no peak or ceiling of this device is on record")
    lowest, name = min(limits)
    if tflops <= lowest:
        return Check("ceiling", True, f"{tflops:.4g} TFLOP/s, of {lowest:.4g}: {name}")
    detail = f"{tflops:.4g} TFLOP/s is more than {lowest:.4g}, {name}: the work was not done in the measured time, "
    detail += "or has fewer FLOPs"
    return Check("ceiling", False, detail, "invalid")


def check_compilation(before: Compilation, after: Compilation, *, warmup_steps: int, own: bool = False) -> list[Check]:
    """Check for recompilation while measuring, and for functions that were not compiled. For compiled models only.
    `before`: counters when measuring began. `after`: counters when it ended. `warmup_steps`: steps made before it
    began. `own`: whether the user's own step compiles what it chooses; what it leaves out is a note then."""
    recompiled = after.graphs - before.graphs
    detail = f"{recompiled} graphs compiled during the measured steps"
    if warmup_steps == 0:
        detail += "; there was no warm-up"
    # Without a warm-up, the spec itself includes the compilation in the samples.
    recompiles = Check("recompiles", recompiled == 0, detail, "invalid" if warmup_steps else "suspect")
    breaks, why = f"{after.graph_breaks} graph breaks", after.break_reasons if after.graph_breaks else ()
    fell_back = after.graphs == 0 or after.frames_not_compiled > 0
    return [
        recompiles,
        Check(
            "eager_fallback",
            not fell_back,
            f"{after.graphs} graphs, {after.frames_not_compiled} functions left to eager",
            "note" if own else "invalid",
        ),
        Check(
            "graph_breaks",
            after.graph_breaks == 0,
            ": ".join(filter(None, (breaks, "; ".join(why)))),
            "note" if own else "suspect",
        ),
        Check("compile_cache", True, f"{after.cache} when the model was compiled"),
    ]


def check_streams(left_ms: float, step_ms: float) -> list[Check]:
    """Check that steps wait for their own work; no check if they do. `left_ms`: time for which a device worked on after
    it had reached the end of a loop's last step. `step_ms`: median of the steps."""
    if left_ms <= max(MOST_STEPS_LEFT * step_ms, LEAST_LEFT_MS):
        return []
    detail = (
        f"when a loop of steps had ended, work of {left_ms:.4g} ms was left on streams for which the steps do not wait"
        "; call torch.cuda.current_stream().wait_stream(…) before the step returns"
    )
    return [Check("streams", False, detail, "invalid")]


def check_phases(step_ms: float, left_ms: float) -> list[Check]:
    """Check that the phases of isolated steps have all of the device's time; no check if they do. `step_ms`: median of
    the steps, each until all streams are idle. `left_ms`: median of what the phases, which end on the current stream,
    lack of their step."""
    if left_ms <= max(MAX_LEFT_OF_STEP * step_ms, LEAST_LEFT_OF_STEP_MS):
        return []
    detail = f"the phases lack {left_ms:.4g} of the step's {step_ms:.4g} ms: work on streams for which the current one "
    return [Check("streams", False, detail + "does not wait; call torch.cuda.current_stream().wait_stream(…)")]


def check_gradients(missing: Sequence[str] | None) -> list[Check]:
    """Name the trainable parameters that got no gradient; no check if none is missing, or it is unknown."""
    if not missing:
        return []
    why = "the model detaches them, or does not use them"
    return [Check("gradients", False, f"{len(missing)} trainable parameters got none, {missing[0]} first: {why}")]


def check_lost_gradients(missing: Sequence[str], count: int) -> list[Check]:
    """Name the parameters of a step's optimizers that got no gradient, by their names and shapes; no check if none is
    missing. If none of all `count` got one, the step may be meant to be without a backward pass."""
    if not missing:
        return []
    if len(missing) == count:
        detail = f"none of the {count} parameters of its optimizers got a gradient: is the backward pass forgotten?"
        return [Check("gradients", False, detail, "note")]
    detail = (
        f"{len(missing)} of {count} parameters of its optimizers got no gradient, the first {missing[0]}: the step "
    )
    return [Check("gradients", False, detail + "detaches them, or does not use them, or not in these few steps")]


def check_updates(idle: Sequence[str], updates: Sequence[tuple[bool, ...]]) -> list[Check]:
    """Check that the last step, whose memory is told, updates all that earlier ones do; no check if it does. `idle`:
    the optimizers that have no state yet, which a step that updates would have. `updates`: as `OwnStep.updates` yields
    them."""
    if idle:
        detail = f"{idle[0]} has updated nothing in {len(updates)} steps, and has no state yet: "
        return [Check("updates", False, detail + "set warmup_steps so that the step after them updates")]
    most = max(range(len(updates)), key=lambda step: sum(updates[step]))
    if sum(updates[most]) <= sum(updates[-1]):
        return []
    detail = f"the recorded step updates fewer parameters than step {most + 1}, which may need more memory: record it "
    return [Check("updates", False, detail + f"by warmup_steps={most} measure_steps=1")]


def check_kernels(device: torch.device) -> list[Check]:
    """Note that the attention `triton` runs other kernels on this Hopper GPU than those made for it; no check
    elsewhere."""
    reason = why_not_hopper(device)
    return [] if reason is None else [Check("attention_kernels", False, reason, "note")]


def check_gpus(readings: Sequence[Sequence[Reading]], own_processes: Set[int]) -> list[Check]:
    """Check throttling, clocks and other processes in each GPU's readings. Returns one check of each for all GPUs."""
    each = [check_gpu(one, own_processes) for one in readings]
    if len(each) == 1:
        return each[0]
    return [_combined(same) for same in zip(*each, strict=True)]


def _combined(checks: Sequence[Check]) -> Check:
    """Combine the checks of several GPUs into one. Its detail lists the failed checks, or all if none failed."""
    failed = [(index, check) for index, check in enumerate(checks) if not check.ok]
    shown = failed or list(enumerate(checks))
    detail = "; ".join(f"GPU {index}: {check.detail}" for index, check in shown)
    return Check(checks[0].name, not failed, detail, checks[0].severity)


def check_gpu(readings: Sequence[Reading], own_processes: Set[int]) -> list[Check]:
    """Check throttling, clocks and other processes in one GPU's readings."""
    if not readings:
        unknown = f"NVML {_why_unknown()}: not known"
        return [Check(name, False, unknown) for name in ("throttling", "clocks", "other_processes")]
    return [_check_throttling(readings), _check_clocks(readings), _check_processes(readings, own_processes)]


def _why_unknown() -> str:
    return "does not know this device" if is_available() else "is not available"


def _check_throttling(readings: Sequence[Reading]) -> Check:
    masks = [reading.throttle_reasons for reading in readings if reading.throttle_reasons is not None]
    if not masks:
        return Check("throttling", False, "not reported by the device")
    seen = {bit: text for bit, text in THROTTLE_REASONS.items() if any(mask & bit for mask in masks)}
    return Check("throttling", not (set(seen) - {POWER_CAP}), ", ".join(seen.values()) or "none")


def _check_clocks(readings: Sequence[Reading]) -> Check:
    clocks = [reading.sm_clock_mhz for reading in readings if reading.sm_clock_mhz]
    if not clocks:
        return Check("clocks", False, "not reported by the device")
    drop = 1 - min(clocks) / max(clocks)
    return Check("clocks", drop <= MAX_CLOCK_DROP, f"SM clock {min(clocks)} to {max(clocks)} MHz, drop {drop:.1%}")


def _check_processes(readings: Sequence[Reading], own_processes: Set[int]) -> Check:
    known = [reading.process_ids for reading in readings if reading.process_ids is not None]
    if not known:
        return Check("other_processes", False, "not reported by the device")
    seen = frozenset[int]().union(*known)
    # In a container NVML numbers processes as the host does, so one of ours may be there under another number.
    others = len(seen - own_processes) if seen & own_processes else max(0, len(seen) - 1)
    return Check("other_processes", others == 0, f"{others} other processes on the device")


@dataclass(frozen=True)
class HostLoad:
    """Processor time since boot in seconds: of all processes, of ours and its descendants, and the available time."""

    busy: float
    own: float
    available: float


def read_host_load(proc: Path = Path("/proc")) -> HostLoad | None:
    """Read the counters now; return None if the kernel has none."""
    try:
        ticks = [int(value) for value in (proc / "stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    if len(ticks) < 8:
        return None
    idle = ticks[3] + ticks[4]
    per_second = os.sysconf("SC_CLK_TCK")
    own = sum(family_times(os.getpid(), proc).values())
    return HostLoad((sum(ticks) - idle) / per_second, own / per_second, sum(ticks) / per_second)


def family_times(ancestor: int, proc: Path = Path("/proc")) -> dict[int, int]:
    """Return pids of a process and of all its living descendants, each with the processor time that it used, in ticks.

    The time of an ended process counts for the process that waited for it.
    """
    children: dict[int, list[int]] = {}
    times: dict[int, int] = {}
    for pid, fields in processes(proc):
        children.setdefault(int(fields[1]), []).append(pid)
        times[pid] = sum(int(value) for value in fields[11:15])
    pending, family_ticks = [ancestor], {}
    while pending:
        pid = pending.pop()
        family_ticks[pid] = times.get(pid, 0)
        pending += children.get(pid, [])
    return family_ticks


def check_host_load(before: HostLoad | None, after: HostLoad | None, span_s: float, *, matters: bool) -> Check:
    """Check the processor time that other processes used. It `matters` on a CPU; with a GPU it is only recorded.

    Others that use less than the unit itself, and leave it what it needs, are a note: their noise is judged by itself.
    """
    if span_s < MIN_LOAD_SPAN_S:
        return not_judged("host_load", f"measured for {span_s:.2f} s: too short to tell")
    if before is None or after is None or after.available <= before.available:
        unknown = "not available on this system"
        return Check("host_load", False, unknown) if matters else not_judged("host_load", unknown)
    available, own = after.available - before.available, after.own - before.own
    others = max(0.0, after.busy - before.busy - own)
    share, full = others / available, others + own >= FULL_HOST * available
    detail = f"other processes used {share:.1%} of the CPU, this one {own / available:.1%}"
    if matters and full and share > MAX_TAKEN:
        detail += ": it was full"
    ok = not matters or share <= MAX_OTHERS_LOAD
    taken = others > own or (full and share > MAX_TAKEN)
    return Check("host_load", ok, detail, "suspect" if ok or taken else "note")


def other_threads_s() -> dict[int, float]:
    """Return the processor's time in seconds of each thread that runs Python beside the calling one, by its identity,
    and under ENDED that of threads that have ended.

    `threading.enumerate` may have threads that have ended, whose clocks must not be read.
    """
    others = sys._current_frames().keys() - {threading.get_ident()}
    return {ENDED: 1e-9 * ended_ns(), **{thread: 1e-9 * processor_ns(thread) for thread in others}}


def check_threads(before: Mapping[int, float], after: Mapping[int, float], span_s: float) -> list[Check]:
    """Note that other threads computed meanwhile, by what `other_threads_s` tells: the host's clock takes a call for
    done when it returns. No check if they hardly did."""
    known = {**before, ENDED: sum(before[thread] for thread in before.keys() - (after.keys() - {ENDED}))}
    used = sum(max(0.0, now - known.get(thread, 0.0)) for thread, now in after.items())
    if used <= max(MAX_THREADS * span_s, MIN_THREADS_S):
        return []
    detail = f"other threads of the code computed for {used:.3g} of {span_s:.3g} s: only what a step waits for is timed"
    return [Check("threads", False, detail, "note")]


class Monitor:
    """Watches host and devices while one case is measured: call `start`, `watch` between steps, then `conclude`.
    `devices`: the case's device or devices: GPUs, all of which are watched, or the CPU."""

    def __init__(self, devices: torch.device | Sequence[torch.device]) -> None:
        devices = [devices] if isinstance(devices, torch.device) else list(devices)
        self._on_gpu = devices[0].type == "cuda"
        self._gpus: list[Gpu | None] = [gpu_by_nvml(device) for device in devices if device.type == "cuda"]
        self._begin()

    def _begin(self) -> None:
        self._readings: list[list[Reading]] = [[] for _ in self._gpus]
        self._own_processes = {os.getpid()}
        self._compilation = compilation()
        self._load = read_host_load()
        self._threads = other_threads_s() if not self._on_gpu else {}
        self._started = self._read_at = now_s()

    def start(self, *, warm: bool = True) -> None:
        """Begin measuring. `warm`: the devices have just worked, so the verdict includes their present clocks."""
        self._begin()
        if warm:
            self._read()

    def watch(self, *, last: bool = False) -> None:
        """Read the GPUs' state, at most once a second and at the end. Called between steps."""
        now = now_s()
        if last or now - self._read_at >= READ_INTERVAL_S:
            self._read()
            self._read_at = now

    def _read(self) -> None:
        if not self._gpus:
            return
        # Processes that this one started (ranks) belong to the case, even those that end before `conclude`.
        self._own_processes |= set(family_times(os.getpid()))
        for gpu, readings in zip(self._gpus, self._readings, strict=True):
            if gpu is not None:
                readings.append(gpu.read())

    def device_memory_mib(self) -> tuple[list[float] | None, str]:
        """Return the largest memory in use on a device in MiB, of the readings since the start and of all devices; or
        None and the reason why it is unknown."""
        if not self._on_gpu:
            return None, "known on GPUs only"
        used = [reading.memory_used_mib for readings in self._readings for reading in readings]
        known = [size for size in used if size is not None]
        return ([max(known)], "") if known else (None, f"NVML {_why_unknown()}")

    def clocks_mhz(self) -> list[float | None]:
        """Return the median clock of each GPU's multiprocessors since the start; None where it is unknown."""
        each = ([one.sm_clock_mhz for one in readings if one.sm_clock_mhz] for readings in self._readings)
        return [median(clocks) if clocks else None for clocks in each]

    def compilation_checks(self, *, warmup_steps: int, own: bool) -> list[Check]:
        """Check for compilation since the start, and for functions left uncompiled. For compiled models only."""
        return check_compilation(self._compilation, compilation(), warmup_steps=warmup_steps, own=own)

    def conclude(self, checks: Sequence[Check]) -> dict[str, Any]:
        """Return the verdict on these checks of the samples and on everything watched since the start."""
        return verdict(self.with_watched(checks))

    def with_watched(self, checks: Sequence[Check]) -> list[Check]:
        """Return these checks of the samples, and those of everything watched since the start."""
        checks = list(checks)
        if self._on_gpu:
            checks += check_gpus(self._readings, self._own_processes)
        span = now_s() - self._started
        if not self._on_gpu:
            checks += check_threads(self._threads, other_threads_s(), span)
        checks.append(check_host_load(self._load, read_host_load(), span, matters=not self._on_gpu))
        return checks
