from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from workers.measure import validity
from workers.measure.compilation import Compilation, compilation
from workers.measure.nvml import Reading
from workers.measure.validity import (
    Check,
    HostLoad,
    Monitor,
    check_compilation,
    check_gpu,
    check_host_load,
    check_many,
    check_stability,
    read_host_load,
    verdict,
)


def outcome(checks: list[Check]) -> dict[str, bool]:
    return {check.name: check.ok for check in checks}


def reading(clock: int | None = 1980, reasons: int | None = 0, processes: set[int] | None = frozenset()) -> Reading:
    return Reading(clock, 3201, 40, 300.0, reasons, None if processes is None else frozenset(processes))


def test_the_spread_of_many_measurements_is_one_check() -> None:
    steady, shaky, single = [1.0, 1.01, 1.0], [1.0, 2.0, 1.0], [1.0]
    assert check_many({"a": steady, "b": single}).ok
    found = check_many({"a": steady, "b": shaky, "c": single})
    assert not found.ok
    assert found.detail == "above 10% in 1 of 3; the worst is 43.3%, b"
    assert check_many({"a": single}).detail == "measurements: 1, none with samples enough to judge"
    assert check_many({}).ok


def test_the_verdict_is_the_worst_of_the_checks() -> None:
    fine, odd, wrong = Check("a", True, "x"), Check("b", False, "y"), Check("c", False, "z", "invalid")
    assert verdict([fine]) == {"verdict": "valid", "checks": [{"name": "a", "ok": True, "detail": "x"}]}
    assert verdict([fine, odd])["verdict"] == "suspect"
    assert verdict([odd, wrong, fine])["verdict"] == "invalid"


def test_spread_and_trend() -> None:
    assert outcome(check_stability([10.0, 10.1] * 10)) == {"variation": True, "drift": True}
    assert outcome(check_stability([10.0, 15.0] * 10)) == {"variation": False, "drift": True}
    assert outcome(check_stability([10.0] * 10 + [11.5] * 10)) == {"variation": True, "drift": False}
    for few in ([], [10.0]):
        assert all("too few to judge" in check.detail and check.ok for check in check_stability(few))


def test_throttling_clock_drops_and_strangers_are_seen() -> None:
    own = os.getpid()
    calm = [reading(processes={own}), reading(processes={own})]
    assert set(outcome(check_gpu(calm, own)).values()) == {True}
    for mask, ok in ((0x01, True), (0x04, True), (0x20, False), (0x40, False), (0x80, False)):
        assert outcome(check_gpu([*calm, reading(reasons=mask)], own))["throttling"] is ok
    assert outcome(check_gpu([*calm, reading(1700)], own))["clocks"] is False
    assert outcome(check_gpu([*calm, reading(1900)], own))["clocks"] is True
    assert outcome(check_gpu([*calm, reading(processes={own, 1})], own))["other_processes"] is False


def test_in_a_container_one_process_of_an_unknown_number_is_ours() -> None:
    assert outcome(check_gpu([reading(processes={4711})], own_process=7))["other_processes"] is True
    assert outcome(check_gpu([reading(processes={4711, 4712})], own_process=7))["other_processes"] is False


def test_a_gpu_that_tells_nothing_is_suspect() -> None:
    assert set(outcome(check_gpu([], 1)).values()) == {False}
    assert set(outcome(check_gpu([reading(None, None, None)], 1)).values()) == {False}


def test_compilation_in_the_measured_steps_and_eager_fallback() -> None:
    once = Compilation(graphs=1)
    assert set(outcome(check_compilation(once, once, warmup_steps=1)).values()) == {True}
    twice = check_compilation(once, Compilation(graphs=2), warmup_steps=1)
    assert verdict(twice)["verdict"] == "invalid"
    assert verdict(check_compilation(Compilation(), once, warmup_steps=0))["verdict"] == "suspect"
    assert verdict(check_compilation(Compilation(), Compilation(), warmup_steps=1))["verdict"] == "invalid"
    partly = Compilation(graphs=1, frames_not_compiled=1)
    assert outcome(check_compilation(partly, partly, warmup_steps=1))["eager_fallback"] is False
    broken = Compilation(graphs=2, graph_breaks=1)
    assert verdict(check_compilation(broken, broken, warmup_steps=1))["verdict"] == "suspect"


def test_the_compilers_counters_are_read() -> None:
    torch._dynamo.utils.counters.clear()

    def double(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 3:
            torch._dynamo.graph_break()
        return 2 * x

    start = compilation()
    compiled = torch.compile(double, backend="eager", dynamic=False)
    compiled(torch.ones(2))
    first = compilation()
    assert (first.graphs - start.graphs, first.graph_breaks) == (1, 0)
    compiled(torch.ones(2))
    assert compilation() == first
    compiled(torch.ones(3))
    assert compilation().graphs > first.graphs
    assert compilation().graph_breaks == 1


@pytest.mark.parametrize(
    ("hits", "misses", "state"), [(0, 0, "unused"), (0, 2, "cold"), (3, 0, "warm"), (1, 1, "mixed")]
)
def test_the_compile_cache_is_cold_or_warm(hits: int, misses: int, state: str) -> None:
    assert Compilation(cache_hits=hits, cache_misses=misses).cache == state


def test_what_others_took_of_the_processors() -> None:
    before = HostLoad(busy=100, own=10, available=1000)
    alone = HostLoad(busy=110.5, own=20, available=1020)
    crowded = HostLoad(busy=115, own=20, available=1020)
    assert check_host_load(before, alone, 10, matters=True).ok
    disturbed = check_host_load(before, crowded, 10, matters=True)
    assert not disturbed.ok
    assert "25.0%" in disturbed.detail
    assert check_host_load(before, crowded, 10, matters=False).ok
    assert "too short" in check_host_load(before, crowded, 0.1, matters=True).detail
    assert not check_host_load(None, None, 10, matters=True).ok


def test_host_load_is_read_from_the_kernel(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 0 200 1000 100 0 0 50 0 0\ncpu0 1 2 3\n")
    load = read_host_load(stat)
    assert load is not None
    ticks = os.sysconf("SC_CLK_TCK")
    assert (load.busy, load.available) == (350 / ticks, 1450 / ticks)
    assert read_host_load(tmp_path / "none") is None
    stat.write_text("nonsense")
    assert read_host_load(stat) is None


def test_own_work_is_not_taken_for_others() -> None:
    before = read_host_load()
    assert before is not None
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
    after = read_host_load()
    assert after is not None
    assert after.own - before.own >= 0.25
    assert after.busy - before.busy >= after.own - before.own - 0.1


def test_the_monitor_gives_a_verdict_on_a_cpu() -> None:
    torch._dynamo.utils.counters.clear()
    monitor = Monitor(torch.device("cpu"))
    monitor.start(warm=True)
    monitor.watch(last=True)
    names = [check["name"] for check in monitor.verdict([1.0, 1.0], compiled=False, warmup_steps=1)["checks"]]
    assert names == ["variation", "drift", "host_load"]
    compiled = monitor.verdict([1.0, 1.0], compiled=True, warmup_steps=1)
    assert compiled["verdict"] == "invalid", "nothing was compiled"


def test_the_monitor_reads_a_gpu_at_most_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gpu:
        reads = 0

        def read(self) -> Reading:
            self.reads += 1
            return reading(processes={os.getpid()})

        def neighbours(self) -> list[Gpu]:
            return []

    gpu = Gpu()
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
    result = monitor.verdict([1.0, 1.0], compiled=False, warmup_steps=0)
    assert {check["name"]: check["ok"] for check in result["checks"]} == dict.fromkeys(
        ["variation", "drift", "throttling", "clocks", "other_processes", "neighbours", "host_load"], True
    )
