"""Verdicts in words."""

from typing import Any

import pytest

from flopwatch.text.validity import doubts, noisy_host, notes, verdict


def test_a_failed_check_names_its_unit_and_case() -> None:
    check = {"name": "drift", "ok": False, "detail": "9 %"}
    checks = [
        check,
        check | {"case": "triton"},
        check | {"case": "flex", "unit": "replicate 1"},
        check | {"case": "replicate 2", "unit": "replicate 2"},
        check | {"ok": True},
    ]
    assert doubts({"verdict": "suspect", "checks": checks}) == [
        "drift: 9 %",
        "triton: drift: 9 %",
        "replicate 1: flex: drift: 9 %",
        "replicate 2: drift: 9 %",
    ]


def test_the_worst_doubt_comes_first() -> None:
    checks = [{"name": it, "ok": False, "severity": it, "detail": ""} for it in ("suspect", "note", "invalid", "wrong")]
    assert doubts({"checks": checks}) == ["wrong", "invalid", "suspect"]


def test_of_many_failed_checks_the_first_are_listed() -> None:
    checks = [{"name": str(number), "ok": False, "detail": "x"} for number in range(7)]
    assert doubts({"checks": checks})[3:] == ["3: x", "4: x", "and 2 more"]
    often = [{"name": "0", "ok": False, "case": str(number)} for number in range(7)]
    assert doubts({"checks": [*often, *checks[1:3]]})[:4] == ["0", "1: x", "2: x", "1: 0"]


@pytest.mark.parametrize("stored", [{}, {"checks": None, "counts": None}, {"checks": [{}]}, {"valid": True}])
def test_of_an_older_flopwatch(stored: dict[str, Any]) -> None:
    assert verdict(stored) == "unknown"
    doubts(stored)
    assert notes(stored) == []


def test_a_noisy_host_is_said_once() -> None:
    quiet, noisy = {"verdict": "valid"}, {"verdict": "valid", "noisy": 2}
    assert noisy_host([noisy] * 3 + [quiet] * 2 + [None] * 9) == (
        "noisy host: 3 of 5 recent jobs varied by more than 5 % or shared the CPU"
    )
    assert (noisy_host([noisy] * 3 + [quiet] * 3), noisy_host([noisy] * 2), noisy_host([])) == (None, None, None)
