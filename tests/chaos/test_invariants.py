"""The checker of chaos runs finds nothing wrong with a history that the queue itself wrote, and each thing that is made
wrong in it: these are the controls of every chaos run."""

import hashlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from app.errors import job_problem
from app.settings import Settings
from app.store.database.engine import open_database
from app.store.database.sqlite import driver
from app.store.queue.transitions import Queue
from app.store.records import Finish, Idempotency, NewEvent, NewJob, Offer, StoredArtifact, UnitRecord
from tests.builders import measurement
from tests.chaos.evidence import Evidence, Ledger, StoredFile
from tests.chaos.invariants import INVARIANTS, check
from tests.plugins.hostile_kind.specs.hostile import HostileSpec

OFFER = Offer(frozenset({"hostile"}), frozenset(), total_gpus=0, free_gpus=0, idle=True)
WORKER, AGENT = "host-77-abcdef", 77
FAILED = job_problem("crashed", "it was killed")


class History:
    """Jobs with every fate, and what there is to tell of them."""

    def __init__(self, folder: Path) -> None:
        self.ledger = Ledger()
        self.marks: list[dict[str, Any]] = []
        self.files: dict[str, StoredFile] = {}
        self.path = folder / "flopwatch.sqlite3"
        with closing(open_database(Settings(data_dir=folder))) as database:
            self._queue = Queue(database)
            self._write()

    def _write(self) -> None:
        queue = self._queue
        self.submit("job 0")
        self.run(Finish("succeeded"))
        self.submit("job 1", max_attempts=2)
        self.begin()
        (lost,) = queue.running()
        assert queue.recover(lost) == "queued"
        self.run(Finish("succeeded"))
        self.submit("job 2")
        claim, _ = self.begin()
        queue.give_back(claim)
        self.run(Finish("failed", error=FAILED))
        queue.cancel(self.submit("job 3", keyed=False))
        jobs = [NewJob(HostileSpec(number=number), name="sweep 0", point={"number": number}) for number in range(2)]
        sweep = queue.submit_sweep("sweep 0", {}, {"kind": "hostile"}, {"number": [0, 1]}, [], jobs).response
        self.ledger.sweeps[sweep["id"]] = 2
        queue.cancel_sweep(sweep["id"])
        retried = self.submit("job 4", unique_key="k")
        self.run(Finish("failed", error=FAILED))
        self.submit("job 5", unique_key="k")
        self.run(Finish("succeeded"))
        queue.retry(retried)
        self.run(Finish("succeeded"))
        again = self.submit("job 6")
        self.run(Finish("failed", error=FAILED))
        queue.retry(again)
        queue.cancel(again)
        self.ledger.retried |= {retried, again}

    def submit(self, name: str, *, keyed: bool = True, **options: Any) -> int:
        new = NewJob(HostileSpec(), name=name, labels={"name": name}, **options)
        key = Idempotency(f"key of {name}", "POST /jobs", "digest") if keyed else None
        job_id = int(self._queue.submit(new, key).response["id"])
        self.ledger.accept(name, job_id)
        return job_id

    def begin(self) -> tuple[Any, int]:
        claim = self._queue.claim(WORKER, OFFER)
        assert claim is not None
        nonce = 1000 + claim.attempt_id
        self._mark("begin", claim, nonce)
        self._queue.report(claim, [NewEvent("progress", {"done": 0, "total": 1, "message": ""})])
        return claim, nonce

    def run(self, end: Finish) -> None:
        claim, nonce = self.begin()
        if end.state == "succeeded":
            self._mark("end", claim, nonce)
        text = f"{nonce}\n".encode()
        sha256 = hashlib.sha256(text).hexdigest()
        self.files[sha256] = StoredFile(sha256, len(text))
        artifacts = [StoredArtifact(0, "nonce.txt", "text", "text/plain", len(text), sha256)]
        units = [UnitRecord(0, "unit 0", end.state)]
        self._queue.finish(
            claim, Finish(end.state, end.error, [measurement("nonce", float(nonce))], units=units, artifacts=artifacts)
        )

    def _mark(self, what: str, claim: Any, nonce: int) -> None:
        whose = {"agent": AGENT, "job": claim.job_id, "attempt": claim.attempt, "unit": 0, "pid": 1}
        self.marks.append({"mark": what, **whose, "nonce": nonce})


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> History:
    return History(tmp_path_factory.mktemp("history"))


@dataclass
class Found:
    """What a run has left behind, to be made wrong."""

    connection: Any
    ledger: Ledger
    marks: list[dict[str, Any]]
    files: dict[str, StoredFile]
    leftovers: list[str] = field(default_factory=list)

    def sql(self, *statements: str) -> None:
        for statement in statements:
            assert self.connection.execute(statement).rowcount != 0, statement

    def evidence(self) -> Evidence:
        def ask(question: str) -> list[Any]:
            return list(self.connection.execute(question).fetchall())

        return Evidence(ask, self.ledger, self.marks, self.files, self.leftovers)


@pytest.fixture
def found(history: History, tmp_path: Path) -> Iterator[Found]:
    path = Path(shutil.copy(history.path, tmp_path))
    ledger = Ledger(sweeps=dict(history.ledger.sweeps), retried=set(history.ledger.retried))
    for name, ids in history.ledger.accepted.items():
        ledger.accepted[name] = set(ids)
    with closing(driver().connect(str(path), isolation_level=None)) as connection:
        yield Found(connection, ledger, [dict(mark) for mark in history.marks], dict(history.files))


def test_nothing_is_wrong_with_what_the_queue_wrote(found: Found) -> None:
    assert check(found.evidence()) == []
    states = found.connection.execute("SELECT DISTINCT state FROM attempt ORDER BY 1").fetchall()
    assert [state for (state,) in states] == ["failed", "given_back", "lost", "succeeded"]


def sql(*statements: str) -> Callable[[Found], None]:
    return lambda found: found.sql(*statements)


def a_job_that_nobody_submitted(found: Found) -> None:
    del found.ledger.accepted["job 3"]


def an_attempt_amid_a_pause(found: Found) -> None:
    found.ledger.saw_paused({(1, 1)}, {(1, 1), (2, 1)})


def a_wrong_hash(found: Found) -> None:
    sha256 = next(iter(found.files))
    found.files[sha256] = StoredFile("0" * 64, found.files[sha256].size)


def an_orphan(found: Found) -> None:
    found.files["0" * 64] = StoredFile("0" * 64, 1)


def a_unit_that_never_ended(found: Found) -> None:
    found.marks[:] = [mark for mark in found.marks if (mark["job"], mark["mark"]) != (1, "end")]


def a_unit_that_ran_twice(found: Found) -> None:
    found.marks.append(next(mark for mark in found.marks if mark["job"] == 1))


def an_answer_500(found: Found) -> None:
    found.ledger.trouble("GET /jobs was answered 500")


def a_job_that_changed_after_its_end(found: Found) -> None:
    found.ledger.saw_final({"id": 1, "state": "succeeded"})
    found.ledger.saw_final({"id": 1, "state": "failed"})


def a_claim_of_a_stale_worker(found: Found) -> None:
    columns = "id, hostname, pid, state, kinds, capabilities, devices, versions, beat, registered_at, last_seen_at"
    for name, number in ((WORKER, 1), ("another", 2)):
        values = f"'{name}', 'host', 1, 'stopped', '[]', '[]', '[]', '{{}}', 1, '2026-01-01', '2026-01-01'"
        found.sql(f"INSERT INTO worker ({columns}, schema_number) VALUES ({values}, {number})")


LATER = (
    "INSERT INTO event (job_id, attempt, type, data, created_at)"
    " SELECT job_id, attempt, type, data, created_at FROM event"
)
RESULTS = "results_are_of_attempts_that_ended_the_job"
VIOLATIONS: list[tuple[str, str, Callable[[Found], None]]] = [
    ("database_is_sound", "a missing parent", sql("PRAGMA foreign_keys = OFF", "DELETE FROM job WHERE id = 1")),
    ("accepted_jobs_are_there_once", "lost", sql("DELETE FROM job WHERE id = 1")),
    ("accepted_jobs_are_there_once", "doubled", sql("UPDATE job SET name = 'job 0' WHERE id = 2")),
    ("accepted_jobs_are_there_once", "out of nothing", a_job_that_nobody_submitted),
    ("unique_keys_are_held_by_one", "two", sql("UPDATE job SET unique_key = 'x' WHERE sweep_id IS NOT NULL")),
    ("keys_stand_for_one_job", "another job", sql("UPDATE idempotency_key SET resource_id = 2 WHERE resource_id = 1")),
    ("jobs_have_ended", "running", sql("UPDATE job SET state = 'running' WHERE id = 1")),
    ("attempts_are_counted", "too many", sql("UPDATE job SET max_attempts = 1 WHERE id = 2")),
    ("attempts_are_counted", "not counted", sql("UPDATE job SET attempt = 1 WHERE id = 2")),
    ("attempts_follow_each_other", "two at once", sql("UPDATE attempt SET state = 'running' WHERE state = 'lost'")),
    ("jobs_end_as_their_last_attempts", "another end", sql("UPDATE attempt SET state = 'failed' WHERE job_id = 1")),
    ("jobs_end_as_their_last_attempts", "after its loss", sql("UPDATE attempt SET state = 'succeeded'")),
    ("events_tell_what_happened", "no end", sql("DELETE FROM event WHERE job_id = 1 AND type = 'done'")),
    ("events_tell_what_happened", "two ends", sql(f"{LATER} WHERE job_id = 1 AND type = 'done'")),
    (
        "events_tell_what_happened",
        "a lost attempt talks",
        sql("UPDATE event SET attempt = 1 WHERE job_id = 2 AND attempt = 2 AND type = 'progress'"),
    ),
    (RESULTS, "of a lost one", sql("UPDATE measurement SET attempt = 1 WHERE job_id = 2")),
    (RESULTS, "whole of a failure", sql("UPDATE unit SET partial = 0 WHERE job_id = 3")),
    ("artifacts_are_whole", "no file", lambda found: found.files.clear()),
    ("artifacts_are_whole", "other content", a_wrong_hash),
    ("artifacts_are_whole", "an orphan", an_orphan),
    ("nothing_is_left_over", "scratch", lambda found: found.leftovers.append("scratch/77-1-1")),
    ("labels_can_be_found", "no label", sql("DELETE FROM job_label WHERE job_id = 1")),
    ("sweeps_are_whole", "half of it", sql("DELETE FROM job WHERE id = (SELECT max(id) FROM job WHERE sweep_id > 0)")),
    ("results_are_of_who_ran", "another's number", sql("UPDATE measurement SET median = 7 WHERE job_id = 1")),
    ("results_are_of_who_ran", "no number", sql("DELETE FROM measurement WHERE job_id = 1")),
    ("results_are_of_who_ran", "before its end", a_unit_that_never_ended),
    ("units_ran_as_claimed", "twice", a_unit_that_ran_twice),
    (
        "failures_are_told",
        "a crash",
        sql("UPDATE job SET spec = json_set(spec, '$.behaviour', 'segfault') WHERE id = 1"),
    ),
    ("none_failed_for_anothers_fault", "a code", sql('UPDATE job SET error = \'{"code": "failed"}\' WHERE id = 3')),
    ("stale_workers_claimed_nothing", "a claim", a_claim_of_a_stale_worker),
    ("clients_saw_nothing_wrong", "500", an_answer_500),
    ("clients_saw_nothing_wrong", "a pause", an_attempt_amid_a_pause),
    ("clients_saw_nothing_wrong", "a new end", a_job_that_changed_after_its_end),
]


@pytest.mark.parametrize(
    ("invariant", "change"), [pytest.param(name, change, id=f"{name}: {what}") for name, what, change in VIOLATIONS]
)
def test_what_is_made_wrong_is_found(found: Found, invariant: str, change: Callable[[Found], None]) -> None:
    change(found)
    assert [one for one in check(found.evidence()) if one.startswith(f"{invariant}: ")] != []


def test_every_invariant_has_a_violation() -> None:
    assert {name for name, _, _ in VIOLATIONS} == {invariant.__name__ for invariant in INVARIANTS}
