"""A database of the former version, as its own code wrote it, opened by this one (former/make_0001.py made it)."""

from __future__ import annotations

import array
import hashlib
import json
import sqlite3
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import text

from app.errors import Conflict, InvalidEnvironment
from app.settings import Settings
from app.specs import SpecBase, spec_adapter
from app.specs.benchmark import BenchmarkSpec
from app.store.database.engine import Database, open_database
from app.store.files.artifacts import ArtifactFiles
from app.store.queue.hosts import known_host
from app.store.queue.transitions import Queue
from app.store.reading.queries import Reading
from migrations import rows_0002

ARCHIVE = Path(__file__).parent / "former" / "0001.tar.xz"
SWEEP_ID, SWEEP_JOBS = 1, (12, 13, 14)
REPLICATED, COMPILED, GRID, PRODUCTS, FAILED, CANCELLED = 1, 2, 6, (9, 10), 11, 15
MEASURED = [*range(1, 11), *SWEEP_JOBS, CANCELLED]

STATISTICS = ("n", "mean", "std", "median", "min", "max", "p05", "p25", "p75", "p95")
PLAIN = ("metric", "unit", "outcome", "reason", "partial", *STATISTICS)

OLD_COLUMNS = {
    "forward_backward_tflops": "tflops",
    "forward_backward_ceiling_percent": "ceiling_percent",
    "forward_backward_gb_per_s": "gb_per_s",
}
"""Columns of tables, as the former version called them, that have another name now."""

Change = Callable[[sqlite3.Connection], object]


@pytest.fixture(scope="session")
def former(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the former version left, unpacked."""
    folder = tmp_path_factory.mktemp("former")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="session")
def expected(former: Path) -> dict[str, Any]:
    """What the former version's API answered."""
    found: dict[str, Any] = json.loads((former / "expected.json").read_text())
    return found


def migrated(former: Path, folder: Path, change: Change = lambda _: None) -> Database:
    """The former version's database, changed and then opened."""
    folder.mkdir(exist_ok=True)
    path = folder / "flopwatch.sqlite3"
    path.write_bytes((former / path.name).read_bytes())
    with sqlite3.connect(path) as connection:
        change(connection)
    connection.close()
    return open_database(Settings(data_dir=folder))


@pytest.fixture(scope="module")
def upgraded(former: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """The former version's database, opened by this one."""
    database = migrated(former, tmp_path_factory.mktemp("upgraded"))
    yield database
    database.close()


def query(database: Database, sql: str, **values: Any) -> list[Any]:
    with database.read() as connection:
        return list(connection.execute(text(sql), values))


def spec_of(database: Database, job_id: int) -> SpecBase:
    [(spec,)] = query(database, "SELECT spec FROM job WHERE id = :id", id=job_id)
    return spec_adapter.validate_json(spec)


@pytest.mark.parametrize("job_id", range(1, CANCELLED + 1))
class TestJobs:
    def test_a_job_is_what_it_was(self, upgraded: Database, expected: dict[str, Any], job_id: int) -> None:
        before = expected["jobs"][str(job_id)]["job"]
        after, _ = Reading(upgraded).job(job_id)
        changed = {"spec", "validity", "links"}
        assert {name: after[name] for name in before if name not in changed} == {
            name: value for name, value in before.items() if name not in changed
        }
        assert after["spec"] == before["spec"] | ({"compile_scope": "model"} if job_id == COMPILED else {})
        assert after["waiting"] is None
        assert before["links"].items() <= after["links"].items()

    def test_its_verdict_is_the_same_and_counted_where_that_can_be_told(
        self, upgraded: Database, expected: dict[str, Any], job_id: int
    ) -> None:
        before = expected["jobs"][str(job_id)]["job"]["validity"]
        after = Reading(upgraded).job(job_id)[0]["validity"]
        if before is None:
            assert after is None
            return
        counts = after.pop("counts", None)
        assert after == before
        one_case_each = job_id not in (GRID, 8, *PRODUCTS)
        assert (counts is not None) == one_case_each
        assert counts is None or counts == {before["verdict"]: 2 if job_id == REPLICATED else 1}

    def test_its_spec_means_what_it_meant_and_lists_show_it(self, upgraded: Database, job_id: int) -> None:
        spec = spec_of(upgraded, job_id)
        summary = Reading(upgraded).job(job_id)[0]["summary"]
        assert effective(summary) == of_rows(spec)
        [(requirements, devices)] = query(upgraded, "SELECT requirements, devices FROM job WHERE id = :id", id=job_id)
        assert json.loads(requirements) == sorted(spec.requirements())
        assert devices == spec.resources().devices

    def test_log_and_attempts_are_there(self, upgraded: Database, expected: dict[str, Any], job_id: int) -> None:
        reading, before = Reading(upgraded), expected["jobs"][str(job_id)]
        assert reading.log(job_id) == before["log"]
        for was, found in zip(before["attempts"], reading.attempts(job_id), strict=True):
            assert was.items() <= found.items()

    def test_its_files_can_be_read(
        self, upgraded: Database, expected: dict[str, Any], former: Path, job_id: int
    ) -> None:
        files, found = ArtifactFiles(former / "artifacts"), Reading(upgraded).artifacts(job_id)
        for before, after in zip(expected["jobs"][str(job_id)]["artifacts"], found, strict=True):
            assert before.items() <= after.items()
            content = files.open_path(after["sha256"]).read_bytes()
            assert hashlib.sha256(content).hexdigest() == after["sha256"]
            assert len(content) == after["size"]


@pytest.mark.parametrize("job_id", MEASURED)
class TestMeasurements:
    def rows(self, database: Database, job_id: int) -> list[Any]:
        return query(database, "SELECT * FROM measurement WHERE job_id = :id ORDER BY id", id=job_id)

    def test_every_number_is_there(self, upgraded: Database, expected: dict[str, Any], job_id: int) -> None:
        before = expected["jobs"][str(job_id)]["measurements"]["rows"]
        for old, new in zip(before, self.rows(upgraded, job_id), strict=True):
            assert {name: getattr(new, name) for name in PLAIN} == {name: old[name] for name in PLAIN}
            samples = None if new.samples is None else list(array.array("d", zlib.decompress(new.samples)))
            assert samples == old["samples"]

    def test_cases_have_the_keys_of_their_specs_today(self, upgraded: Database, job_id: int) -> None:
        spec = spec_of(upgraded, job_id)
        cases = {case.key: case for case in spec.cases()}
        found = {row.case_key: json.loads(row.case) for row in self.rows(upgraded, job_id)}
        for key, case in found.items():
            today = dict(cases[key].coordinates)
            if job_id in PRODUCTS:  # the size that was chosen for the device is shown, though no part of the key
                today |= {name: case[name] for name in ("matrix_size", "copy_mib") if today[name] is None}
            assert effective(case) == effective(today)
        assert job_id == CANCELLED or set(found) == set(cases)

    def test_coordinates_are_what_they_were(self, upgraded: Database, expected: dict[str, Any], job_id: int) -> None:
        before = expected["jobs"][str(job_id)]["measurements"]["rows"]
        for old, new in zip(before, self.rows(upgraded, job_id), strict=True):
            case = json.loads(new.case)
            assert not {"device", "replicate"} & set(case)
            for name in set(case) & set(old):
                has_no_effect = case[name] is None and (
                    name in ("activation_checkpointing", "autotune")
                    or (name, old.get("operation")) == ("dtype", "copy")
                )
                assert has_no_effect or case[name] == old[name], name
            assert new.unit_index == old.get("replicate", 0)
            assert new.device_key == f"2x {old['device']}"

    def test_a_metric_and_its_phase_name_a_column(
        self, upgraded: Database, expected: dict[str, Any], job_id: int
    ) -> None:
        before = expected["jobs"][str(job_id)]["measurements"]["rows"]
        whole = {"benchmark": "step", "ceiling": None}.get(
            expected["jobs"][str(job_id)]["job"]["kind"], before[0].get("mode")
        )
        for old, new in zip(before, self.rows(upgraded, job_id), strict=True):
            if new.metric.endswith("_ms") or new.metric == "decode_ms_per_token":
                assert new.phase == old["phase"]
            elif new.metric in ("tflops", "ceiling_percent", "gb_per_s", "tokens_per_s", "mfu"):
                assert new.phase == (None if old["phase"] == whole else old["phase"])
            else:
                assert new.phase is None

    def test_the_verdict_of_its_unit_stands_at_each(
        self, upgraded: Database, expected: dict[str, Any], job_id: int
    ) -> None:
        validity = expected["jobs"][str(job_id)]["job"]["validity"]
        verdict = None if validity is None else validity["verdict"]
        assert {row.validity for row in self.rows(upgraded, job_id)} == {verdict}


def test_compiled_as_a_whole_is_another_case_than_compiled_by_blocks(upgraded: Database) -> None:
    spec = spec_of(upgraded, COMPILED)
    by_blocks = spec.model_copy(update={"compile_scope": "blocks"})
    [(key,)] = query(upgraded, "SELECT DISTINCT case_key FROM measurement WHERE job_id = :id", id=COMPILED)
    assert key == spec.case().key != by_blocks.case().key


@pytest.mark.parametrize("job_id", [job_id for job_id in [*MEASURED, FAILED] if job_id != CANCELLED])
def test_tables_are_the_same(upgraded: Database, expected: dict[str, Any], job_id: int) -> None:
    compare_tables(upgraded, expected["jobs"][str(job_id)]["table"], jobs=[job_id])


def test_what_a_cancelled_job_had_measured_is_shown_now(upgraded: Database, expected: dict[str, Any]) -> None:
    """As partial results; before, its table told of the cancellation only."""
    from app import results

    before = expected["jobs"][str(CANCELLED)]["table"]["rows"]
    assert all(row["forward_ms"] is None for row in before)
    rows = json.loads(results.render(results.table(upgraded, jobs=[CANCELLED]), "json"))["rows"]
    measured = [row for row in rows if row["forward_ms"] is not None]
    assert measured
    assert all(row["partial"] for row in measured)


def test_the_sweeps_table_is_the_same(upgraded: Database, expected: dict[str, Any]) -> None:
    compare_tables(upgraded, expected["sweep_table"], sweep=SWEEP_ID)


def of_rows(spec: SpecBase) -> dict[str, Any]:
    """What lists showed of a job then; today they also show what is not as by default."""
    return effective({name: value for name, value in spec.summary().items() if name in spec.table_rows})


def effective(coordinates: Mapping[str, Any]) -> dict[str, Any]:
    """The coordinates that have an effect: old ones lack a field added later, null now or what it came with."""
    added = BenchmarkSpec.added
    return {
        name: value
        for name, value in coordinates.items()
        if value is not None and not (name in added and value == added[name])
    }


def compare_tables(database: Database, before: dict[str, Any], **chosen: Any) -> None:
    """See that a table with the same rows and columns has the same values; which are shown by default is another
    question.
    """
    from app import results

    names = [column["name"] for column in before["columns"]]
    metrics = [name for name in names if f"{name}_outcome" in names]
    coordinates = [
        name for name in names if not any(name in (m, f"{m}_std", f"{m}_n", f"{m}_outcome") for m in metrics)
    ]
    columns = [OLD_COLUMNS.get(name, name) for name in metrics]
    table = results.table(database, rows=coordinates, columns=columns, **chosen)
    after = json.loads(results.render(table, "json"))
    for old, new in zip(before["rows"], after["rows"], strict=True):
        for name in coordinates:
            copies = (name, old.get("operation")) == ("dtype", "copy")
            assert new[name] == (None if copies else old[name]), name
        for name in metrics:
            for suffix in ("", "_std", "_n", "_outcome"):
                value = new[OLD_COLUMNS.get(name, name) + suffix]
                before_it = old[name + suffix]
                same = pytest.approx(before_it, rel=1e-12) if isinstance(before_it, float) else before_it
                assert value == same, name + suffix


class TestUnits:
    def units(self, database: Database, job_id: int) -> list[Any]:
        return query(database, "SELECT * FROM unit WHERE job_id = :id ORDER BY unit_index", id=job_id)

    def test_each_replicate_is_a_unit(self, upgraded: Database, expected: dict[str, Any]) -> None:
        job = expected["jobs"][str(REPLICATED)]["job"]
        first, second = self.units(upgraded, REPLICATED)
        assert (first.title, second.title) == tuple(
            f"d16-f32-l1-h2, context 16, replicate {number} of 2" for number in (1, 2)
        )
        assert (first.outcome, first.reason, first.partial, first.attempt, first.side) == (
            "succeeded",
            None,
            0,
            1,
            None,
        )
        assert json.loads(first.environment) == job["environment"]
        assert second.environment is None
        checks = [check for unit in (first, second) for check in json.loads(unit.validity)["checks"]]
        assert [check | {"unit": None} for check in checks] == [
            check | {"unit": None} for check in job["validity"]["checks"]
        ]
        assert query(upgraded, "SELECT name, unit_index FROM artifact WHERE job_id = :id", id=REPLICATED) == [
            ("samples-0.csv.gz", 0),
            ("samples-1.csv.gz", 1),
        ]

    def test_a_job_that_failed_or_was_cancelled_ended_in_its_unit(self, upgraded: Database) -> None:
        for job_id, code in ((FAILED, "unsupported"), (CANCELLED, "cancelled")):
            (unit,) = self.units(upgraded, job_id)
            assert (unit.outcome, unit.partial) == (code, 1)
            assert unit.reason == Reading(upgraded).job(job_id)[0]["error"]["detail"]

    def test_every_job_that_ran_has_one(self, upgraded: Database) -> None:
        [(jobs,)] = query(upgraded, "SELECT count(DISTINCT job_id) FROM unit")
        assert jobs == CANCELLED


class TestSweep:
    def test_jobs_have_their_points_and_the_sweep_its_options(
        self, upgraded: Database, expected: dict[str, Any]
    ) -> None:
        sweep = Reading(upgraded).sweep(SWEEP_ID)
        assert expected["sweep"].items() <= sweep.items()
        assert sweep["options"] == {"priority": 0, "timeout_s": None, "max_attempts": 2}
        points = query(upgraded, "SELECT id, point FROM job WHERE sweep_id = 1 ORDER BY id")
        assert [(job_id, json.loads(point)) for job_id, point in points] == [
            (12, {"context_length": 0, "batch_size": 0}),
            (13, {"context_length": 1, "batch_size": 0}),
            (14, {"context_length": 1, "batch_size": 1}),
        ]

    def test_there_is_nothing_to_resume_until_a_job_failed(self, former: Path, tmp_path: Path) -> None:
        database = migrated(former, tmp_path)
        with pytest.raises(Conflict, match="nothing to resume"):
            Queue(database).resume_sweep(SWEEP_ID)
        with database.write() as connection:
            connection.execute(text("UPDATE job SET state = 'failed' WHERE id = 13"))
        sweep = Queue(database).resume_sweep(SWEEP_ID)
        assert sweep["counts"] == {"queued": 1, "running": 0, "succeeded": 2, "failed": 0, "cancelled": 0}
        (job, *_), _ = Reading(database).jobs(sweep=SWEEP_ID)
        assert job["spec"] == Reading(database).job(13)[0]["spec"]
        database.close()


def test_lists_labels_and_events_are_there(upgraded: Database, expected: dict[str, Any]) -> None:
    reading = Reading(upgraded)
    found, _ = reading.jobs(labels=[("team", "b")])
    assert [job["id"] for job in found] == [FAILED, GRID]
    states = [event["data"]["state"] for event in reading.events(CANCELLED) if event["type"] == "state"]
    assert states == ["queued", "running", "running", "cancelled"]
    (worker,) = reading.workers()
    assert worker["state"] == "stopped"
    assert reading.known_names() == {name: set(worker[name]) for name in ("kinds", "capabilities")}
    # The same host that a worker registers today, so that it is not known twice.
    host = known_host(worker["kinds"], worker["capabilities"], worker["devices"])
    assert query(upgraded, "SELECT key, gpus FROM known_host") == [(host["key"], host["gpus"])]


def test_ids_of_rows_that_are_gone_are_not_given_again(former: Path, tmp_path: Path) -> None:
    def delete_the_last(connection: sqlite3.Connection) -> None:
        for table in ("measurement", "attempt", "event", "artifact", "job_label"):
            connection.execute(f"DELETE FROM {table} WHERE job_id = {CANCELLED}")
        connection.execute(f"DELETE FROM job WHERE id = {CANCELLED}")
        connection.execute("DELETE FROM artifact")

    database = migrated(former, tmp_path, delete_the_last)
    sequences = dict(map(tuple, query(database, "SELECT name, seq FROM sqlite_sequence")))
    database.close()
    assert sequences["job"] == CANCELLED
    assert {"measurement": 502, "artifact": 9, "sweep": 1}.items() <= sequences.items()


class TestWhatCannotBeRead:
    def test_a_broken_case_is_carried_as_it_is(self, former: Path, tmp_path: Path) -> None:
        def break_it(connection: sqlite3.Connection) -> None:
            connection.execute('UPDATE measurement SET "case" = \'{"model": \' WHERE job_id = 3')

        database = migrated(former, tmp_path, break_it)
        found = query(
            database, 'SELECT DISTINCT "case", case_key, device_key, unit_index FROM measurement WHERE job_id = 3'
        )
        database.close()
        [(case, key, device_key, unit_index)] = found
        assert case == '{"model": '
        assert key.startswith("?")
        assert len(key) == rows_0002.KEY_CHARACTERS
        assert (device_key, unit_index) == ("unknown", 0)

    def test_a_broken_spec_costs_a_benchmark_its_key(self, former: Path, tmp_path: Path) -> None:
        def break_them(connection: sqlite3.Connection) -> None:
            connection.execute("UPDATE job SET spec = 'no JSON' WHERE id IN (1, 6, 9)")

        database = migrated(former, tmp_path, break_them)
        keys = {
            job_id: {
                key for (key,) in query(database, "SELECT case_key FROM measurement WHERE job_id = :id", id=job_id)
            }
            for job_id in (1, 6, 9)
        }
        [(summary, spec)] = query(database, "SELECT summary, spec FROM job WHERE id = 1")
        units = query(database, "SELECT DISTINCT unit_index, device_key FROM measurement WHERE job_id = 1")
        database.close()
        assert [len(keys[job_id]) for job_id in (1, 6, 9)] == [1, 24, 3]
        assert all(key.startswith("?") for job_id in (1, 9) for key in keys[job_id])
        assert not any(key.startswith("?") for key in keys[6]), "a cell's case has all of its identity"
        assert (summary, spec) == ("{}", "no JSON")
        assert units == [(0, "2x AMD EPYC"), (1, "2x AMD EPYC")]

    def test_without_its_environment_the_number_of_threads_is_not_known(self, former: Path, tmp_path: Path) -> None:
        database = migrated(former, tmp_path, lambda c: c.execute("UPDATE job SET environment = '[]' WHERE id = 2"))
        found = query(database, "SELECT DISTINCT device_key FROM measurement WHERE job_id = 2")
        database.close()
        assert found == [("?x AMD EPYC",)]

    @pytest.mark.parametrize("value", ["", "{", "null", "[]", '{"checks": 5}', '{"device": [], "model": 3}'])
    def test_nothing_stops_it(self, former: Path, tmp_path: Path, value: str) -> None:
        def break_it(connection: sqlite3.Connection) -> None:
            # Each job in another column, so that what is sound meets what is not.
            columns = ("spec", "progress", "error", "environment", "validity")
            for job_id in range(1, CANCELLED + 1):
                column = columns[job_id % len(columns)]
                connection.execute(f"UPDATE job SET {column} = ? WHERE id = ?", [value, job_id])

        database = migrated(former, tmp_path, break_it)
        [(number,)] = query(database, "SELECT count(*) FROM measurement")
        database.close()
        assert number == 502

    @pytest.mark.parametrize("grid", ["{", "[]", '{"context_length": 8}', '{"context_length": [8, 16]}', "{}"])
    def test_nor_does_a_sweeps_grid(self, former: Path, tmp_path: Path, grid: str) -> None:
        database = migrated(former, tmp_path, lambda c: c.execute("UPDATE sweep SET grid = ?", [grid]))
        points = [point for (point,) in query(database, "SELECT point FROM job WHERE sweep_id = 1")]
        database.close()
        known = grid.endswith("]}") or grid == "{}"
        assert [point is not None for point in points] == [known] * 3


def test_a_reference_to_nothing_stops_it_and_nothing_is_changed(former: Path, tmp_path: Path) -> None:
    def orphan(connection: sqlite3.Connection) -> None:
        connection.execute("UPDATE event SET job_id = 77 WHERE id = 1")

    with pytest.raises(InvalidEnvironment, match="broke 1 reference"):
        migrated(former, tmp_path, orphan)
    with sqlite3.connect(tmp_path / "flopwatch.sqlite3") as connection:
        assert connection.execute("SELECT version_num FROM alembic_version").fetchall() == [("0001",)]
        assert connection.execute("SELECT count(*) FROM measurement").fetchall() == [(502,)]
    connection.close()


def old_job(**changes: Any) -> rows_0002.OldJob:
    spec = {"replicates": 3, "model": {"size": "tiny"}, "context_length": 8, "warmup_steps": 1}
    plain: dict[str, Any] = {
        "id": 1, "kind": "benchmark", "state": "failed", "spec": spec, "progress": None,
        "error": {"code": "crashed", "detail": "why"}, "environment": {}, "validity": None, "recorded": True,
    }  # fmt: skip
    return rows_0002.OldJob(**{**plain, **changes})


@pytest.mark.parametrize(
    ("job", "measured", "outcomes"),
    [
        (old_job(progress={"done": 20, "total": 30}), 2, ["succeeded", "succeeded", "crashed"]),
        (old_job(progress={"done": 12, "total": 30}), 1, ["succeeded", "crashed"]),
        (old_job(progress={"done": 1, "total": 3}), 1, ["succeeded", "crashed"]),
        (old_job(progress={"done": 0, "total": 3}), 0, ["crashed"]),
        (old_job(progress={"done": 30, "total": 30}), 3, ["succeeded", "succeeded", "crashed"]),
        (old_job(progress={"done": 0, "total": 0}, environment=None), 0, []),
        (old_job(recorded=False, progress={"done": 12, "total": 30}), 0, []),
        (old_job(state="succeeded", error=None), 3, ["succeeded"] * 3),
    ],
)
def test_units_of_a_job_end_with_the_one_it_ended_in(job: rows_0002.OldJob, measured: int, outcomes: list[str]) -> None:
    cases = [rows_0002.NewCase("{}", index, "key", "1x", "step") for index in range(measured)]
    units = rows_0002.new_units(job, cases)
    assert [unit["outcome"] for unit in units] == outcomes
    assert [unit["unit_index"] for unit in units] == list(range(len(outcomes)))


@pytest.mark.parametrize(
    ("failed", "warmup_steps", "verdict"),
    [
        ([], 1, "valid"),
        (["variation"], 1, "suspect"),
        (["recompiles"], 1, "invalid"),
        (["recompiles"], 0, "suspect"),
        (["eager_fallback"], 0, "invalid"),
        (["eager_fallback", "drift"], 1, "invalid"),
    ],
)
def test_a_replicates_verdict_follows_from_its_checks(failed: list[str], warmup_steps: int, verdict: str) -> None:
    job = old_job(state="succeeded", error=None)
    assert job.spec is not None
    job = old_job(state="succeeded", error=None, spec=job.spec | {"warmup_steps": warmup_steps})
    names = ("variation", "drift", "recompiles", "eager_fallback")
    checks = [
        {"name": name, "ok": index != 1 or name not in failed, "detail": "", "unit": rows_0002.title(job, index)}
        for index in range(3)
        for name in names
    ]
    job = old_job(state="succeeded", error=None, spec=job.spec, validity={"verdict": "invalid", "checks": checks})
    cases = [rows_0002.NewCase("{}", index, "key", "1x", "step") for index in range(3)]
    units = rows_0002.new_units(job, cases)
    assert [unit["validity"]["verdict"] for unit in units] == ["valid", verdict, "valid"]
    counted = rows_0002.job_validity(job, units)
    assert counted is not None
    assert counted["counts"] == ({"valid": 3} if verdict == "valid" else {"valid": 2, verdict: 1})


@pytest.mark.parametrize(
    ("grid", "spec", "point"),
    [
        ({"rope": [500, 1000]}, {"rope": 500.0}, {"rope": 0}),
        ({"flag": [True, 1]}, {"flag": 1}, {"flag": 1}),
        ({"a.b": ["x", "y"]}, {"a": {"b": "y"}}, {"a.b": 1}),
        ({"model": [{"size": "tiny"}, {"size": "xl"}]}, {"model": {"size": "xl", "name": "n"}}, {"model": 1}),
        ({"model": [{}, {"size": "xl"}]}, {"model": {"size": "xl"}}, {"model": 1}),
        ({"model": [{"size": "xl"}, {"name": "n"}]}, {"model": {"size": "xl", "name": "n"}}, None),
        ({"sizes": [[1], [1, 2]]}, {"sizes": [1, 2]}, {"sizes": 1}),
        ({"a": [1]}, {"b": 1}, None),
        ({"a": [1]}, {"a": 2}, None),
    ],
)
def test_a_point_is_told_by_the_specs_values(grid: Any, spec: Any, point: dict[str, int] | None) -> None:
    assert rows_0002.Grid(grid).point(spec) == point


SPECS = [
    {"kind": "benchmark", "model": {"size": size}, "mode": mode, "compile": compiled, "warmup_steps": 5}
    for size in ("tiny", "2.7b")
    for mode in ("forward", "forward_backward", "train_step", "generate")
    for compiled in (False, True)
] + [
    {"kind": "benchmark", "model": {"d_model": 128, "d_ff": 512, "num_layers": 2, "num_heads": 4}, "warmup_steps": 0},
    {"kind": "benchmark", "gradient_clip_norm": 0.5, "optimizer": "torch_adamw", "warmup_steps": 1, "seed": 4},
]


@pytest.mark.parametrize("fields", SPECS, ids=json.dumps)
def test_the_frozen_rules_are_those_of_the_specs_today(fields: dict[str, Any]) -> None:
    """Else results from before the migration and after it would not meet."""
    scope = {"compile_scope": "model"} if fields.get("compile") else {}
    today = spec_adapter.validate_json(json.dumps(fields | scope))
    old = today.model_dump(mode="json", exclude={"parameter_dtype", "compile_scope", "cuda_graph"})
    labels, identity = rows_0002.benchmark_case(old)
    assert rows_0002.key("benchmark", identity) == today.case().key
    assert effective({**labels, **identity}) == effective(today.case().coordinates)
    assert effective(rows_0002.summary(old_job(spec=old))) == of_rows(today)


@pytest.mark.parametrize("kind", ["attention", "kernel", "ceiling"])
def test_the_frozen_rules_of_cells_are_those_of_the_specs_today(kind: str) -> None:
    blocks = {"br": [64], "bc": [128], "implementations": ["cpu_flash", "eager"]} if kind == "attention" else {}
    today = spec_adapter.validate_json(json.dumps({"kind": kind, "warmup_steps": 5, **blocks}))
    job = old_job(kind=kind, spec=today.model_dump(mode="json"), environment={"device": {"type": "cuda"}})
    for case in today.cases():
        resolved = {"matrix_size": 8192, "copy_mib": 1} if kind == "ceiling" else {}
        found = rows_0002.new_case(job, json.dumps({**case.coordinates, **resolved, "device": "GPU"}))
        assert found.case_key == case.key
    assert effective(rows_0002.summary(job)) == of_rows(today)


@pytest.mark.parametrize("autotune", [False, True])
@pytest.mark.parametrize("name", ["eager", "cpu_flash", "triton", "somebodys_own"])
def test_tuning_is_in_the_key_of_an_old_row_where_it_had_an_effect(name: str, autotune: bool) -> None:
    fields = {"kind": "attention", "implementations": [name], "sequence_lengths": [64], "autotune": autotune}
    today = spec_adapter.validate_json(json.dumps({**fields, "warmup_steps": 5}))
    (case,) = today.cases()
    stored = {**case.coordinates, "autotune": autotune, "device": "GPU"}
    found = rows_0002.new_case(old_job(kind="attention", spec=today.model_dump(mode="json")), json.dumps(stored))
    assert found.case_key == case.key
    assert effective(json.loads(found.case)) == effective(case.coordinates)


@pytest.mark.parametrize(
    ("device", "dtype", "taken", "own"),
    [
        ("cpu", "fp32", 2048, True),
        ("cpu", "fp32", 1024, False),
        ("cpu", "fp16", 512, True),
        ("cpu", "fp16", 256, False),
        ("cuda", "bf16", 8192, True),
        (None, "fp32", 2048, False),
    ],
)
def test_a_devices_own_size_is_todays(device: str | None, dtype: str, taken: int, own: bool) -> None:
    fields = {"kind": "ceiling", "dtypes": [dtype], "warmup_steps": 5}
    today = spec_adapter.validate_json(json.dumps(fields))
    environment = {"device": {"type": device}} if device else None
    job = old_job(kind="ceiling", spec=today.model_dump(mode="json"), environment=environment)
    old = {"operation": "matrix product", "dtype": dtype, "matrix_size": taken, "copy_mib": None, "device": "name"}
    chosen = spec_adapter.validate_json(json.dumps({**fields, "matrix_size": taken}))
    key = rows_0002.new_case(job, json.dumps(old)).case_key
    assert key == (today if own else chosen).cases()[1].key
    assert (key == today.cases()[1].key) == own


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_frozen_sizes_are_those_of_the_runner(device: str) -> None:
    from workers.jobs.ceiling import MATRIX_SIZES

    assert rows_0002.OWN_MATRIX_SIZES[device] == MATRIX_SIZES[device]


def test_a_gpus_key_has_its_name_alone() -> None:
    job = SimpleNamespace(environment={"device": {"type": "cuda"}, "threads": {"intra_op": 16}})
    assert rows_0002.device_key(job, "NVIDIA H200") == "1x NVIDIA H200"  # type: ignore[arg-type]
