"""The runner of `collective`: with real ranks over gloo, and what it makes of their faults."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from app.specs.collective import CollectiveSpec
from parallel import process_group
from parallel.process_group import RanksFailed, RanksTimedOut
from tests.plugins import forks
from tests.workers.jobs import sabotaged_ranks
from tests.workers.jobs.sabotaged_ranks import LARGE, SMALL
from tests.workers.reporting import Report, reported
from workers.jobs import _ranks, collective
from workers.jobs.collective import RUNNER
from workers.measure import collective_timing
from workers.outcome import Crashed, Failed, InvalidEnvironment, RunnerError, Unsupported

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_receive")
METRICS = ("latency_ms", "skew_ms", "algorithm_gb_per_s", "bus_gb_per_s", "host_us", "tensor_mib")


@pytest.fixture(autouse=True)
def one_thread_per_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def run(folder: Path, **fields: Any) -> Report:
    return reported(CollectiveSpec(**{"warmup_steps": 2, "measure_steps": 4, **fields}), folder)


def check_cell(report: Report, factor: float, **coordinates: Any) -> None:
    """A cell that was measured: its figures fit each other, and those of its ranks."""
    cell = report.cell(**coordinates)
    assert [name for name, _ in cell] == list(METRICS)
    latency, skew = cell["latency_ms", None], cell["skew_ms", None]
    assert latency["outcome"] == skew["outcome"] == "ok"
    assert latency["n"] == skew["n"] == 4, "one sample per step, not one per rank and step"
    rate = 1e-6 * 2**20 * cell["tensor_mib", None]["median"] / latency["median"]
    assert cell["algorithm_gb_per_s", None]["median"] == pytest.approx(rate)
    assert cell["bus_gb_per_s", None]["median"] == pytest.approx(factor * rate)
    ranks = [row for row in report.table_rows("ranks") if coordinates.items() <= row.items()]
    assert [row["rank"] for row in ranks] == [0, 1]
    assert max(row["max_ms"] for row in ranks) == latency["max"]
    assert max(row["min_ms"] for row in ranks) <= latency["min"]
    assert sum(row["slowest_steps"] for row in ranks) >= 4
    assert {row["warmup_steps"] for row in ranks} == {2}
    assert skew["min"] >= 0
    assert skew["max"] <= latency["max"]


FACTORS = {"all_reduce": 1.0, "all_gather": 0.5, "reduce_scatter": 0.5, "broadcast": 1.0}
FACTORS |= {"all_to_all": 0.5, "send_receive": 1.0}
"""Bus bandwidth over algorithm bandwidth, of two ranks."""


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ranks forks of this process: importing torch takes each of them longer than all that it does here."""
    printing = "import sys\nsys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__\n"
    monkeypatch.setattr(process_group, "_RANK_PROGRAM", printing + process_group._RANK_PROGRAM)
    monkeypatch.setattr(subprocess_handler.SubprocessHandler, "_popen", forks._start_rank)


def test_two_ranks_with_faults_in_some_cells(forked_ranks, tmp_path, monkeypatch, capsys) -> None:
    """In one launch, since each takes seconds."""
    monkeypatch.setattr(collective_timing, "time_cells", sabotaged_ranks.time_cells)
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: {0})
    report = run(tmp_path, size_mb=[SMALL, LARGE], dtypes=["fp32", "bf16"], operations=list(OPERATIONS))
    for operation, factor in FACTORS.items():
        for dtype in ("fp32", "bf16"):
            check_cell(report, factor, operation=operation, dtype=dtype, size_mb=LARGE)
    for dtype in ("fp32", "bf16"):
        oom = report.cell(operation="all_gather", dtype=dtype, size_mb=SMALL)["latency_ms", None]
        assert (oom["outcome"], oom["reason"][:28]) == ("oom", "out of memory in the tensors")
        wrong = report.cell(operation="all_reduce", dtype=dtype, size_mb=SMALL).values()
        assert {row["outcome"] for row in wrong} == {"wrong"}
        assert "number 0 is" in next(iter(wrong))["reason"]
        # Ranks begin a call together: that one came 500 ms late is in nobody's time.
        late = report.cell(operation="broadcast", dtype=dtype, size_mb=SMALL)["latency_ms", None]
        assert late["max"] < 1e3 * sabotaged_ranks.LATE_S - 100
    faulty = {("all_gather", SMALL), ("all_reduce", SMALL)}
    assert {row["outcome"] for row in report.rows if row["metric"] == "host_us"} == {"unknown", "oom", "wrong"}
    assert not faulty & {(row["operation"], row["size_mb"]) for row in report.table_rows("ranks")}
    assert report.steps[2] == (0, 24, "all_reduce, 0.01 MB, fp32: measuring")
    assert report.steps[-1] == (24, 24, "done")
    assert report.cursors == list(range(24))
    assert len(report.verdicts) == 24
    crowded = report.check("cores", operation="broadcast", dtype="bf16", size_mb=LARGE)
    assert (crowded["ok"], crowded["detail"]) == (False, "2 ranks on 1 usable cores")
    assert report.fingerprint["device"]["type"] == "cpu"
    assert "--- output of rank 1 ---\nrank 1 speaks\n" in capsys.readouterr().err


Script = Callable[..., None]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Script]]:
    """What stands in for launches, one after the other: each is given the cells and how to report."""
    launches: list[Script] = []

    def launch(_function: object, cells: list[dict[str, Any]], *_: object, reported: Any, **options: Any) -> list[Any]:
        launches.pop(0)(cells, reported, **options)
        return [None, None]

    monkeypatch.setattr(_ranks, "launch", launch)
    monkeypatch.setattr(collective, "LOOK_S", 0.01)
    yield launches
    assert not launches


def done(cell: dict[str, Any], times_ms: list[float], **fields: Any) -> dict[str, Any]:
    """A rank's report about a cell that it has measured."""
    figures = {"bytes": 2**20, "times_ms": times_ms, "host_us": None, "hidden": len(times_ms), "threads": 1}
    warm = {"warmup": 5, "steady": True, "too_slow": False, "hidden_drift": None, "wrong": None}
    return {"position": cell["position"], "event": "done", **figures, **warm, **fields}


def measured(cells: list[dict[str, Any]], reported: Any, **_: Any) -> None:
    """Rank 0 is a cell ahead of rank 1, and each is the slower one in one of the two steps."""
    for rank, times_ms in enumerate(([1.0, 4.0], [3.0, 2.0])):
        for cell in cells:
            reported(rank, {"position": cell["position"], "event": "warming up"})
            reported(rank, done(cell, times_ms))


def test_latency_and_bandwidth_are_fitted_to_the_slowest_ranks_times(tmp_path: Path, script: list[Script]) -> None:
    """50 µs and 2 GB/s of an all-reduce; of a broadcast there are too few sizes without a fault."""

    def ranks(cells: list[dict[str, Any]], reported: Any, **_: Any) -> None:
        for cell in cells:
            size = int(cell["size_mb"] * 2**20)
            fault = {"wrong": "number 0"} if cell["operation"] == "broadcast" and cell["size_mb"] > 10 else {}
            for rank in range(2):
                times = [0.05 + 1e3 * size / 2e9 - 0.01 * (1 - rank)] * 4
                reported(rank, done(cell, times, bytes=size, **fault))

    script.append(ranks)
    report = run(tmp_path, operations=["all_reduce", "broadcast"], size_mb=[0.01, 1, 100])
    found, few = report.table_rows("fit")
    assert (found["operation"], found["sizes"], found["note"]) == ("all_reduce", 3, None)
    assert (found["latency_us"], found["gb_per_s"]) == (pytest.approx(50), pytest.approx(2))
    assert (few["operation"], few["sizes"], few["latency_us"]) == ("broadcast", 2, None)
    assert "need 3" in few["note"]


def test_a_step_takes_as_long_as_its_slowest_rank(tmp_path: Path, script: list[Script]) -> None:
    script.append(measured)
    report = run(tmp_path, size_mb=[1, 2], operations=["all_reduce"], measure_steps=2)
    for size in (1, 2):
        cell = report.cell(size_mb=size)
        assert (cell["latency_ms", None]["min"], cell["latency_ms", None]["max"]) == (3.0, 4.0)
        assert cell["skew_ms", None]["median"] == 2.0
        assert cell["algorithm_gb_per_s", None]["median"] == pytest.approx(2**20 / 3.5e6)
    assert [(row["slowest_steps"], row["median_ms"]) for row in report.table_rows("ranks")] == [(1, 2.5)] * 4


@pytest.mark.parametrize("outcome", ["failed", "oom"])
def test_what_an_operation_raises_costs_its_own_cell(tmp_path: Path, script: list[Script], outcome: str) -> None:
    """Also if others have errors because of it: the launcher says who was first."""

    def raising(cells: list[dict[str, Any]], reported: Any, **_: Any) -> None:
        measured(cells[:1], reported)
        for rank, reason in ((0, "Connection closed by peer"), (1, "ValueError: a pineapple")):
            told = outcome if rank else "failed"
            reported(rank, {"position": 1, "event": "raised", "outcome": told, "reason": reason})
        raise RanksFailed(1, "raised ValueError: a pineapple", trace="Traceback …")

    script += [raising, measured]
    report = run(tmp_path, size_mb=[1, 2, 3], operations=["broadcast"], measure_steps=2)
    outcomes = [report.cell(size_mb=size)["latency_ms", None]["outcome"] for size in (1, 2, 3)]
    assert outcomes == ["ok", outcome, "ok"]
    assert report.cell(size_mb=2)["bus_gb_per_s", None]["reason"] == "rank 1: ValueError: a pineapple"


def failing(error: Exception, *, begun: bool) -> Script:
    """Ranks that fail. Those that have begun tell an error that another one's death has caused."""

    def fail(cells: list[dict[str, Any]], reported: Any, **_: Any) -> None:
        if begun:
            reported(0, {"position": 0, "event": "raised", "outcome": "failed", "reason": "Connection closed by peer"})
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "begun", "failure", "message"),
    [
        (RanksFailed(1, "died after step 3"), True, Crashed, "rank 1 died after step 3"),
        (RanksTimedOut(1, "was stopped and made no step"), True, Crashed, "rank 1 was stopped"),
        (RanksTimedOut(None, "made no step within 60 s"), True, Crashed, "the ranks made no step within 60 s"),
        (RanksFailed(1, "died after step 0"), False, Crashed, "rank 1 died"),
        (RanksTimedOut(0, "did not start"), False, InvalidEnvironment, "did not start: rank 0 did not start"),
        (RanksFailed(0, "raised a", trace="…"), False, InvalidEnvironment, "did not start: rank 0 raised a"),
        (RanksFailed(1, "raised a", trace="…"), True, RunnerError, "rank 1 raised a"),
        (OSError("no ports"), False, InvalidEnvironment, "could not be launched: no ports"),
    ],
)
def test_ranks_that_end_fail_the_job(tmp_path, script, error, begun, failure, message) -> None:
    script.append(failing(error, begun=begun))
    with pytest.raises(RunnerError, match=message) as failed:
        run(tmp_path, size_mb=[1, 2], operations=["broadcast"])
    assert type(failed.value) is failure


def test_the_job_of_a_dead_rank_does_not_go_on(tmp_path: Path) -> None:
    spec = CollectiveSpec()
    assert RUNNER.resume(spec, RUNNER.plan(spec)[0], 3, Failed("crashed", "rank 1 died")) is None  # type: ignore[func-returns-value]


def test_gpus_that_are_not_there_are_no_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(Unsupported, match="world_size 2 needs 2 GPUs here; this worker's process sees 1"):
        run(tmp_path, backend="nccl")
