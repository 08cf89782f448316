"""Jobs of the published tables, run in the test's own process: to start one of their own takes seconds of a core."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from app.specs import spec_adapter
from tests.workers.reporting import Report
from workers.jobs import runner_for


def run_here(folder: Path) -> Callable[[dict[str, Any], float], dict[str, Any]]:
    """What stands for `benchmarks.gpu_tables.run`, with `folder` for files; jobs of one unit and one case."""

    def run(spec: dict[str, Any], _timeout_s: float) -> dict[str, Any]:
        parsed = spec_adapter.validate_json(json.dumps(spec))
        runner, report = runner_for(parsed.kind), Report(folder)
        (unit,) = runner.plan(parsed)
        runner.run(parsed, unit, report)
        (verdict,) = report.verdicts.values()
        return {
            "tables": list(report.tables.values()),
            "measurements": report.rows,
            "validity": verdict,
            "environment": report.fingerprint,
        }

    return run
