"""Builds records for tests; what a test does not give has a plain value."""

import json
from typing import Any

from app.store.records import MeasurementRecord

STEADY = (1.00, 1.01, 0.99, 1.005, 0.995, 1.002, 0.998, 1.004)
"""Times of 8 processes that do the same."""
STATISTICS = ("mean", "median", "min", "max", "p05", "p25", "p75", "p95")


def measurement(metric: str = "step_ms", value: float | None = 2.0, **fields: Any) -> MeasurementRecord:
    """Return a measurement of one sample with this value; without a value, one that ran out of memory.

    Cases with other coordinates have other keys.
    """
    fits = fields.get("outcome", "ok") == "ok" and value is not None
    statistics: dict[str, Any] = dict.fromkeys(STATISTICS, value) | {"n": 1, "std": 0.0}
    plain: dict[str, Any] = {
        "unit_index": 0,
        "case": {},
        "case_key": json.dumps(fields.get("case", {}), sort_keys=True),
        "device_key": "1x test CPU",
        "validity": None,
        "phase": metric.removesuffix("_ms") if metric.endswith("_ms") else None,
        "metric": metric,
        "unit": "ms",
        "outcome": "ok" if fits else "oom",
        "reason": None if fits else "out of memory",
        "samples": None,
    }
    return MeasurementRecord(**plain | (statistics if fits else dict.fromkeys(statistics)) | fields)


def measured(
    metric: str,
    value: float | None,
    outcome: str = "ok",
    *,
    unit_index: int = 0,
    validity: str | None = None,
    **case: Any,
) -> MeasurementRecord:
    """Return a measurement of the case with these coordinates."""
    return measurement(metric, value, outcome=outcome, unit_index=unit_index, validity=validity, case=case)
