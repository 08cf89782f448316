"""What a running job has told, as it is kept for the final commit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from app.store.records import MeasurementRecord, StoredArtifact
from workers.measure.measurement import Measurement, unpack
from workers.spool import Spool

CASE: dict[str, str | int] = {"model": "tiny", "context_length": 128}


def verdict(name: str, *checks: str) -> dict[str, Any]:
    return {"verdict": name, "checks": [{"check": check} for check in checks]}


def test_a_measurement_arrives_as_it_was_sent() -> None:
    samples = [1.5, 2.5, 3.5]
    sent = Measurement(CASE, "forward", "forward_ms", "ms", samples=samples)
    spool = Spool()
    spool.add_measurement(sent.to_wire())
    (record,) = spool.measurements
    assert isinstance(record, MeasurementRecord)
    assert (record.case, record.phase, record.metric, record.unit) == (CASE, "forward", "forward_ms", "ms")
    assert (record.outcome, record.reason, record.n, record.median) == ("ok", None, 3, 2.5)
    assert record.samples is not None
    assert unpack(record.samples).tolist() == samples


def test_a_missing_value_stays_missing() -> None:
    spool = Spool()
    spool.add_measurement(Measurement(CASE, "step", "mfu", "fraction", "unknown", "no peak known").to_wire())
    (record,) = spool.measurements
    assert (record.outcome, record.reason) == ("unknown", "no peak known")
    empty = {"samples", "n", "mean", "std", "median", "min", "max", "p05", "p25", "p75", "p95"}
    values = dataclasses.asdict(record)
    assert {name for name, value in values.items() if value is None} == empty


def test_the_first_units_environment_stands_for_the_job() -> None:
    spool = Spool()
    spool.add_environment({"gpu": "first"}, neighbours=[3, 7])
    spool.add_environment({"gpu": "second"}, neighbours=[])
    assert spool.environment == {"gpu": "first", "neighbours": [3, 7]}


@pytest.mark.parametrize(
    ("told", "worst"),
    [
        (["valid"], "valid"),
        (["suspect"], "suspect"),
        (["valid", "suspect", "valid"], "suspect"),
        (["invalid", "suspect"], "invalid"),
    ],
)
def test_the_worst_verdict_stands_for_the_job(told: list[str], worst: str) -> None:
    spool = Spool()
    for number, name in enumerate(told):
        spool.add_validity(f"unit {number}", verdict(name, "clocks"))
    assert spool.validity is not None
    assert spool.validity["verdict"] == worst
    assert spool.validity["checks"] == [{"check": "clocks", "unit": f"unit {number}"} for number, _ in enumerate(told)]


def test_an_unknown_verdict_is_refused() -> None:
    with pytest.raises(ValueError, match="not in tuple"):
        Spool().add_validity("unit", verdict("fine"))


def test_results_can_be_forgotten_and_the_log_kept() -> None:
    spool = Spool()
    spool.log.write(b"hello\n")
    spool.add_measurement(Measurement(CASE, "forward", "forward_ms", "ms", samples=[1.0]).to_wire())
    spool.artifacts.append(StoredArtifact("trace.json.gz", "trace", "application/gzip", 1, "0" * 64))
    spool.add_environment({}, neighbours=[])
    spool.add_validity("unit", verdict("valid"))
    spool.forget_results()
    assert (spool.measurements, spool.artifacts, spool.environment, spool.validity) == ([], [], None, None)
    assert spool.log.text() == "hello\n"
