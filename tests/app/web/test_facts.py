"""What a job's page says of its spec, its environment, its checks and its pace."""

from datetime import UTC, datetime, timedelta
from typing import Any

from app.specs import KINDS
from app.web import facts

START = datetime(2026, 3, 1, 12, tzinfo=UTC)


def event(seconds: float, done: int, total: int, message: str) -> dict[str, Any]:
    at = (START + timedelta(seconds=seconds)).isoformat()
    return {"data": {"done": done, "total": total, "message": message}, "created_at": at}


def test_only_changed_fields_are_listed() -> None:
    spec = KINDS["benchmark"].model_validate({"model": {"size": "tiny"}, "context_length": 64})
    stored = spec.model_dump(mode="json")
    assert [(one.field, one.value, one.default) for one in facts.differences(stored)] == [
        ("model.size", "tiny", "small"),
        ("context_length", 64, 256),
    ]
    changed = facts.changed_only(stored)
    assert changed == {"kind": "benchmark", "model": {"size": "tiny"}, "context_length": 64}
    assert KINDS["benchmark"].model_validate(changed) == spec


def test_a_spec_of_an_unknown_kind_is_listed_whole() -> None:
    assert [one.field for one in facts.differences({"kind": "gone", "x": {"y": 1}})] == ["kind", "x.y"]
    assert facts.differences({}) == []


def test_checks_that_failed_come_first() -> None:
    validity = {
        "checks": [
            {"name": "fine", "ok": True},
            {"name": "steady", "ok": True, "severity": "not_judged"},
            {"name": "host_bound", "ok": False, "severity": "note", "detail": "by far"},
            {"name": "drift", "ok": False, "detail": "9 %", "case": "a", "unit": "a"},
            {"name": "throttled", "ok": False, "severity": "invalid"},
        ]
    }
    found = facts.checks(validity)
    assert [check.verdict for check in found] == ["invalid", "suspect", "note", "not judged", "passed"]
    assert found[1].where == "a"


def test_the_pace_and_the_time_left() -> None:
    progress = [event(0, 0, 2, "unit"), event(10, 0, 80, "making"), event(12, 10, 80, "measuring")]
    assert facts.pace(progress, START + timedelta(seconds=12)) == "200 ms each, about 14 s left"
    assert (facts.pace(progress, START + timedelta(seconds=40)), facts.pace(progress[:2])) == ("200 ms each", None)
    assert facts.pace([]) is None
