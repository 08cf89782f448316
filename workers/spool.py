"""What a running job has told so far, kept at the agent until it is committed with the final state."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from app.store.records import MeasurementRecord, StoredArtifact
from workers.log import CappedLog

VERDICTS = ("valid", "suspect", "invalid")
"""From best to worst."""

_measurement = TypeAdapter(MeasurementRecord)


class Spool:
    """Measured cells, stored artifacts, environment, validity and log of one attempt."""

    def __init__(self) -> None:
        self.log = CappedLog()
        self.measurements: list[MeasurementRecord] = []
        self.artifacts: list[StoredArtifact] = []
        self.environment: dict[str, Any] | None = None
        self.validity: dict[str, Any] | None = None

    def add_measurement(self, wire: Mapping[str, Any]) -> None:
        """Take a measurement as `Measurement.to_wire` made it."""
        fields = dict(wire)
        if fields["samples"] is not None:
            fields["samples"] = base64.b64decode(fields["samples"])
        self.measurements.append(_measurement.validate_python(fields))

    def add_environment(self, fingerprint: Mapping[str, Any], neighbours: list[int]) -> None:
        """Take a unit's environment; the first one stands for the job, since its units run on the same devices."""
        if self.environment is None:
            self.environment = {**fingerprint, "neighbours": neighbours}

    def add_validity(self, unit: str, verdict: Mapping[str, Any]) -> None:
        """Take a unit's verdict; the job's is the worst of them, with the checks of all."""
        checks = [{**check, "unit": unit} for check in verdict["checks"]]
        former = self.validity or {"verdict": VERDICTS[0], "checks": []}
        worst = max(former["verdict"], verdict["verdict"], key=VERDICTS.index)
        self.validity = {"verdict": worst, "checks": former["checks"] + checks}

    def forget_results(self) -> None:
        """Keep nothing but the log."""
        self.measurements, self.artifacts, self.environment, self.validity = [], [], None, None
