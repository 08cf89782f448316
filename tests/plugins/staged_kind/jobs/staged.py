"""Runs `staged`: reports of everything that a unit can report, without torch."""

from __future__ import annotations

import os
import platform
import signal
import sys
from pathlib import Path
from typing import Any

from workers.jobs._base import Unit
from workers.measure.table import Column
from workers.outcome import Failed
from workers.reporter import Reporter

WRAPPER = Path(__file__).resolve().parents[2] / "wrapper.py"
OPERATIONS = (Column("operation", "string"), Column("time", "number", "ms"), Column("calls", "integer"))
DTYPES = (Column("length", "integer"), Column("dtype", "string"), Column("exact", "boolean"))


class StagedRunner:
    """The runner of kind `staged`."""

    kind = "staged"
    needs_torch = False

    def plan(self, spec: Any) -> list[Unit]:
        """The first stage runs under the tests' wrapper."""
        wrap = (sys.executable, str(WRAPPER), "--report", "{scratch}/report.txt", "--")
        return [
            Unit("first stage", start="exec", wrap=wrap, params={"first": 0}),
            Unit("second stage", params={"first": 0, "crash_at": spec.crash_at}),
        ]

    def run(self, spec: Any, unit: Unit, report: Reporter) -> None:
        """Everything of one stage; the tables come before a crash."""
        from workers.measure.measurement import Measurement

        print(f"{unit.title} in process {os.getpid()}", flush=True)
        first = unit.params["first"]
        if first == 0:
            report.environment({"software": {"python": platform.python_version()}})
            report.table("operations", OPERATIONS, [["add", 1.5, len(spec.lengths)], ["copy", 0.5, 1]])
            report.table("dtypes", DTYPES, [[length, "int64", True] for length in spec.lengths])
            trace = report.scratch / "trace.json"
            trace.write_text(f'{{"of": "{unit.title}"}}')
            report.artifact(trace, name="trace.json", kind="trace", media_type="application/json")
        for index, cell in enumerate(spec.cells()):
            if index < first:
                continue
            report.progress(index, len(spec.lengths), f"length {cell.length}")
            report.cursor(index)
            if cell.length == unit.params.get("crash_at"):
                os.kill(os.getpid(), signal.SIGSEGV)
            case = spec.case(cell)
            # The same in both stages: real times of microseconds would differ by more than check `replicates` allows.
            samples = [1e-3 * (1 + cell.length)]
            report.measure(Measurement(case.coordinates, case.key, "1x CPU", None, "sum_ms", "ms", samples=samples))
            checks = [{"name": "patience", "ok": cell.length != 2, "detail": f"{cell.length} numbers"}]
            report.validity(
                {"verdict": "suspect" if cell.length == 2 else "valid", "checks": checks},
                case_key=case.key,
                title=f"length {cell.length}",
            )

    def resume(self, spec: Any, unit: Unit, position: int, failure: Failed) -> Unit | None:
        """The rest goes on with the length that crashed, which is spared this time."""
        if not spec.goes_on:
            return None
        return Unit(f"{unit.title}, the rest", params={"first": position, "crashed": failure.detail})

    def collect(self, spec: Any, unit: Unit, scratch: Path, report: Reporter) -> None:
        """What the wrapper wrote after the unit's end."""
        words = (scratch / "report.txt").read_text()
        report.table("counters", (Column("word", "string"),), [[word] for word in words.split()])
        report.artifact(scratch / "report.txt", name="report.txt", kind="report", media_type="text/plain")


RUNNER = StagedRunner()
