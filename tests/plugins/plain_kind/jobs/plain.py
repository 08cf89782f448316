"""Runs `plain`: files below $MISBEHAVE_FOLDER tell the test what happened and hold jobs back."""

import json
import os
import random
from pathlib import Path
from typing import Any

import misbehaviour

from workers.jobs._base import Unit
from workers.reporter import Reporter


class PlainRunner:
    """The runner of kind `plain`."""

    kind = "plain"
    needs_torch = False

    def plan(self, spec: Any) -> list[Unit]:
        return [Unit(spec.behaviour, start=spec.start)]

    def run(self, spec: Any, unit: Unit, report: Reporter) -> None:
        """Behave, and report samples that no other attempt has, as a measurement and as a file."""
        from workers.measure.measurement import Measurement

        folder = Path(os.environ["MISBEHAVE_FOLDER"])
        match spec.behaviour:
            case "counted":
                misbehaviour.count(folder, spec.number)
            case "alone":
                misbehaviour.mark_overlaps(folder)
            case "gated":
                misbehaviour.wait_at_gate(folder)
            case "stubborn":
                misbehaviour.never_end(folder)
            case "segfault":
                misbehaviour.fall_over()
            case "chatty":
                misbehaviour.chatter()
            case "curious":
                misbehaviour.write_down_variables(folder)
        case, samples = spec.case(), [random.random() for _ in range(3)]
        report.measure(Measurement(case.coordinates, case.key, "1x nothing", None, "step_ms", "ms", samples=samples))
        path = report.scratch / "samples.json"
        path.write_text(json.dumps(samples) + " " * (spec.file_mib << 20))
        report.artifact(path, name=path.name, kind="samples", media_type="application/json")


RUNNER = PlainRunner()
