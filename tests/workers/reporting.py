"""A reporter that keeps all messages, as the agent reads them, and code of the user's own."""

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from flopwatch import steps
from workers import messages, uploaded
from workers.agent.measurements import record_of
from workers.jobs import runner_for
from workers.jobs._base import Unit
from workers.measure.ceilings import Ceilings
from workers.reporter import Reporter


class Report(Reporter):
    """A Reporter for runners that run in the test's own process.

    Args:
        scratch: The unit's scratch folder; the host's ceilings are in a folder of it.
    """

    def __init__(self, scratch: Path) -> None:
        super().__init__(self._take, scratch=scratch, ceilings=scratch / "ceilings")
        self.steps: list[tuple[int, int, str]] = []
        self.cursors: list[int] = []
        self.rows: list[dict[str, Any]] = []
        """Measurements."""
        self.tables: dict[str, dict[str, Any]] = {}
        self.files: dict[str, Path] = {}
        """Artifacts, by name."""
        self.fingerprint: dict[str, Any] = {}
        self.verdicts: dict[str, dict[str, Any]] = {}
        """Of cases, by their keys."""
        self.titles: dict[str, str] = {}
        """Of those cases."""
        self.verdict: dict[str, Any] = {}
        """The unit's own, without a case."""

    def _take(self, message: messages.Message) -> None:
        message = messages.parse(messages.to_line(message))
        fields = asdict(message)
        del fields["type"]
        match message:
            case messages.Progress():
                self.steps.append((message.done, message.total, message.message))
            case messages.Cursor():
                self.cursors.append(message.position)
            case messages.Measured():
                self.rows.append({**vars(record_of(message, 0)), "samples": message.samples})
            case messages.TableMade():
                self.tables[message.name] = fields
            case messages.ArtifactMade():
                self.files[message.name] = Path(message.path)
            case messages.Environment():
                self.fingerprint = message.environment
            case messages.Validity(case_key=None):
                self.verdict = {"verdict": message.verdict, "checks": fields["checks"]}
            case messages.Validity(case_key=str(key)):
                assert key not in self.verdicts, f"two verdicts on {message.title}"
                self.verdicts[key] = {"verdict": message.verdict, "checks": fields["checks"]}
                self.titles[key] = message.title

    def cell(self, **coordinates: Any) -> dict[tuple[str, str | None], dict[str, Any]]:
        """The rows of the one case with these coordinates, by metric and phase."""
        rows = self._rows_of(coordinates)
        found = {(row["metric"], row["phase"]): row for row in rows}
        assert len(found) == len(rows), f"more than one case has {coordinates}"
        return found

    def verdict_on(self, **coordinates: Any) -> dict[str, Any]:
        """The verdict on the one case with these coordinates."""
        (key,) = {row["case_key"] for row in self._rows_of(coordinates)}
        return self.verdicts[key]

    def check(self, name: str, **coordinates: Any) -> dict[str, Any]:
        """The check of that name of the one case with these coordinates."""
        (found,) = [check for check in self.verdict_on(**coordinates)["checks"] if check["name"] == name]
        return dict(found)

    def table_rows(self, name: str, **values: Any) -> list[dict[str, Any]]:
        """The rows of a table that have these values."""
        table = self.tables[name]
        names = [column["name"] for column in table["columns"]]
        rows = [dict(zip(names, row, strict=True)) for row in table["rows"]]
        return [row for row in rows if values.items() <= row.items()]

    def _rows_of(self, coordinates: Mapping[str, Any]) -> list[dict[str, Any]]:
        rows = [row for row in self.rows if coordinates.items() <= row["case"].items()]
        assert rows, f"no case has {coordinates}"
        return rows


def reported(spec: Any, folder: Path, unit: Unit | None = None) -> Report:
    """Run the first unit of a job, or this one, in this process."""
    report, runner = Report(folder), runner_for(spec.kind)
    runner.run(spec, unit or runner.plan(spec)[0], report)
    return report


def with_ceilings(folder: Path, tflops: float = 100.0, gb_per_s: float = 1e5) -> Path:
    """The folder, with ceilings on record that a profile would else measure, for seconds each time."""
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        rates = dict.fromkeys(("fp32", "tf32", "bf16", "fp16"), tflops)
        Ceilings(folder / "ceilings").record(torch.device(device), rates, gb_per_s)
    return folder


@contextmanager
def uploading(folder: Path) -> Iterator[Callable[..., dict[str, Any]]]:
    """A function that uploads a source, and returns what a spec says of a function in it; nothing of it stays."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path])

        def upload(source: str, function: str, file: str | None = "mine.py") -> dict[str, Any]:
            for name, value in uploaded.write(folder, [source.encode()]).items():
                patch.setenv(name, value)
            return {"sha256": hashlib.sha256(source.encode()).hexdigest(), "function": function, "file": file}

        yield upload
    steps.listen(None)
    for name in [name for name in sys.modules if name.startswith("uploaded_")]:
        del sys.modules[name]
