"""A reporter that keeps what it is told, as it would travel."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workers.measure.measurement import Measurement
from workers.measure.table import Column, Scalar, Table


class Report:
    """A Reporter for runners that run in the test's own process.

    Args:
        scratch: The unit's scratch folder; the host's ceilings are in a folder of it.
    """

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.ceilings = scratch / "ceilings"
        self.steps: list[tuple[int, int, str]] = []
        self.cells: list[tuple[int, int, str, str, str]] = []
        """Finished ones: done, total, title, outcome, headline."""
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

    def finished(self, done: int, total: int, *, title: str, outcome: str, headline: str, seconds: float) -> None:
        self.cells.append((done, total, title, outcome, headline))
        assert seconds >= 0

    def progress(self, done: int, total: int, message: str) -> None:
        self.steps.append((done, total, message))

    def cursor(self, position: int) -> None:
        self.cursors.append(position)

    def measure(self, measurement: Measurement) -> None:
        self.rows.append(_travelled(measurement.to_wire()))

    def table(self, name: str, columns: Sequence[Column], rows: Sequence[Sequence[Scalar]]) -> None:
        assert name not in self.tables, f"two tables are called {name}"
        self.tables[name] = _travelled(Table(name, columns, rows).to_wire())

    def artifact(self, path: Path, *, name: str, kind: str, media_type: str) -> None:
        assert name not in self.files, f"two artifacts are called {name}"
        self.files[name] = path

    def environment(self, fingerprint: Mapping[str, Any]) -> None:
        self.fingerprint = _travelled(fingerprint)

    def validity(self, verdict: Mapping[str, Any], case_key: str | None = None, title: str = "") -> None:
        if case_key is None:
            self.verdict = _travelled(verdict)
            return
        assert case_key not in self.verdicts, f"two verdicts on {title}"
        self.verdicts[case_key] = _travelled(verdict)
        self.titles[case_key] = title

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


def _travelled(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message as its reader gets it."""
    return dict(json.loads(json.dumps(message, allow_nan=False)))
