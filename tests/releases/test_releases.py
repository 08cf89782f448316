"""Every release's database opens and gives the answers that the release gave; see record.py."""

import csv
import gzip
import json
import math
import re
from pathlib import Path
from typing import Any, cast

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


_COUNTED = "parameters,parameters,,3084928.0,3084928.0,0.0,1.0,,,,,"
CHANGED = {
    "0.1.0": {
        "/compare?baseline_name=main&candidate=1&format=csv": (
            # What chance does not change is equal with one process each, too.
            (
                (
                    f'{_COUNTED}inconclusive,"inconclusive: 1 process each, and fewer than 4 cannot tell a difference '
                    "from chance; the steps of one process are no independent samples; measure both sides with 8 "
                    'replicates"'
                ),
                f"{_COUNTED}within_margin,no difference: the same in all processes; 1 process each",
            ),
        ),
        "/compare?job=6&format=markdown": (
            # "Inconclusive" ends with its remedy as a command, and who is suspect.
            ("8 replicates.\n", "8 replicates: `flopwatch rerun 6 replicates=8`; the baseline is suspect.\n"),
            # Ratios are Hodges and Lehmann's estimate.
            ("2.042 | 1.438 |", "2.042 | 1.448 |"),
            ("6.611 | 1.270 |", "6.611 | 1.271 |"),
            (
                "of these.\n",
                "of these. Ratios and intervals are Hodges and Lehmann's, of all pairs of a process of either side.\n",
            ),
            # The rate of an even number of processes is that of the time beside it.
            ("    2312 |      4170 |", "    2311 |      4169 |"),
            ("0.02514 |   0.04556 | 0.02042 |", "0.02513 |   0.04555 | 0.02041 |"),
            ("   9.860 |", "   9.858 |"),
        ),
    }
}
"""What later releases print differently on purpose: what the release printed, and what became of it. The answers stay
as the release gave them."""
REWORDED = [
    # By the larger distance to an end of the interval, no longer by half of its width.
    ("known to ±82% or better", "known to ±158% or better"),
    (
        r"medians are known to (±\d+%) or better, not to ±5%; only replicates or a comparison find small \w+ here",
        (
            r"medians uncertain by up to \1, that of forward_ms; use replicates, a sweep over seed or `flopwatch "
            "compare` to detect small differences"
        ),
    ),
    (
        "fewer than 4 cannot tell a difference from chance; the steps of one process are no independent samples",
        "at least 4 per side are needed; the steps of one process are not independent",
    ),
    (
        r"(samples of one process ± the larger distance to an end of its 95 % interval)\.",
        r"\1 (of fewer than 6: from the smallest to the largest).",
    ),
]
"""Patterns of texts that say the same in other words now, and those words."""
OTHER_COLUMNS = {"0.1.0": {"/tables?job=5&format=csv": "total_gib,replica_devices,mesh_device_gib,fewest_shards"}}
"""The columns of tables that have others by default now; asked for them, later releases print the same."""


def now_expected(release: str, found: dict[str, Any]) -> dict[str, Any]:
    """Return a release's answers with the changes that were made on purpose."""
    expected = dict(found)
    for path, changes in CHANGED.get(release, {}).items():
        for before, after in changes:
            assert expected[path].count(before) == 1, before
            expected[path] = expected[path].replace(before, after)
    text = json.dumps(expected, ensure_ascii=False)
    for before, after in REWORDED:
        text = re.sub(before, after, text)
    return cast("dict[str, Any]", json.loads(text))


def read(found: dict[str, Any]) -> dict[str, Any]:
    """Return answers as programs read them: the columns of CSV by their names, and the tables of a job by theirs."""
    seen = dict(found)
    for path, answer in found.items():
        if "format=csv" in path:
            seen[path] = list(csv.DictReader(answer.splitlines()))
        if path.endswith("/tables"):
            seen[path] = {**answer, "data": {table["name"]: table for table in answer["data"]}}
    return seen


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
    if place.endswith("/type") and actual == "null":  # of a column without any value, once called a string
        return []
    return [] if expected == actual else [f"{place}: {expected!r:.200} became {actual!r:.200}"]


def test_its_database_gives_its_answers(release: Path, tmp_path: Path) -> None:
    with ForkedService(tmp_path / "service", environment(tmp_path) | {"FLOPWATCH_LEASE_S": "30"}) as service:
        service.data_dir.mkdir(parents=True, mode=0o700)
        database = service.data_dir / "flopwatch.sqlite3"
        database.write_bytes(gzip.decompress((release / "database.sqlite3.gz").read_bytes()))
        database.chmod(0o600)
        expected = json.loads(gzip.decompress((release / "answers.json.gz").read_bytes()))
        client = service.start_server()
        actual = answers(client)
        for path, columns in OTHER_COLUMNS.get(release.name, {}).items():
            actual[path] = client.get(f"{path}&columns={columns}").raise_for_status().text
    expected = read(now_expected(release.name, expected))
    assert differences(expected, read(json.loads(json.dumps(actual)))) == []


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
