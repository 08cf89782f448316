"""Results of release 0.1.0, whose cases had the hash of uploaded code, meet those of later releases.

The database was written by that release: jobs 1 and 2 measured two versions of an attention function beside `eager`,
job 3 a model of one's own, job 4 compared the function with itself; job 2 is the baseline `own`.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app import results
from app.results import CaseChoice, compare, compare_with_baseline
from app.results.former import is_former, work_of
from app.settings import Settings
from app.specs import spec_adapter
from app.store.database.engine import Database
from app.store.queue.transitions import Queue
from app.store.reading.queries import Reading
from app.store.records import Claim, Finish, MeasurementRecord
from tests.app.results.conftest import table
from tests.releases.record import FOLDER

OWN_CODE = FOLDER / "0.1.0" / "own-code.sqlite3.gz"
FIRST, SECOND, NEW = "cec46459", "25b00f8b", "c" * 64


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    settings = Settings(data_dir=tmp_path, database_url=None)
    database = tmp_path / "flopwatch.sqlite3"
    database.write_bytes(gzip.decompress(OWN_CODE.read_bytes()))
    database.chmod(0o600)
    return settings


Again = Callable[..., int]


@pytest.fixture
def again(
    database: Database, queue: Queue, run_job: Callable[..., Claim], record: Callable[..., MeasurementRecord]
) -> Again:
    """Measures the cases of one of its jobs again, with an edited file that has a name."""

    def run(job: int, file: str | None = "attention.py", **fields: Any) -> int:
        spec = {**Reading(database).job(job)[0]["spec"], **fields}
        named = {"file": file, "sha256": NEW}
        changed = {
            name: value | named if isinstance(value, dict) and "sha256" in value else value
            for name, value in spec.items()
        }
        with database.write() as connection:
            connection.exec_driver_sql(
                "INSERT OR IGNORE INTO code_file (sha256, size, put_at) VALUES (?, 1, '2026-01-01 00:00:00')", (NEW,)
            )
        claim = run_job(changed)
        (device,) = {row["device_key"] for row in Reading(database).measurements(job)["rows"]}
        phased = {"metric": "forward_ms", "phase": "forward", "median": 1.0, "device_key": device}
        cases = spec_adapter.validate_python(changed).cases()
        measured = [record(**phased, case=dict(case.coordinates), case_key=case.key) for case in cases]
        queue.finish(claim, Finish("succeeded", measurements=measured))
        return claim.job_id

    return run


def keys_of(database: Database, job: int) -> dict[str, str]:
    rows = Reading(database).measurements(job)["rows"]
    return {row.get("implementation", row.get("model")): row["case_key"] for row in rows}


def test_they_keep_their_keys(database: Database) -> None:
    first, second = keys_of(database, 1), keys_of(database, 2)
    assert first["eager"] == second["eager"]
    assert first[f"mine@{FIRST}"] != second[f"mine@{SECOND}"]


def test_a_table_shows_them_as_versions_of_one_case(database: Database, again: Again) -> None:
    def shown(*jobs: int) -> list[tuple[Any, ...]]:
        sheet = table(database, jobs=jobs, columns=["forward_ms"])
        names = [column.name for column in sheet.columns]
        return [(row[names.index("implementation")], row[names.index("version")]) for row in sheet.rows]

    eager = ("eager", None)
    assert shown(1, 2) == [eager, ("mine@uploaded", FIRST), eager, ("mine@uploaded", SECOND)]
    new = again(1)
    mine = "mine@attention.py"
    assert shown(1, 2, new) == [eager, (mine, FIRST), eager, (mine, SECOND), eager, (mine, NEW[:8])]
    another = again(1, "other.py")
    assert ("mine@uploaded", FIRST) in shown(1, new, another), "which of both files it was is unknown"


def test_comparisons_match_them(database: Database, again: Again) -> None:
    for jobs in ((1, 2), (1, again(1)), (again(1), 2)):
        compared = compare(database, jobs[:1], jobs[1:])
        both = [row.values() for row in compared.rows if row.judged.metric == "forward_ms"]
        assert len(both) == 2
        assert all(row["baseline"] is not None and row["candidate"] is not None for row in both), jobs


def test_a_baseline_meets_the_next_version(database: Database, again: Again) -> None:
    for job in (1, again(1)):
        checked = compare_with_baseline(database, "own", [job])
        times = [row.values() for row in checked.rows if row.judged.metric == "forward_ms"]
        assert [None not in (row["baseline"], row["candidate"]) for row in times] == [True, True]
        assert {row["case_key"] for row in times} == set(keys_of(database, job).values())
    other = again(1, num_heads=2)
    assert not compare_with_baseline(database, "own", [other]).rows, "another case of the same code"


def test_a_history_has_all_versions(database: Database, again: Again) -> None:
    former = keys_of(database, 1)[f"mine@{FIRST}"]
    assert [point.job for point in results.history(database, CaseChoice(key=former)).points] == [1, 2]
    new = again(1)
    again(1, num_heads=2)
    own = keys_of(database, new)["mine@attention.py"]
    for choice in (CaseChoice(key=own), CaseChoice(key=former)):
        history = results.history(database, choice, "forward_ms")
        assert (history.case_key, history.coordinates["code.file"]) == (own, "attention.py")
        assert [(point.job, point.short_version) for point in history.points] == [
            (1, FIRST),
            (2, SECOND),
            (new, NEW[:8]),
        ]
        assert [list(point.baselines) for point in history.points] == [[], ["own"], []]
    eager = results.history(database, CaseChoice(key=keys_of(database, 1)["eager"]), "forward_ms")
    assert [point.job for point in eager.points][:3] == [1, 2, new]


def test_models_and_sides_of_comparisons_join_too(database: Database, again: Again) -> None:
    (model,) = keys_of(database, 3).values()
    history = results.history(database, CaseChoice(key=keys_of(database, again(3)).popitem()[1]), "forward_ms")
    assert {point.job for point in history.points} == {3, history.points[-1].job}
    assert history.points[-1].job > 4
    assert model != history.case_key
    compared = results.compare_sides(database, 4)
    assert {
        case.coordinates["attention"] for side in (compared.baseline, compared.candidate) for case in side.cases
    } == {"mine@uploaded"}


@pytest.mark.parametrize(
    "changed",
    [{"num_heads": 2}, {"code.function": "other"}, {"implementation": "other@25b00f8b"}, {"dtype": "bf16"}],
    ids=str,
)
def test_other_work_stays_apart(changed: dict[str, Any]) -> None:
    case = {"implementation": "mine@aaaaaaaa", "num_heads": 1, "code.sha256": "a" * 64, "code.function": "mine"}
    later = {"implementation": "mine@my file.py", "num_heads": 1, "code.file": "my file.py", "code.function": "mine"}
    assert is_former(case)
    assert not is_former(later)
    assert work_of("attention", case) == work_of("attention", {**later, "autotune": False})
    assert work_of("attention", case) != work_of("attention", {**later, **changed})
