"""Every release's database opens and gives the answers that the release gave; see record.py."""

from __future__ import annotations

import csv
import gzip
import json
import math
from pathlib import Path
from typing import Any

import pytest

from app.specs import spec_adapter
from tests.acceptance.conftest import environment
from tests.forked import ForkedService
from tests.releases.record import FOLDER, answers

RELEASES = sorted(path.parent for path in FOLDER.glob("*/database.sqlite3.gz"))


@pytest.fixture(params=RELEASES, ids=lambda folder: folder.name)
def release(request: pytest.FixtureRequest) -> Path:
    folder: Path = request.param
    return folder


def differences(expected: Any, actual: Any, place: str = "") -> list[str]:
    """Where `actual` lacks something of `expected`; later releases may add fields."""
    if isinstance(expected, dict) and isinstance(actual, dict):
        missing = [f"{place}/{key} is gone" for key in expected.keys() - actual.keys()]
        both = expected.keys() & actual.keys()
        return missing + [one for key in both for one in differences(expected[key], actual[key], f"{place}/{key}")]
    if isinstance(expected, list) and isinstance(actual, list) and len(expected) == len(actual):
        pairs = enumerate(zip(expected, actual, strict=True))
        return [one for index, pair in pairs for one in differences(*pair, f"{place}/{index}")]
    if isinstance(expected, float) and isinstance(actual, float):
        return [] if math.isclose(expected, actual) else [f"{place}: {expected} became {actual}"]
    return [] if expected == actual else [f"{place}: {expected!r:.200} became {actual!r:.200}"]


def test_its_database_gives_its_answers(release: Path, tmp_path: Path) -> None:
    with ForkedService(tmp_path / "service", environment(tmp_path) | {"FLOPWATCH_LEASE_S": "30"}) as service:
        service.data_dir.mkdir(parents=True, mode=0o700)
        database = service.data_dir / "flopwatch.sqlite3"
        database.write_bytes(gzip.decompress((release / "database.sqlite3.gz").read_bytes()))
        database.chmod(0o600)
        expected = json.loads(gzip.decompress((release / "answers.json.gz").read_bytes()))
        actual = answers(service.start_server())
    assert differences(expected, json.loads(json.dumps(actual))) == []


def test_a_new_job_of_an_old_spec_has_the_key_of_its_cases(release: Path) -> None:
    """So results of before and after an upgrade meet in tables, comparisons and baselines."""
    found = json.loads(gzip.decompress((release / "answers.json.gz").read_bytes()))
    jobs = {job["id"]: spec_adapter.validate_python(job["spec"]) for job in found["/jobs?limit=100"]["data"]}
    keys = {
        number: {row["case_key"] for row in found[f"/jobs/{number}/measurements"]["rows"]}
        for number in jobs
        if f"/jobs/{number}/measurements" in found
    }
    assert keys == {number: {case.key for case in jobs[number].cases()} for number in keys}


def test_what_is_gone_or_changed_is_named() -> None:
    assert differences({"a": [1, {"b": 2}]}, {"a": [1, {"b": 2, "new": 3}]}) == []
    assert differences({"a": [1, {"b": 2}]}, {"a": [1, {}]}) == ["/a/1/b is gone"]
    assert differences({"a": "x"}, {"a": "y"}) == ["/a: 'x' became 'y'"]


def test_its_export_shows_its_numbers(release: Path) -> None:
    page = gzip.decompress((release / "export.html.gz").read_bytes()).decode()
    answers_then = json.loads(gzip.decompress((release / "answers.json.gz").read_bytes()))
    (row,) = csv.DictReader(answers_then["/tables?job=1&format=csv"].splitlines())
    assert f"{float(row['step_ms']):.1f}" in page
