"""The invariants that hold when all jobs have ended, whatever happened before. Each function yields its violations."""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

from tests.chaos.evidence import Evidence
from tests.chaos.plan import NEVER_SUCCEED

FINAL = ("succeeded", "failed", "cancelled")
NEXT: dict[str, set[str]] = {
    "": {"queued"},
    "queued": {"running", "cancelled", "failed"},
    "running": {"queued", *FINAL},
    **{state: set() for state in FINAL},
}
"""The states that a job can go to from each."""
RETRIED = {"failed", "cancelled"}
"""The final states from which a client can queue a job again."""

OF_FAULTS = {"crashed", "timeout", "worker_lost", "storage_full"}
"""Codes of failures by what this run itself does to a job's processes, and to their disk for three seconds at most."""


def check(evidence: Evidence) -> list[str]:
    return [f"{invariant.__name__}: {found}" for invariant in INVARIANTS for found in invariant(evidence)]


def database_is_sound(evidence: Evidence) -> Iterator[str]:
    """No page is damaged and no reference leads nowhere."""
    for (answer,) in evidence.ask("PRAGMA integrity_check"):
        if answer != "ok":
            yield str(answer)
    for row in evidence.ask("PRAGMA foreign_key_check"):
        yield f"a row of {row[0]} refers to nothing: {row}"


def accepted_jobs_are_there_once(evidence: Evidence) -> Iterator[str]:
    """Every answer 201 stands for one job, and no submission made two."""
    ledger = evidence.ledger
    jobs = dict(evidence.ask("SELECT id, name FROM job WHERE sweep_id IS NULL"))
    for name, ids in ledger.accepted.items():
        if len(ids) > 1:
            yield f"{name} was answered with jobs {sorted(ids)}"
        for job_id in ids - ledger.deleted:
            if jobs.get(job_id) != name:
                yield f"{name} was answered with job {job_id}, which is now {jobs.get(job_id)!r}"
    for name, times in Counter(jobs.values()).items():
        if times > 1:
            yield f"{name} is there {times} times"
        if name not in ledger.accepted and name not in ledger.unanswered:
            yield f"nobody submitted {name}"
        if name in ledger.refused:
            yield f"{name} is there, and was refused"


def keys_stand_for_one_job(evidence: Evidence) -> Iterator[str]:
    """The answer that is kept for an Idempotency-Key names the job that the key made."""
    rows = evidence.ask(
        "SELECT key, resource_id, CAST(json_extract(response, '$.id') AS integer), name FROM idempotency_key"
        " LEFT JOIN job ON job.id = resource_id WHERE route = 'POST /jobs'"
    )
    for key, resource_id, answered_id, name in rows:
        if resource_id != answered_id:
            yield f"key {key} is of job {resource_id}, its answer of job {answered_id}"
        if name is None and resource_id not in evidence.ledger.deleted:
            yield f"key {key} is of job {resource_id}, which is not there"
        if name is not None and key != f"key of {name}":
            yield f"key {key} is of job {resource_id}, {name}"


def unique_keys_are_held_by_one(evidence: Evidence) -> Iterator[str]:
    """No job is queued while another one with its unique key is queued or runs."""
    holders: dict[str, int] = {}
    rows = evidence.ask(
        "SELECT job_id, type, json_extract(data, '$.state'), unique_key FROM event JOIN job ON job.id = job_id"
        " WHERE unique_key IS NOT NULL ORDER BY event.id"
    )
    for job_id, kind, told, key in rows:
        if kind == "state" and told == "queued" and holders.setdefault(key, job_id) != job_id:
            yield f"job {job_id} was queued while job {holders[key]} had its key {key}"
        elif kind == "done" and holders.get(key) == job_id:
            del holders[key]


def jobs_have_ended(evidence: Evidence) -> Iterator[str]:
    """Every job is in a final state, with the time of its end, and an error unless it succeeded."""
    for job_id, state, finished_at, error in evidence.ask("SELECT id, state, finished_at, error FROM job"):
        if state not in FINAL or finished_at is None:
            yield f"job {job_id} is {state}, finished at {finished_at}"
        elif (state == "succeeded") != (error is None):
            yield f"job {job_id} has {state} with error {error}"


def attempts_are_counted(evidence: Evidence) -> Iterator[str]:
    """Attempts are numbered in order; those given back do not count; there are not more than the job may have."""
    attempts = defaultdict(list)
    for job_id, number, state in evidence.ask("SELECT job_id, number, state FROM attempt ORDER BY id"):
        attempts[job_id].append((number, state))
    for job_id, counted, most in evidence.ask("SELECT id, attempt, max_attempts FROM job"):
        number = 0
        for told, state in attempts[job_id]:
            if told != number + 1:
                yield f"job {job_id} has an attempt {told} after {number} counted ones"
            number += state != "given_back"
        if counted != number:
            yield f"job {job_id} has counted {counted} attempts of {number}"
        if number > most:
            yield f"job {job_id} was tried {number} times, at most {most} are allowed"


def attempts_follow_each_other(evidence: Evidence) -> Iterator[str]:
    """Nothing runs any more, and tokens are unique."""
    for job_id, number in evidence.ask("SELECT job_id, number FROM attempt WHERE state = 'running'"):
        yield f"attempt {number} of job {job_id} runs still"
    for token, times in evidence.ask("SELECT token, count(*) FROM attempt GROUP BY token HAVING count(*) > 1"):
        yield f"{times} attempts have the token {token}"


def jobs_end_as_their_last_attempts(evidence: Evidence) -> Iterator[str]:
    """A job ended as its last attempt did; no other attempt ended the job, unless it was retried then, and none did
    after its loss."""
    fits: dict[str, set[str | None]] = {
        "succeeded": {"succeeded"},
        "failed": {"failed", "lost"},
        "cancelled": {"cancelled", "lost", "given_back", None},
    }
    attempts = defaultdict(list)
    for job_id, state in evidence.ask("SELECT job_id, state FROM attempt ORDER BY id"):
        attempts[job_id].append(state)
    for job_id, state in evidence.ask("SELECT id, state FROM job"):
        *earlier, last = [None, *attempts[job_id]]
        before_a_retry = RETRIED if job_id in evidence.ledger.retried else set()
        again_unrun = before_a_retry if state == "cancelled" else set()
        if last not in fits.get(state, {"running"}) | again_unrun:
            yield f"job {job_id} is {state}, its last attempt {last}"
        if set(earlier) - {None, "lost", "given_back"} - before_a_retry:
            yield f"job {job_id} went on after its attempts {earlier[1:]}"


def events_tell_what_happened(evidence: Evidence) -> Iterator[str]:
    """States follow each other as they can; nothing is told by an attempt that does not run, or after the end, until a
    retry."""
    events = defaultdict(list)
    asked = "SELECT job_id, attempt, type, json_extract(data, '$.state') FROM event ORDER BY id"
    for job_id, attempt, kind, told in evidence.ask(asked):
        events[job_id].append((attempt, kind, told))
    for job_id, final in evidence.ask("SELECT id, state FROM job"):
        state, running, done = "", 0, False
        for attempt, kind, told in events[job_id]:
            retried = (kind, told) == ("state", "queued") and job_id in evidence.ledger.retried and state in RETRIED
            if done and retried:
                state, done = "queued", False
            elif done:
                yield f"job {job_id} has an event {kind} after its end"
            elif (kind, told, state) == ("state", "queued", "queued") and attempt:
                continue  # a claim that waits in a cluster's queue says why, or went back before it began
            elif kind == "state" and not (state == told == "running"):  # that one tells of a wish to cancel
                if told not in NEXT[state]:
                    yield f"job {job_id} went from {state!r} to {told}"
                state, running = told, attempt
            elif kind == "done":
                done = True
                if told != state or state not in FINAL:
                    yield f"job {job_id} is done as {told} while {state}"
            elif (state, running) != ("running", attempt):
                yield f"attempt {attempt} of job {job_id} tells of {kind} while attempt {running} is {state}"
        if not done or state != final:
            yield f"job {job_id} is {final}; its events end with {state}"


def results_are_of_attempts_that_ended_the_job(evidence: Evidence) -> Iterator[str]:
    """Only the attempt that ended the job has results, and those after which it was retried; they are partial unless
    the attempt succeeded."""
    for table in ("measurement", "unit", "result_table", "artifact"):
        partial = "NULL" if table == "artifact" else "t.partial"
        rows = evidence.ask(
            f"SELECT DISTINCT t.job_id, t.attempt, job.attempt, job.state, ended.state, {partial} FROM {table} t"
            " JOIN job ON job.id = t.job_id LEFT JOIN attempt ended ON ended.job_id = job.id"
            f" AND ended.number = t.attempt AND ended.state IN {FINAL}"
        )
        for job_id, attempt, last, state, ended, is_partial in rows:
            before_a_retry = job_id in evidence.ledger.retried and ended in RETRIED
            if (attempt, ended) != (last, state) and not before_a_retry:
                yield f"job {job_id}, {state} in attempt {last}, has rows of {table} of attempt {attempt}"
            elif is_partial is not None and bool(is_partial) != (ended != "succeeded"):
                yield f"job {job_id} has rows of {table} of attempt {attempt}, {ended}, with partial = {is_partial}"


def artifacts_are_whole(evidence: Evidence) -> Iterator[str]:
    """Every row has its file with the content that it names, and every file has a row."""
    rows = evidence.ask("SELECT job_id, name, sha256, size FROM artifact")
    for job_id, name, sha256, size in rows:
        file = evidence.files.get(sha256)
        if file is None:
            yield f"{name} of job {job_id} has no file"
        elif (file.sha256, file.size) != (sha256, size):
            yield f"{name} of job {job_id} is {sha256} of {size} bytes, its file {file}"
    for sha256 in evidence.files.keys() - {row[2] for row in rows}:
        yield f"the file {sha256} belongs to nothing"


def nothing_is_left_over(evidence: Evidence) -> Iterator[str]:
    """Folders of unfinished work are empty."""
    yield from evidence.leftovers


def labels_can_be_found(evidence: Evidence) -> Iterator[str]:
    """The labels' index has the labels of the jobs."""
    labels: dict[int, dict[str, str]] = defaultdict(dict)
    for job_id, key, value in evidence.ask("SELECT job_id, key, value FROM job_label"):
        labels[job_id][key] = value
    for job_id, sent in evidence.ask("SELECT id, labels FROM job"):
        if json.loads(sent) != labels[job_id]:
            yield f"job {job_id} has labels {sent}, found under {labels[job_id]}"


def sweeps_are_whole(evidence: Evidence) -> Iterator[str]:
    """A sweep has all of its jobs, and no submission made two."""
    for name, times in evidence.ask("SELECT name, count(*) FROM sweep GROUP BY name HAVING count(*) > 1"):
        yield f"{name} is there {times} times"
    found = dict(evidence.ask("SELECT sweep_id, count(*) FROM job WHERE sweep_id IS NOT NULL GROUP BY sweep_id"))
    for sweep_id, expected in evidence.ledger.sweeps.items():
        if found.get(sweep_id, 0) != expected:
            yield f"sweep {sweep_id} has {found.get(sweep_id, 0)} of its {expected} jobs"


def results_are_of_who_ran(evidence: Evidence) -> Iterator[str]:
    """Stored results come from the units of their attempt; for a successful attempt, from units that ran to their
    ends."""
    told = {(mark["job"], mark["attempt"], mark["unit"], mark["nonce"], mark["mark"]) for mark in _runs(evidence)}
    asked = "SELECT id, CAST(json_extract(spec, '$.units') AS integer) FROM job WHERE state = 'succeeded'"
    units = dict(evidence.ask(asked))
    rows = evidence.ask(
        "SELECT m.job_id, m.attempt, unit_index, median, state FROM measurement m LEFT JOIN attempt"
        f" ON attempt.job_id = m.job_id AND number = m.attempt AND state IN {FINAL} WHERE metric = 'nonce'"
    )
    for job_id, attempt, unit, nonce, state in rows:
        missing = {"begin", "end"} if state == "succeeded" else {"begin"}
        missing -= {mark for mark in missing if (job_id, attempt, unit, int(nonce), mark) in told}
        if missing:
            yield f"unit {unit} of attempt {attempt} of job {job_id}, {state}, has results, but told of no {missing}"
    seen = Counter(row[0] for row in rows if row[4] == "succeeded")
    for job_id, expected in units.items():
        if seen[job_id] != expected:
            yield f"job {job_id} has succeeded with {seen[job_id]} of {expected} units"
    contents = {hashlib.sha256(f"{mark['nonce']}\n".encode()).hexdigest(): mark for mark in _runs(evidence)}
    names = "name LIKE 'nonce%'"
    for job_id, attempt, unit, sha256 in evidence.ask(
        f"SELECT job_id, attempt, unit_index, sha256 FROM artifact WHERE {names}"
    ):
        mark = contents.get(sha256, {})
        if [mark.get(name) for name in ("job", "attempt", "unit")] != [job_id, attempt, unit]:
            yield f"unit {unit} of attempt {attempt} of job {job_id} has a file of {dict(mark)}"


def units_ran_as_claimed(evidence: Evidence) -> Iterator[str]:
    """No unit ran without a claim of its worker, and none ran twice in one attempt. A job whose submission had no
    answer may be deleted by its label, and nobody learns its number: jobs that are there count."""
    there = {job_id for (job_id,) in evidence.ask("SELECT id FROM job")} - evidence.ledger.deleted
    claims = Counter(
        (job_id, number, int(worker_id.split("-")[-2]))
        for job_id, number, worker_id in evidence.ask("SELECT job_id, number, worker_id FROM attempt")
    )
    begun = Counter(
        (mark["job"], mark["attempt"], mark["agent"], mark["unit"])
        for mark in _runs(evidence)
        if mark["mark"] == "begin" and mark["job"] in there
    )
    for (*claim, unit), times in begun.items():
        if times > claims[tuple(claim)]:  # type: ignore[index]
            job_id, number, agent = claim
            yield f"unit {unit} of attempt {number} of job {job_id} ran {times} times at worker process {agent}"


def failures_are_told(evidence: Evidence) -> Iterator[str]:
    """Jobs that cannot succeed have not succeeded."""
    asked = "SELECT id, json_extract(spec, '$.behaviour') FROM job WHERE state = 'succeeded'"
    for job_id, behaviour in evidence.ask(asked):
        if behaviour in NEVER_SUCCEED:
            yield f"job {job_id}, which {behaviour}, has succeeded"


def none_failed_for_anothers_fault(evidence: Evidence) -> Iterator[str]:
    """A job without a fault of its own fails only if its processes or workers were killed or stopped."""
    asked = "SELECT id, json_extract(spec, '$.behaviour'), error FROM job WHERE state = 'failed' AND error IS NOT NULL"
    for job_id, behaviour, error in evidence.ask(asked):
        if behaviour not in NEVER_SUCCEED and json.loads(error)["code"] not in OF_FAULTS:
            yield f"job {job_id}, which is {behaviour}, has failed: {error[:500]}"


def stale_workers_claimed_nothing(evidence: Evidence) -> Iterator[str]:
    """No job was claimed by a worker that reads an older schema only."""
    asked = "SELECT job_id, number FROM attempt JOIN worker ON worker.id = worker_id WHERE schema_number < (SELECT"
    for job_id, number in evidence.ask(f"{asked} max(schema_number) FROM worker)"):
        yield f"a stale worker has claimed attempt {number} of job {job_id}"


def clients_saw_nothing_wrong(evidence: Evidence) -> Iterator[str]:
    """No answer was wrong while it all happened."""
    yield from evidence.ledger.troubles


def _runs(evidence: Evidence) -> Iterator[dict[str, object]]:
    return (dict(mark) for mark in evidence.marks if mark["mark"] in ("begin", "end"))


INVARIANTS: tuple[Callable[[Evidence], Iterator[str]], ...] = (
    database_is_sound,
    accepted_jobs_are_there_once,
    keys_stand_for_one_job,
    unique_keys_are_held_by_one,
    jobs_have_ended,
    attempts_are_counted,
    attempts_follow_each_other,
    jobs_end_as_their_last_attempts,
    events_tell_what_happened,
    results_are_of_attempts_that_ended_the_job,
    artifacts_are_whole,
    nothing_is_left_over,
    labels_can_be_found,
    sweeps_are_whole,
    results_are_of_who_ran,
    units_ran_as_claimed,
    failures_are_told,
    none_failed_for_anothers_fault,
    stale_workers_claimed_nothing,
    clients_saw_nothing_wrong,
)
