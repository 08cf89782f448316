"""The grid runner by itself: cells without an oracle or a stopwatch, on several devices."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from app.specs import Case
from app.specs._base import Resources
from kernels.tolerance import Error
from tests.workers.reporting import Report
from workers.jobs import _grid
from workers.jobs._base import Unit
from workers.jobs._grid import Context, GridRunner, Trial
from workers.jobs._grid.operations import set_errors
from workers.jobs._values import Metric, Values
from workers.measure.check import Check
from workers.measure.judging import Judgement
from workers.measure.memory import OutOfMemory
from workers.outcome import Crashed, Failed, InvalidEnvironment, Unsupported
from workers.reporter import Reporter


@dataclass(frozen=True)
class Cell:
    """What happens in it, and the precision that it is computed in."""

    event: str
    precision: str | None = None

    @property
    def title(self) -> str:
        return f"cell that is {self.event}, of two sentences"


@dataclass(frozen=True)
class Spec:
    events: tuple[str, ...]
    precision: str | None = None
    device: str = "cpu"

    def resources(self) -> Resources:
        return Resources(device_type="cpu", devices=1)

    def cells(self) -> list[Cell]:
        return [Cell(event, self.precision) for event in self.events]

    def case(self, cell: Cell) -> Case:
        return Case("test", asdict(cell))


ERRORS: dict[str, Exception] = {
    "oom": OutOfMemory("out of memory in the ring"),
    "unsupported": Unsupported("no such ring"),
    "invalid_environment": InvalidEnvironment("the ring is bent"),
    "failed": ValueError("the ring is a pineapple"),
    "torch_oom": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
}


class TestRunner(GridRunner[Context]):
    """Two devices, and cells that take no time."""

    __test__ = False
    kind = "test"

    def open(self, spec: Any, devices: Sequence[torch.device], report: Reporter) -> Context:
        return Context(devices, report)

    def devices(self, spec: Any) -> list[torch.device]:
        return [torch.device("cpu"), torch.device("cpu")]

    def precision_of(self, cell: Cell) -> str | None:
        return cell.precision

    def metrics(self, spec: Any, cell: Cell) -> list[Metric]:
        return [Metric("ring_ms", "ring", "ms"), Metric("gb_per_s", None, "GB/s")]

    def measure(self, spec: Any, cell: Cell, context: Context, trial: Trial) -> None:
        assert len(context.devices) == 2
        trial.tell("half way")
        if cell.event == "mistaken":
            trial.values.overrule("the ring is a square")
            return
        if cell.event == "noisy":
            trial.checks.append(Check("variation", False, "coefficient of variation 50%"))
        if cell.event != "torn":
            if error := ERRORS.get(cell.event):
                raise error
            trial.values.set("gb_per_s", None, [3.0])
        trial.values.set("ring_ms", "ring", [1.0, 2.0])
        if cell.event == "torn":
            raise ERRORS["failed"]


RUNNER = TestRunner()


def run(tmp_path: Path, *events: str, unit: Unit | None = None, **fields: Any) -> Report:
    spec, report = Spec(events, **fields), Report(tmp_path)
    RUNNER.run(spec, unit or RUNNER.plan(spec)[0], report)
    return report


def test_what_happens_to_a_cell_is_its_outcome_and_no_others(tmp_path: Path) -> None:
    report = run(tmp_path, "fine", *ERRORS, "torn", "noisy")
    found = {event: report.cell(event=event) for event in ("fine", *ERRORS, "torn", "noisy")}
    assert {event: rows["ring_ms", "ring"]["outcome"] for event, rows in found.items()} == {
        "fine": "ok",
        **{event: event for event in ERRORS},
        "torch_oom": "oom",
        "torn": "ok",
        "noisy": "ok",
    }
    reasons = {event: found[event]["gb_per_s", None]["reason"] for event in found}
    assert reasons["oom"] == "out of memory in the ring"
    assert reasons["failed"] == reasons["torn"] == "ValueError: the ring is a pineapple"
    assert reasons["torch_oom"] == "out of memory: CUDA out of memory. Tried to allocate 20.00 GiB."
    with pytest.raises(KeyError):  # of no measurement there is nothing to trust or to doubt
        report.verdict_on(event="unsupported")
    judged = found.keys() - {"unsupported"}
    suspect = {event for event in judged if not report.check("measured", event=event)["ok"]}
    assert suspect == {"failed", "invalid_environment", "torn"}
    assert report.check("measured", event="torn")["detail"] == "failed: ValueError: the ring is a pineapple"
    assert report.verdict_on(event="noisy")["verdict"] == "suspect"
    assert report.cursors == list(range(8))
    assert report.steps[:2] == [
        (0, 8, "cell that is fine, of two sentences"),
        (0, 8, "cell that is fine, of two sentences: half way"),
    ]


def test_several_devices_are_in_the_environment_and_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.measure.environment.device_key", lambda device, count=1: f"{count}x {device}")
    report = run(tmp_path, "fine", "oom")
    assert {row["device_key"] for row in report.rows} == {"2x cpu"}
    assert len(report.fingerprint["other_devices"]) == 1


def test_cells_go_on_after_a_crash(tmp_path: Path) -> None:
    spec = Spec(("fine", "noisy", "oom"))
    (unit,) = RUNNER.plan(spec)
    assert unit.title == "3 cells"
    rest = RUNNER.resume(spec, unit, 1, Failed("crashed", "the job's process was killed by SIGSEGV"))
    assert rest.title == "3 cells, going on after cell 2"
    again = RUNNER.resume(spec, rest, 2, Failed("crashed", "the job's process was killed by SIGBUS"))
    assert again.title == "3 cells, going on after cell 3"
    report = run(tmp_path, *spec.events, unit=rest)
    assert report.cursors == [2]
    assert {row["case"]["event"]: row["outcome"] for row in report.rows} == {"noisy": "crashed", "oom": "oom"}
    assert report.check("measured", event="noisy")["detail"] == "crashed: the job's process was killed by SIGSEGV"
    assert report.verdict == {}, "that nothing was measured cannot be said of the rest"
    last = run(tmp_path, *spec.events, unit=again)
    assert last.cursors == []
    assert {row["reason"] for row in last.rows} == {"the job's process was killed by SIGBUS"}
    assert last.steps[-1] == (3, 3, "done")


def test_a_lost_device_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(device: torch.device) -> None:
        raise Crashed("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(_grid, "check_device_answers", lost)
    spec, report = Spec(("failed", "fine")), Report(tmp_path)
    with pytest.raises(Crashed, match="illegal memory access"):
        RUNNER.run(spec, RUNNER.plan(spec)[0], report)
    assert report.rows == []
    assert report.cursors == [0]


def test_each_cell_is_computed_in_its_precision(tmp_path: Path) -> None:
    former = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        report = run(tmp_path, "fine", precision="bf16")
        assert report.fingerprint["settings"]["float32_matmul_precision"] == "highest", "taken after it is set"
        assert torch.get_float32_matmul_precision() == "highest"
        torch.set_float32_matmul_precision("high")
        assert run(tmp_path, "fine").fingerprint["settings"]["float32_matmul_precision"] == "high", "any will do"
    finally:
        torch.set_float32_matmul_precision(former)
    report = run(tmp_path, "fine", precision="tf32")
    assert {row["outcome"] for row in report.rows} == {"unsupported"}


def test_a_kind_without_times_is_not_watched(tmp_path: Path) -> None:
    class Timeless(TestRunner):
        timed = False

    def checks(runner: TestRunner) -> list[str]:
        spec, report = Spec(("noisy",)), Report(tmp_path)
        runner.run(spec, runner.plan(spec)[0], report)
        return [check["name"] for check in report.verdict_on(event="noisy")["checks"]]

    assert checks(RUNNER) == ["measured", "variation", "host_load"]
    assert checks(Timeless()) == ["measured", "variation"]


def test_the_larger_error_of_several_judgements_is_shown() -> None:
    def judged(*errors: float) -> Judgement:
        return Judgement({index: Error(error, error) for index, error in enumerate(errors)}, None)

    values = Values([Metric("output_error", None, "fraction"), Metric("gradient_error", None, "fraction")])
    set_errors(values, judged(0.1, 0.2, 0.3), judged(0.4, 0.1, 0.1))
    assert values.samples("output_error", None) == [0.4]
    assert values.samples("gradient_error", None) == [0.3]
    set_errors(values, judged(float("nan")))
    assert values.samples("output_error", None) is None
    assert values.samples("gradient_error", None) == [0.3]
