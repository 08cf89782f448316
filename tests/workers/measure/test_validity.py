from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from array import array
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from workers.measure import validity
from workers.measure.busy import Busy
from workers.measure.ceilings import Rate
from workers.measure.check import Check, not_judged
from workers.measure.compilation import Compilation, compilation
from workers.measure.nvml import Reading
from workers.measure.stopwatch import Timing
from workers.measure.validity import (
    HostLoad,
    Monitor,
    check_ceiling,
    check_compilation,
    check_drift,
    check_gpu,
    check_gpus,
    check_host_bound,
    check_host_load,
    check_phases,
    check_stability,
    check_steady,
    check_streams,
    check_waiting,
    family_times,
    read_host_load,
    verdict,
)


def outcome(checks: list[Check]) -> dict[str, bool]:
    return {check.name: check.ok for check in checks}


def reading(clock: int | None = 1980, reasons: int | None = 0, processes: set[int] | None = frozenset()) -> Reading:
    return Reading(clock, 3201, 40, 300.0, reasons, None if processes is None else frozenset(processes))


def test_a_gpus_variation_is_judged_more_strictly() -> None:
    shaky_ms = [1.0, 1.15, 1.0, 1.15]
    assert verdict(check_stability(shaky_ms, on_gpu=False))["verdict"] == "valid"
    assert not outcome(check_stability(shaky_ms, on_gpu=True))["variation"]
    short_ms = [0.0070, 0.0080, 0.0070, 0.0080]
    check = check_stability(short_ms, on_gpu=True)[0]
    assert (check.name, check.ok) == ("variation", True)
    assert "as events jitter" in check.detail


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_step_that_works_only_now_and_then_has_a_note(on_gpu: bool) -> None:
    now_and_then_ms = [7.0 if step % 20 == 0 else 0.1 for step in range(100)]
    check = check_stability(now_and_then_ms, on_gpu=on_gpu)[0]
    assert (check.ok, check.severity) == (False, "note")
    assert "the mean is 4.45 times it" in check.detail


def test_a_thread_that_computes_beside_the_steps_has_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validity, "MAX_THREADS", 0.0)  # of a time that is long where others take the processor

    def names() -> list[str]:
        return [check.name for check in monitor.with_watched([])]

    def burn() -> None:
        while time.thread_time() < 0.2:
            pass

    computed, end = threading.Event(), threading.Event()

    def compute() -> None:
        burn()
        computed.set()
        end.wait()

    monitor = validity.Monitor(torch.device("cpu"))
    monitor.start()
    thread = threading.Thread(target=compute)
    thread.start()
    try:
        computed.wait()
        assert "threads" in names()
        monitor.start()
        assert "threads" not in names(), "it waits, and what it did before is not of these steps"
    finally:
        end.set()
        thread.join()
    assert "threads" not in names(), "nor is it when the thread ends"
    thread = threading.Thread(target=burn)
    thread.start()
    thread.join()
    while Path(f"/proc/self/task/{thread.native_id}").exists():
        time.sleep(0.001)
    assert "threads" in names(), "threads that have ended count, such as one for each step"


@pytest.mark.parametrize(
    ("tflops", "peak", "ceiling", "ok", "words"),
    [
        (700.0, 989.5, None, True, "of 989.5: the vendor's peak"),
        (990.0, 989.5, None, False, "more than 989.5, the vendor's peak"),
        (109.0, None, Rate(100.0, "2026-01-02T03:04:05Z", 10.0), True, "of 110: the ceiling measured at 2026-01-02"),
        (111.0, None, Rate(100.0, "2026-01-02T03:04:05Z", 10.0), False, "more than 110, the ceiling measured at 2026"),
        (104.0, None, Rate(100.0, "2026-01-02T03:04:05Z", 0.1), True, "of 105"),
        (106.0, None, Rate(100.0, "2026-01-02T03:04:05Z", 0.1), False, "more than 105"),
        (106.0, 101.0, Rate(100.0, "2026-01-02T03:04:05Z", 9.0), False, "more than 101, the vendor's peak"),
        (1e9, None, None, True, "on record"),
    ],
)
def test_nothing_is_faster_than_the_device(tflops, peak, ceiling, ok, words) -> None:
    check = check_ceiling(tflops, peak, ceiling, "cuda")
    assert (check.name, check.ok) == ("ceiling", ok)
    assert words in check.detail
    assert verdict([check])["verdict"] == ("valid" if ok else "invalid")


def test_next_batches_may_still_be_copied_when_a_loop_ends() -> None:
    assert [len(check_streams(left_ms, 5.0)) for left_ms in (0.02, 12.0, 13.0)] == [0, 0, 1]
    assert [len(check_streams(left_ms, 0.1)) for left_ms in (9.0, 11.0)] == [0, 1], "of a busy thread's turns"


def test_phases_that_lack_work_of_other_streams_are_told() -> None:
    assert [len(check_phases(48.0, left_ms)) for left_ms in (0.1, 4.7, 5.0)] == [0, 0, 1]
    assert not check_phases(0.9, 0.8), "in so short a step it is the host's time"
    (check,) = check_phases(44.0, 27.0)
    assert check.severity == "suspect"
    assert check.detail.startswith("the phases lack 27 of the step's 44 ms: work on streams for which")


def test_the_verdict_is_the_worst_of_the_checks() -> None:
    fine, odd, wrong = Check("a", True, "x"), Check("b", False, "y"), Check("c", False, "z", "invalid")
    shown = {"name": "a", "ok": True, "detail": "x", "severity": "suspect"}
    assert verdict([fine]) == {"verdict": "valid", "checks": [shown]}
    note = Check("d", False, "to know", "note")
    assert verdict([fine, note])["verdict"] == "valid", "a note leaves it as it is"
    assert verdict([note, odd])["verdict"] == "suspect"
    assert verdict([fine, odd])["verdict"] == "suspect"
    assert verdict([odd, wrong, fine])["verdict"] == "invalid"


def drawn(rng: random.Random, n: int, noise: float = 0.15) -> list[float]:
    return [10.0 * rng.lognormvariate(0, noise) for _ in range(n)]


def test_white_noise_on_a_processor_is_valid_with_enough_samples(rng: random.Random) -> None:
    """A run with a coefficient of variation of 15 % was suspect, however many samples it had."""
    verdicts = [verdict(check_stability(drawn(rng, 200), on_gpu=False)) for _ in range(100)]
    assert sum(one["verdict"] == "valid" for one in verdicts) >= 95
    passed = [all(check["ok"] for check in one["checks"]) for one in verdicts]
    assert sum(passed) >= 95, "without a note, too"


def test_few_samples_of_white_noise_are_a_note_on_a_processor(rng: random.Random) -> None:
    runs = [drawn(rng, 10, 0.1) for _ in range(200)]
    verdicts = [verdict(check_stability(run, on_gpu=False))["verdict"] for run in runs]
    assert verdicts.count("valid") >= 140
    checks = [check_stability(run, on_gpu=False)[0] for run in runs]
    noted = [check for check in checks if not check.ok and check.severity == "note"]
    assert len(noted) >= 140
    assert "median uncertain by ±" in noted[0].detail
    on_gpu = [verdict(check_stability(run, on_gpu=True))["verdict"] for run in runs]
    assert on_gpu.count("suspect") >= 160


def test_noise_that_no_comparison_makes_up_for_is_suspect() -> None:
    """The limit of a note is where a hundred processes of each side stop to find a difference of MAX_ERROR."""
    wild = [6.0, 8.0, 9.0, 10.0, 11.0, 12.0, 14.0, 15.0, 16.5, 18.0]
    check = check_stability(wild, on_gpu=False)[0]
    assert (check.ok, check.severity) == (False, "suspect")


def test_a_drift_is_suspect_within_noise(rng: random.Random) -> None:
    drifting = [time_ms * (1 + 0.8 * index / 100) for index, time_ms in enumerate(drawn(rng, 100))]
    for on_gpu in (False, True):
        assert outcome(check_stability(drifting, on_gpu=on_gpu))["drift"] is False
    assert verdict(check_stability(drifting, on_gpu=False))["verdict"] == "suspect"


def test_two_speeds_are_suspect(rng: random.Random) -> None:
    """The median of two speeds is either of them by chance, and its interval does not say so."""
    n = 200
    steps = [time_ms * (1.4 if index < 0.3 * n else 1) for index, time_ms in enumerate(drawn(rng, n, noise=0.03))]
    rng.shuffle(steps)
    check = check_stability(steps, on_gpu=False)[0]
    assert (check.ok, check.severity) == (False, "suspect")
    assert check.detail.startswith("two speeds: some samples near ")


def test_a_drift_in_noise_of_more_than_its_size_is_not_judged() -> None:
    assert check_drift([1.0, 400.0, 1.0] * 5) == not_judged("drift", "times are too noisy to tell a drift")
    larger = check_drift([1.0, 2.0, 3.0] * 3 + [5.0] * 9 + [30.0, 32.0, 34.0] * 3)
    found = "last third of the steps 1500.0% slower than the first; limit 121.4%"
    assert (larger.ok, larger.severity, larger.detail) == (False, "suspect", found)


def test_a_warm_up_that_never_got_steady_is_suspect() -> None:
    assert check_steady(True, 12).ok
    assert "after a warm-up of 12" in check_steady(True, 12).detail
    assert not check_steady(False, 12).ok
    assert check_steady(None, 5) == not_judged("steady", "a warm-up of 5 was asked for")
    noisy = check_steady(None, 6, hidden=0.083)
    assert (noisy.ok, noisy.severity) == (False, "note")
    assert "a drift of up to 8% would not show" in noisy.detail
    assert check_steady(None, 6, hidden=8.45).detail == "times are too noisy to tell a drift, after a warm-up of 6"
    slow = check_steady(None, 6, too_slow=True)
    assert slow == not_judged("steady", "too slow to judge: 6 calls to warm up")


def test_what_cannot_be_judged_says_so_and_lowers_no_verdict() -> None:
    load = HostLoad(1.0, 1.0, 10.0)
    checks = [
        *check_stability([1.0], on_gpu=True),
        check_steady(None, 5),
        check_ceiling(1.0, None, None, "cuda"),
        check_host_load(load, load, 0.01, matters=True),
        check_host_load(None, None, 1.0, matters=False),
    ]
    assert {(check.ok, check.severity) for check in checks} == {(True, "not_judged")}
    assert verdict(checks)["verdict"] == "valid"
    judged = check_stability([1.0, 1.01] * 20, on_gpu=False)
    assert {check.severity for check in judged} == {"suspect"}, "with samples they are judged"


def timing(device_ms: float, host_us: float | None, *, exposed: bool = False) -> Timing:
    host = None if host_us is None else array("d", [host_us] * 3)
    bound = host_us is not None and host_us > 1e3 * device_ms
    return Timing(array("d", [device_ms] * 3), host, 5, True, bound, exposed)


def test_a_call_issued_slowly_is_host_bound() -> None:
    assert check_host_bound(timing(1.0, 50.0)).detail == "issuing takes 0.05 ms, the device 1 ms"
    hidden = check_host_bound(timing(0.005, 50.0))
    assert (hidden.ok, hidden.severity) == (False, "note"), "the device was timed by itself"
    assert hidden.detail.startswith("the host takes 0.05 ms to issue what takes the device 0.005 ms")
    exposed = check_host_bound(timing(0.045, 50.0, exposed=True))
    assert (exposed.ok, exposed.severity) == (False, "suspect")
    assert "the times are the host's" in exposed.detail
    unknown = not_judged("host_bound", "no device that works beside the host")
    assert check_host_bound(timing(1.0, None)) == check_waiting(1.0, None, "a CPU") == unknown


def test_a_step_in_which_the_device_waits_is_host_bound() -> None:
    """Steps of xl on an H200: eager with our attention, the same as a CUDA graph, and one whose queue stays full."""
    waiting = check_waiting(163.6, 149_000, Busy(73.3, 2943))
    assert not waiting.ok
    assert "waits for 87.36 ms at most" in waiting.detail
    assert not check_waiting(100.0, 90_000, Busy(88.0, 10)).ok, "more than a tenth of the step"
    assert check_waiting(100.0, 90_000, Busy(92.0, 10)).ok
    assert check_waiting(75.2, 440, Busy(73.9, 2941)).ok
    assert check_waiting(200.0, 190_000, Busy(195.0, 9000)).ok
    # Thousands of short kernels: the gaps between them are the device's own.
    assert check_waiting(22.3, 300, Busy(15.0, 4681)).ok
    assert check_waiting(22.3, 20_000, Busy(17.0, 4681)).ok


def test_what_the_device_does_in_a_step_may_be_unknown() -> None:
    assert check_waiting(75.2, 440, "no profiler").ok, "it cannot wait for longer than the host takes"
    unknown = check_waiting(75.2, 60_000, "no profiler")
    assert not unknown.ok
    assert unknown.detail.endswith("unknown: no profiler")
    assert check_waiting(10.0, None, "known on GPUs only").ok


def test_throttling_clock_drops_and_strangers_are_seen() -> None:
    own = os.getpid()
    calm = [reading(processes={own}), reading(processes={own})]
    assert set(outcome(check_gpu(calm, {own})).values()) == {True}
    for mask, ok in ((0x01, True), (0x04, True), (0x20, False), (0x40, False), (0x80, False)):
        assert outcome(check_gpu([*calm, reading(reasons=mask)], {own}))["throttling"] is ok
    assert outcome(check_gpu([*calm, reading(1700)], {own}))["clocks"] is False
    assert outcome(check_gpu([*calm, reading(1900)], {own}))["clocks"] is True
    assert outcome(check_gpu([*calm, reading(processes={own, 1})], {own}))["other_processes"] is False


def test_checks_of_several_gpus_name_who_failed() -> None:
    calm, hot = [reading(processes={7})], [reading(reasons=0x20, processes={7})]
    checks = {check.name: check for check in check_gpus([calm, hot, calm], {7})}
    assert {name: check.ok for name, check in checks.items()} == {
        "throttling": False,
        "clocks": True,
        "other_processes": True,
    }
    assert checks["throttling"].detail == "GPU 1: software thermal slowdown"
    assert [check.detail for check in check_gpus([hot], {7})] == [check.detail for check in check_gpu(hot, {7})]


def test_in_a_container_one_unknown_process_is_ours() -> None:
    assert outcome(check_gpu([reading(processes={4711})], {7}))["other_processes"] is True
    assert outcome(check_gpu([reading(processes={4711, 4712})], {7}))["other_processes"] is False


def test_a_gpu_that_tells_nothing_is_suspect() -> None:
    assert set(outcome(check_gpu([], {1})).values()) == {False}
    assert set(outcome(check_gpu([reading(None, None, None)], {1})).values()) == {False}


def test_compilation_in_the_measured_steps_and_eager_fallback() -> None:
    once = Compilation(graphs=1)
    assert set(outcome(check_compilation(once, once, warmup_steps=1)).values()) == {True}
    twice = check_compilation(once, Compilation(graphs=2), warmup_steps=1)
    assert verdict(twice)["verdict"] == "invalid"
    assert verdict(check_compilation(Compilation(), once, warmup_steps=0))["verdict"] == "suspect"
    assert verdict(check_compilation(Compilation(), Compilation(), warmup_steps=1))["verdict"] == "invalid"
    partly = Compilation(graphs=1, frames_not_compiled=1)
    assert outcome(check_compilation(partly, partly, warmup_steps=1))["eager_fallback"] is False
    assert verdict(check_compilation(partly, partly, warmup_steps=1, own=True))["verdict"] == "valid"
    broken = Compilation(graphs=2, graph_breaks=3, break_reasons=("2 × print (model.py:7, in forward)", "1 × item"))
    checks = check_compilation(broken, broken, warmup_steps=1)
    assert verdict(checks)["verdict"] == "suspect"
    details = {check.name: check.detail for check in checks}
    assert details["graph_breaks"] == "3 graph breaks: 2 × print (model.py:7, in forward); 1 × item"


def breaks(x: torch.Tensor) -> torch.Tensor:
    torch._dynamo.graph_break()
    return x + int(x.sum().item())


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_graph_breaks_have_their_reasons_and_lines(fresh_compiler: None) -> None:
    torch._dynamo.utils.graph_break_reasons.clear()
    torch.compile(breaks, backend="eager")(torch.ones(3))
    line = breaks.__code__.co_firstlineno + 1
    broken = compilation()
    assert broken.graph_breaks == len(broken.break_reasons) == 2
    assert broken.break_reasons[0].startswith("1 × Call to `torch._dynamo.graph_break()`: User-inserted graph break.")
    assert broken.break_reasons[0].endswith(f"(test_validity.py:{line}, in breaks)")
    assert ".item()" in broken.break_reasons[1]
    assert broken.break_reasons[1].endswith(f"(test_validity.py:{line + 1}, in breaks)")


def test_what_others_took_of_the_processors() -> None:
    before = HostLoad(busy=100, own=10, available=1000)
    alone = HostLoad(busy=110.5, own=20, available=1020)
    crowded = HostLoad(busy=115, own=20, available=1020)
    assert check_host_load(before, alone, 10, matters=True).ok
    disturbed = check_host_load(before, crowded, 10, matters=True)
    assert (disturbed.ok, disturbed.severity) == (False, "note"), "others used less than the unit"
    assert disturbed.detail == "other processes used 25.0% of the CPU, this one 50.0%"
    outdone = check_host_load(before, HostLoad(busy=118, own=18, available=1020), 10, matters=True)
    assert (outdone.ok, outdone.severity) == (False, "suspect")
    full = check_host_load(before, HostLoad(busy=119.9, own=20.7, available=1020), 10, matters=True)
    assert (full.ok, full.severity) == (False, "suspect"), "less than the unit, but there was no more to have"
    assert full.detail == "other processes used 46.0% of the CPU, this one 53.5%: it was full"
    little = check_host_load(before, HostLoad(busy=119, own=24.3, available=1020), 10, matters=True)
    assert little.severity == "note", "a full host, of which others had 23.5 %"
    assert check_host_load(before, crowded, 10, matters=False).ok
    assert "too short" in check_host_load(before, crowded, 0.1, matters=True).detail
    assert not check_host_load(None, None, 10, matters=True).ok


def test_host_load_is_read_from_the_kernel(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 0 200 1000 100 0 0 50 0 0\ncpu0 1 2 3\n")
    load = read_host_load(tmp_path)
    ticks = os.sysconf("SC_CLK_TCK")
    assert (load.busy, load.available) == (350 / ticks, 1450 / ticks)
    assert read_host_load(tmp_path / "none") is None
    stat.write_text("nonsense")
    assert read_host_load(tmp_path) is None


def test_the_family_is_all_descendants(tmp_path: Path) -> None:
    def process(pid: int, parent: int, ticks: int, name: str) -> None:
        (tmp_path / str(pid)).mkdir()
        rest = f"S {parent} 1 1 0 -1 0 0 0 0 0 {ticks} 1 2 3 20 0 1"
        # The kernel cuts a name after 15 bytes, in the middle of a character, too.
        (tmp_path / str(pid) / "stat").write_bytes(f"{pid} (".encode() + name.encode()[:15] + f") {rest}\n".encode())

    process(10, 1, 100, "agent")
    process(11, 10, 200, "a) S 1 (b")
    process(12, 11, 300, "rank")
    process(20, 1, 400, "Auswertung-lauä")
    assert family_times(10, tmp_path) == {10: 106, 11: 206, 12: 306}
    assert family_times(20, tmp_path) == {20: 406}


def test_a_descendants_work_is_not_taken_for_others() -> None:
    """Even while it runs: the kernel adds a child's time to its parent's only after the parent has waited for it."""
    code = "import time\nwhile time.process_time() < 0.4: pass\nprint('worked', flush=True)\ninput()"
    before = read_host_load()
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdout.readline() == b"worked\n"
        after = read_host_load()
        worker.communicate(b"\n")
    assert after.own - before.own >= 0.35


@pytest.mark.parametrize(
    ("available", "why"), [(True, "does not know this device: not known"), (False, "is not available: not known")]
)
def test_a_gpu_without_readings_says_why(monkeypatch: pytest.MonkeyPatch, available: bool, why: str) -> None:
    monkeypatch.setattr(validity, "gpu_by_nvml", lambda device: None)
    monkeypatch.setattr(validity, "is_available", lambda: available)
    monitor = Monitor(torch.device("cuda"))
    monitor.start()
    checks = {check["name"]: check for check in monitor.conclude([])["checks"]}
    for name in ("throttling", "clocks", "other_processes"):
        assert (checks[name]["ok"], checks[name]["detail"]) == (False, f"NVML {why}")


class FakeGpu:
    """A fake of NVML's GPU that counts its readings."""

    def __init__(self) -> None:
        self.reads = 0

    def read(self) -> Reading:
        self.reads += 1
        return reading(processes={os.getpid()})


def test_the_monitor_reads_a_gpu_at_most_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    monkeypatch.setattr(validity, "gpu_by_nvml", lambda device: gpu)
    monitor = Monitor(torch.device("cuda"))
    monitor.start(warm=False)
    monitor.watch()
    assert gpu.reads == 0
    monitor._read_at -= 1.1
    monitor.watch()
    monitor.watch()
    assert gpu.reads == 1
    monitor.watch(last=True)
    assert gpu.reads == 2


def test_the_memory_of_the_fullest_device_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [FakeGpu(), FakeGpu()]
    used: list[list[float | None]] = [[9e9, 1024.0, None, 512.0], [9e9, 100.0, 2048.5, 100.0]]
    for gpu, reads in zip(gpus, map(iter, used), strict=True):
        monkeypatch.setattr(gpu, "read", lambda reads=reads: replace(reading(), memory_used_mib=next(reads)))
    monkeypatch.setattr(validity, "gpu_by_nvml", lambda device: gpus[device.index])
    monitor = Monitor([torch.device("cuda", 0), torch.device("cuda", 1)])
    monitor.start()  # a case before
    monitor.start()
    monitor.watch(last=True)
    assert monitor.device_memory_mib() == ([2048.5], "")


def test_the_clock_of_each_gpu_is_the_median_since_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [FakeGpu(), FakeGpu()]
    for gpu, clock in zip(gpus, (1980, None), strict=True):
        monkeypatch.setattr(gpu, "read", lambda clock=clock: replace(reading(), sm_clock_mhz=clock))
    monkeypatch.setattr(validity, "gpu_by_nvml", lambda device: gpus[device.index])
    monitor = Monitor([torch.device("cuda", 0), torch.device("cuda", 1)])
    monitor.start()
    assert monitor.clocks_mhz() == [1980, None]
    assert Monitor(torch.device("cpu")).clocks_mhz() == []
