"""A reporter that keeps what it is told, as it would travel."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workers.measure.measurement import Measurement


class Report:
    """Keeps measurements, progress, environment and validity of a runner of cells."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.steps: list[tuple[int, int, str]] = []
        self.rows: list[dict[str, Any]] = []
        self.fingerprint: dict[str, Any] = {}
        self.verdict: dict[str, Any] = {}

    def progress(self, done: int, total: int, message: str) -> None:
        self.steps.append((done, total, message))

    def measure(self, measurement: Measurement) -> None:
        self.rows.append(json.loads(json.dumps(measurement.to_wire())))

    def artifact(self, path: Path, *, name: str, kind: str, media_type: str) -> None:
        raise AssertionError(f"nobody asked for {name}")

    def environment(self, fingerprint: Mapping[str, Any]) -> None:
        self.fingerprint = json.loads(json.dumps(fingerprint))

    def validity(self, verdict: Mapping[str, Any]) -> None:
        self.verdict = json.loads(json.dumps(verdict))

    def cell(self, **coordinates: Any) -> dict[tuple[str, str | None], dict[str, Any]]:
        """The rows of the cells with these coordinates, by metric and phase."""
        rows = [row for row in self.rows if coordinates.items() <= row["case"].items()]
        found = {(row["metric"], row["phase"]): row for row in rows}
        assert rows, f"no cell has {coordinates}"
        assert len(found) == len(rows), f"more than one cell has {coordinates}"
        return found
