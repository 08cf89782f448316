"""A claimed job with units played by the test: what they say, and when they end, is up to the test."""

import hashlib
import io
import json
import os
import re
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic_core import to_json

from app.errors import DatabaseGone, DiskFull
from app.settings import Settings
from app.specs import spec_adapter
from app.specs._code import RUNS_CODE
from app.store.database.engine import Database
from app.store.files.artifacts import CHUNK_BYTES, ArtifactFiles
from app.store.files.objects import ObjectFiles
from app.store.files.uploads import Uploads
from app.store.queue.transitions import CANCELLED_WHILE, Queue
from app.store.reading.queries import Reading
from app.store.records import NewJob, Offer
from flopwatch.connection import problem_text
from kernels.clock import now_s
from tests.clock import Clock
from tests.object_stores import Bucket
from tools.waiting import wait_until
from workers import uploaded
from workers.agent import job_run
from workers.agent.job_run import RETRY_S, JobRun
from workers.agent.unit_run import FLUSH_S, RECORD_S, WRAPPER_START_S
from workers.devices.locks import HeldDevices
from workers.jobs import RUNNERS
from workers.jobs._base import Unit as Planned
from workers.measure.measurement import Measurement
from workers.messages import parse
from workers.outcome import Abandoned, Cancelled, GivenBack
from workers.processes import child, last_words
from workers.processes.keeper import KILL, READY, TERMINATE, Request
from workers.processes.launch import Process
from workers.reporter import Reporter

MEASUREMENT = Measurement(
    {"context_length": 1}, "key", "1x CPU", "forward", "forward_ms", "ms", samples=[1.0]
).to_wire()
BENCHMARK = {"kind": "benchmark", "device": "cpu"}
CELLS = {"kind": "attention", "device": "cpu", "implementations": ["tiled"], "sequence_lengths": [16, 32, 64]}
STARTED = {"type": "started"}
MEASURED = {"type": "measurement", **MEASUREMENT}
COLUMNS = [{"name": "calls", "type": "integer", "unit": None}]
TABLE = {"type": "table", "name": "kernels", "columns": COLUMNS, "rows": [[3], [4]]}
CELL = {"type": "cell", "total": 3, "outcome": "ok", "headline": "1 ms", "seconds": 0.5}
SUCCESS = {"type": "outcome", "code": None, "detail": ""}


@dataclass
class Unit:
    """The unit's ends of its pipes, and its keeper's of the control socket."""

    control: socket.socket
    messages: int
    log: int
    request: Request
    start: str
    gate: socket.socket | None

    @property
    def scratch(self) -> Path:
        return Path(self.request.scratch)

    @property
    def params(self) -> dict[str, Any]:
        return dict(self.request.unit["params"])

    def give(self, name: str, content: str, path: str = "file") -> None:
        """Report an artifact with this content, which lies at `path` in the scratch folder."""
        file = self.scratch / path
        file.write_text(content)
        self.tell(file, name)

    def tell(self, file: Path, name: str) -> None:
        self.say({"type": "artifact", "path": str(file), "name": name, "kind": "trace", "media_type": "text/plain"})

    def is_told_to_end(self, within_s: float) -> bool:
        return bool(select.select([self.control], [], [], within_s)[0])

    def say(self, *messages: Any) -> None:
        for message in messages:
            os.write(self.messages, json.dumps(message).encode() + b"\n")

    def close_pipes(self) -> None:
        os.close(self.messages)
        os.close(self.log)

    def end(self, exit_code: int | None = 0, signum: int | None = None) -> None:
        """End as a unit does whose work is done, or otherwise."""
        self.close_pipes()
        self.report(exit_code, signum)

    def succeed(self, *messages: Any) -> None:
        self.say(*messages, SUCCESS)
        self.end()

    def die(self, signum: int = signal.SIGSEGV) -> None:
        """End by a signal, such as that of one that reads memory that is not its own."""
        self.end(None, signum)

    def report(self, exit_code: int | None, signum: int | None) -> None:
        self.control.sendall(json.dumps({"exit_code": exit_code, "signal": signum}).encode() + b"\n")
        self.control.close()


def saying(*messages: Any) -> Callable[[Unit], None]:
    """What a unit does that says this, and ends."""

    def play(unit: Unit) -> None:
        unit.say(*messages)
        unit.end()

    return play


class Launcher:
    """Starts no process but a thread that plays one."""

    def __init__(self, play: Callable[[Unit], None], before_start: Callable[[], object]) -> None:
        self.play, self.before_start = play, before_start

    end_leftovers = staticmethod(list)

    def start(self, request: Request, start: str, _locks: Any, gate: socket.socket | None) -> Process:
        self.before_start()
        ours, theirs = socket.socketpair()
        messages, messages_in = os.pipe()
        log, log_in = os.pipe()
        unit = Unit(theirs, messages_in, log_in, request, start, gate.dup() if gate else None)
        threading.Thread(target=self.play, args=(unit,)).start()
        return Process(ours, messages, log, on_close=lambda: None)


class RefusingQueue(Queue):
    """A queue that refuses the first calls of some methods, as many as `refusals` says, and then takes them."""

    def __init__(self, database, error, refusals, when_refused=int) -> None:
        super().__init__(database)
        self.error, self.refusals, self.when_refused = error, dict(refusals), when_refused

    def report(self, *arguments: Any, **options: Any) -> Any:
        self._refuse("report")
        super().report(*arguments, **options)

    def finish(self, *arguments: Any, **options: Any) -> Any:
        self._refuse("finish")
        return super().finish(*arguments, **options)

    def give_up(self, *arguments: Any, **options: Any) -> Any:
        self._refuse("give_up")
        return super().give_up(*arguments, **options)

    def _refuse(self, name: str) -> None:
        if self.refusals.get(name, 0):
            self.refusals[name] -= 1
            self.when_refused()
            raise self.error


class WatchedFiles(ArtifactFiles):
    """Files of artifacts. Something happens before one is taken, and whenever a part of it is read."""

    def __init__(self, folder, before, read_part=int) -> None:
        super().__init__(folder)
        self._before, self._read_part = before, read_part

    def put(self, path, check=lambda _size: None, claim=None) -> tuple[str, int]:
        def checked(size: int) -> None:
            self._read_part()
            check(size)

        self._before()
        return super().put(path, checked, claim)


@dataclass
class Site:
    """A store with one job."""

    database: Database
    settings: Settings
    folder: Path

    queue: Queue | None = None
    files: Any = None
    clock: Clock | None = None
    """The run's clock; None: the host's."""

    before_start: Callable[[], object] = int
    """Called before the launcher starts a unit."""
    lease: HeldDevices = field(default_factory=HeldDevices)
    capabilities: frozenset[str] = frozenset()
    running: JobRun | None = None

    def run(self, play: Callable[[Unit], None], spec: dict[str, Any] = BENCHMARK, **options: Any) -> dict[str, Any]:
        """Run a job whose units do this; the job afterwards."""
        queue = Queue(self.database)
        queue.submit(NewJob(spec_adapter.validate_python(spec), **options))
        offer = Offer(frozenset({spec["kind"]}), self.capabilities, total_gpus=0, free_gpus=0, idle=True)
        claim = queue.claim("worker", offer)
        clock, sleep = (time.monotonic, time.sleep) if self.clock is None else (self.clock, self.clock.sleep)
        run = JobRun(
            claim,
            self.lease,
            queue=self.queue or queue,
            artifacts=self.files or ArtifactFiles(self.settings.artifacts_dir),
            launcher=Launcher(play, self.before_start),  # type: ignore[arg-type]
            settings=self.settings,
            scratch=self.settings.data_dir / "scratch",
            neighbours=[3, 7],
            on_end=lambda: None,
            clock=clock,
            sleep=sleep,
        )
        self.running = run
        run.start()
        wait_until(lambda: run.ended, "the job's end", 20)
        run.join()
        job, _version = Reading(self.database).job(claim.job_id)
        to_json(job)  # what the server does with it
        return job


@pytest.fixture
def site(tmp_path: Path, settings: Settings, database: Database) -> Site:
    return Site(database, settings.model_copy(update={"grace_s": 0.2}), tmp_path)


@pytest.mark.parametrize(
    ("index", "spec", "told"),
    [
        (3, {}, "; about 30 s left"),
        (3, {"convergence_steps": 100}, "; about 20 s left, then both sides are trained"),
        (5, {"convergence_steps": 100}, ""),
    ],
)
def test_of_runs_that_train_both_sides_nobody_knows_how_long_they_take(index: int, spec: Any, told: str) -> None:
    run: Any = SimpleNamespace(claim=SimpleNamespace(spec=spec), _clock=lambda: 60.0, _second_began=40.0)
    assert JobRun._time_left(run, SimpleNamespace(index=index, count=6)) == told  # type: ignore[arg-type]


def test_replicates_start_together_and_run_one_after_the_other(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.agent.job_run.units_at_a_time", lambda: 2)
    happened = []

    def play(unit: Unit) -> None:
        title = unit.request.unit["title"].rpartition(", ")[2]
        happened.append(f"{title} starts")
        with unit.gate:
            unit.gate.sendall(READY)
            unit.gate.recv(1)
        happened.append(f"{title} begins")
        unit.say(STARTED, SUCCESS)
        happened.append(f"{title} ends")
        unit.end()

    job = site.run(play, {**BENCHMARK, "replicates": 4})
    assert job["state"] == "succeeded"
    first, second, third, fourth = (f"replicate {number} of 4" for number in (1, 2, 3, 4))
    assert sorted(happened[:2]) == [f"{first} starts", f"{second} starts"]
    assert happened[2:6] == [f"{unit} {what}" for unit in (first, second) for what in ("begins", "ends")]
    assert sorted(happened[6:8]) == [f"{third} starts", f"{fourth} starts"]
    assert happened[8:] == [f"{unit} {what}" for unit in (third, fourth) for what in ("begins", "ends")]


@pytest.mark.parametrize(
    "message",
    [
        [],
        {"type": "gossip"},
        {"type": "progress", "done": 10**30, "total": 2, "message": ""},
        {"type": "progress", "done": 1, "total": 2, "message": "caf\udce9"},
        {"type": "cursor", "position": -1},
        {"type": "cell", "done": 1, "total": 2, "title": "a", "outcome": "ok", "headline": "b", "seconds": 10**400},
        {"type": "environment", "environment": ["linux"]},
        {"type": "validity", "verdict": "fine", "checks": []},
        {"type": "outcome", "code": "pineapple", "detail": ""},
    ],
    ids=json.dumps,
)
def test_a_message_that_makes_no_sense_is_refused(message: Any) -> None:
    """Those of results are in test_spool."""
    with pytest.raises(ValueError):
        parse(json.dumps(message).encode())


@pytest.mark.parametrize(
    "message", [[], {"type": "artifact", "path": "\0", "name": "x", "kind": "x", "media_type": "x"}]
)
def test_a_message_that_makes_no_sense_fails_the_job(site: Site, message: Any) -> None:
    job = site.run(saying(message, SUCCESS))
    assert (job["state"], job["error"]["code"]) == ("failed", "failed")
    assert "the worker could not go on" not in job["error"]["detail"]


def test_a_job_outlasts_events_that_cannot_be_written(site: Site) -> None:
    queue = site.queue = RefusingQueue(site.database, DatabaseGone("not now"), {"report": 3})

    def play(unit: Unit) -> None:
        unit.say(STARTED)
        wait_until(lambda: queue.refusals["report"] == 1, "two refusals", 10)  # longer than one flush
        unit.succeed()

    assert site.run(play)["state"] == "succeeded"


class TestEndOfTheWorker:
    """The worker ends while a result waits for the store."""

    def end_while(self, site, refusals, *reasons, refusal_s=0.0, **options) -> dict[str, Any]:
        """Run a job to its success. The store refuses so many calls, each after `refusal_s`, and the worker ends when
        `finish` is refused."""
        clock = site.clock = Clock()

        def end() -> None:
            for reason in reasons:
                site.running.stop.set(reason)
            clock.sleep(refusal_s)

        queue = site.queue = RefusingQueue(site.database, DiskFull("it is full"), refusals, end)

        job = site.run(saying(STARTED, MEASURED, SUCCESS), **options)
        job["attempts"] = [
            (attempt["state"], (attempt["error"] or {}).get("detail"))
            for attempt in Reading(site.database).attempts(job["id"])
        ]
        assert queue.running() == [] or job["state"] == "running"
        return job

    @pytest.mark.parametrize(("reasons", "max_attempts"), [((GivenBack(),), 1), ((Cancelled(), GivenBack()), 2)])
    def test_a_full_disk_may_still_take_the_failure(self, site: Site, reasons: Any, max_attempts: int) -> None:
        job = self.end_while(site, {"finish": 99}, *reasons, refusal_s=RECORD_S, max_attempts=max_attempts)
        assert job["state"] == ("failed" if max_attempts == 1 else "queued")
        ((state, detail),) = job["attempts"]
        assert state == "lost"
        assert "had to end, and could not store how the job had ended: DiskFull: it is full" in detail

    def test_without_any_room_the_job_is_left_to_its_lease(self, site: Site) -> None:
        job = self.end_while(site, {"finish": 99, "give_up": 99}, GivenBack(), refusal_s=RECORD_S)
        assert (job["state"], job["attempts"]) == ("running", [("running", None)])

    def test_control_of_the_end(self, site: Site) -> None:
        """A worker tries as long as it may: one refusal less than above keeps the result."""
        refusals = int(RECORD_S / RETRY_S)
        job = self.end_while(site, {"finish": refusals}, GivenBack())
        assert job["state"] == "succeeded"
        job = self.end_while(site, {"finish": refusals + 1}, GivenBack())
        assert job["state"] == "queued"

    def test_a_unit_killed_after_its_success_keeps_its_result(self, site: Site) -> None:
        def play(unit: Unit) -> None:
            unit.say(MEASURED, SUCCESS)
            site.running.stop.set(GivenBack())
            while unit.control.recv(1) != KILL:
                continue
            unit.die(signal.SIGKILL)

        job = site.run(play)
        assert (job["state"], len(Reading(site.database).measurements(job["id"])["rows"])) == ("succeeded", 1)

    @pytest.mark.parametrize("then", [GivenBack(), Abandoned()])
    def test_a_cancelled_unit_gets_no_grace_of_its_own(self, site: Site, then: GivenBack | Abandoned) -> None:
        site.settings = site.settings.model_copy(update={"grace_s": 3600})

        def play(unit: Unit) -> None:
            site.running.stop.set(Cancelled())
            assert unit.control.recv(1) == TERMINATE
            site.running.stop.set(then)
            assert unit.control.recv(1) == KILL
            unit.die(signal.SIGKILL)

        assert site.run(play)["state"] == ("cancelled" if isinstance(then, GivenBack) else "running")


def test_what_does_not_fit_fails_the_job_and_what_fits_is_kept(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.measure.table.MAX_ROWS", 1)
    job = site.run(saying(STARTED, MEASURED, TABLE, SUCCESS))
    assert (job["state"], job["error"]["code"]) == ("failed", "too_large")
    assert "'kernels' has 2 rows; 1 are kept" in job["error"]["detail"]
    assert len(Reading(site.database).measurements(job["id"])["rows"]) == 1


def test_every_finished_cell_is_reported(site: Site) -> None:
    cells = [{**CELL, "done": number, "title": f"cell {number}"} for number in (1, 2)]
    job = site.run(saying(STARTED, *cells, {"type": "progress", "done": 2, "total": 3, "message": "more"}, SUCCESS))
    events = [event["data"] for event in Reading(site.database).events(job["id"]) if event["type"] == "progress"]
    told = [(event["cell"]["title"], event["message"]) for event in events if "cell" in event]
    assert told == [(f"cell {number}", f"cell {number}: 1 ms (500 ms)") for number in (1, 2)]
    assert job["progress"] == {"done": 2, "total": 3, "message": "more"}


def test_no_text_of_a_job_makes_answers_long(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process sends long texts wherever it can."""
    long = 100_000

    def run(spec: Any, unit: Planned, reporter: Reporter) -> None:
        reporter.progress(1, 2, "p" * long)
        verdict = {"verdict": "suspect", "checks": [{"name": "drift", "ok": False, "detail": "v" * long}]}
        reporter.validity(verdict, title="t" * long)
        raise RuntimeError("e" * long)

    def play(unit: Unit) -> None:
        request = replace(unit.request, unit={**unit.request.unit, "title": "u" * long})
        child.run_request(request, unit.messages)
        unit.end(1)

    runner = RUNNERS["benchmark"]
    monkeypatch.setattr(runner, "run", run)
    monkeypatch.setattr(runner, "plan", lambda spec: [Planned("u" * long, {})])
    monkeypatch.setattr("sys.stderr", io.StringIO())
    job = site.run(play)
    reading = Reading(site.database)
    assert job["error"]["code"] == "failed"
    assert len(to_json([job, reading.units(job["id"]), reading.events(job["id"])])) < long


@pytest.mark.parametrize("place", ["outside", "link", "pipe", "missing"])
def test_only_files_of_its_own_are_taken_from_a_unit(site: Site, place: str) -> None:
    treasure = site.folder / "treasure"
    treasure.write_text("the user's own")

    def play(unit: Unit) -> None:
        path = treasure if place == "outside" else unit.scratch / "file"
        if place == "link":
            path.symlink_to(treasure)
        elif place == "pipe":
            os.mkfifo(path)
        unit.tell(path, "file")
        unit.succeed()

    job = site.run(play)
    assert job["error"]["code"] == "failed"
    assert treasure.exists()
    assert Reading(site.database).artifacts(job["id"]) == []


class TestWorkingDirectory:
    """What lies in a unit's scratch folder, where its working directory is."""

    def test_each_unit_has_its_own_copy_of_the_code(self, site: Site) -> None:
        site.settings = site.settings.model_copy(update={"allow_code": True})
        source = b"def make_step(device): ..."
        site.capabilities = frozenset({RUNS_CODE})
        sha256 = Uploads(site.database, ArtifactFiles(site.settings.artifacts_dir)).put(source)[0]["sha256"]
        found: list[bytes] = []

        def play(unit: Unit) -> None:
            copy = Path(unit.request.environment[uploaded.FOLDER], f"uploaded_{sha256}.py")
            found.append(copy.read_bytes())
            copy.write_text("changed by this unit")
            unit.succeed()

        spec = {**BENCHMARK, "replicates": 3, "step_code": {"sha256": sha256, "function": "make_step"}}
        assert site.run(play, spec)["state"] == "succeeded"
        assert found == [source] * 3

    @pytest.mark.parametrize("limit", [1 << 20, 1 << 30])
    def test_its_bytes_are_limited(self, site: Site, limit: int) -> None:
        site.settings = site.settings.model_copy(update={"max_artifact_bytes": limit})

        def play(unit: Unit) -> None:
            unit.say(STARTED)
            (unit.scratch / "work").mkdir()
            (unit.scratch / "work" / "checkpoint.pt").write_bytes(b"x" * (2 << 20))
            is_ordered_to_end = unit.is_told_to_end(3 * FLUSH_S)
            unit.say(*([] if is_ordered_to_end else [SUCCESS]))
            unit.end()

        job = site.run(play)
        if limit > 2 << 20:
            assert job["state"] == "succeeded", job["error"]
            return
        assert job["error"]["code"] == "too_large"
        assert job["error"]["detail"].startswith("its working directory has 2")
        assert list((site.settings.data_dir / "scratch").iterdir()) == []


@pytest.mark.parametrize(("signum", "name"), [(11, "SIGSEGV"), (64, "SIGRTMAX"), (40, "SIGRTMIN+6")])
def test_a_unit_that_any_signal_kills_has_crashed(site: Site, signum: int, name: str) -> None:
    def play(unit: Unit) -> None:
        unit.die(signum)

    error = site.run(play)["error"]
    assert (error["code"], error["signal"]) == ("crashed", name)


@pytest.mark.parametrize("order", [TERMINATE, KILL])
def test_a_unit_without_pipes_still_times_out(site: Site, order: bytes) -> None:
    def play(unit: Unit) -> None:
        unit.close_pipes()
        while unit.control.recv(1) not in (order, b""):  # b"": nobody is left to give it
            continue
        unit.report(None, 15)

    error = site.run(play, timeout_s=0.2)["error"]
    assert error["code"] == "timeout"
    assert problem_text(error) == "The job ran longer than its timeout_s\n  its time was over after 0.2 s"


@pytest.mark.parametrize("own_step", [True, False])
def test_a_unit_that_hangs_is_told_where_and_since_when(site, monkeypatch, own_step) -> None:
    monkeypatch.setattr(job_run, "LONG_S", 0.3)

    def play(unit: Unit) -> None:
        unit.say(STARTED, {"type": "progress", "done": 0, "total": 15, "message": "warming up"})
        if own_step:
            begun = (4, 1, now_s())
            (unit.scratch / last_words.POSITION).write_bytes(struct.pack("3d", *begun))
            (unit.scratch / last_words.STACKS).write_text(
                '\nCurrent thread 0x1 (most recent call first):\n  File "train.py", line 5 in step\n'
            )
        assert unit.control.recv(1) == TERMINATE
        unit.die(15)

    job = site.run(play, timeout_s=1.5)
    doing, place = ("warming up, in step 4", r" \(train.py:5, in step\)") if own_step else ("warming up", "")
    assert re.fullmatch(rf"its time was over after 1.5 s: {doing} for 1.\d s{place}", job["error"]["detail"])
    assert re.fullmatch(rf"{doing} since \d\d:\d\d:\d\d UTC", job["progress"]["message"])
    assert ("line 5 in step" in job["error"]["log_tail"]) == own_step


def test_a_process_that_dies_is_told_with_its_step(site: Site) -> None:
    def play(unit: Unit) -> None:
        unit.say(STARTED, {"type": "progress", "done": 0, "total": 15, "message": "warming up"})
        (unit.scratch / last_words.POSITION).write_bytes(struct.pack("3d", 4, 0, 1))
        unit.end(3)

    detail = site.run(play)["error"]["detail"]
    assert detail == "the job's process ended with exit code 3 before its work was done: warming up, after step 4"


def test_the_start_of_a_unit_does_not_count(site: Site) -> None:
    """A new warm parent may import torch for longer than the job may run."""
    timeout_s, clock = 60.0, Clock()
    site.clock = clock
    site.before_start = lambda: clock.sleep(2 * timeout_s)

    def play(unit: Unit) -> None:
        unit.say(STARTED)
        is_ordered_to_end = unit.is_told_to_end(2 * FLUSH_S)
        unit.say(*([] if is_ordered_to_end else [SUCCESS]))
        unit.end()

    def play_on(unit: Unit) -> None:
        unit.say(STARTED)
        while not unit.is_told_to_end(FLUSH_S / 10):
            clock.sleep(timeout_s)
        assert unit.control.recv(1) == TERMINATE
        unit.end()

    assert site.run(play, timeout_s=timeout_s)["state"] == "succeeded"
    assert site.run(play_on, timeout_s=timeout_s)["error"]["code"] == "timeout"


def test_a_crashed_unit_goes_on_in_a_new_process(site: Site) -> None:
    seen: list[dict[str, Any]] = []

    def play(unit: Unit) -> None:
        seen.append(unit.params)
        unit.say(STARTED, MEASURED)
        of_its_own = {**MEASUREMENT, "case_key": f"cell {len(seen)}"}
        unit.say({"type": "measurement", **of_its_own})
        unit.say({"type": "progress", "done": 2, "total": 3, "message": "people want to know"})
        unit.say({"type": "cursor", "position": len(seen)})
        if len(seen) < 3:
            unit.die()
        else:
            unit.succeed()

    job = site.run(play, CELLS)
    assert (job["state"], job["error"]) == ("succeeded", None)
    assert [params["first"] for params in seen] == [0, 1, 2], "each goes on with the cell that crashed, to report it"
    assert "SIGSEGV" in seen[1]["crashed"]
    rows = Reading(site.database).measurements(job["id"])["rows"]
    assert [row["unit_index"] for row in rows] == [0] * 4, "what was measured before is kept; it is one unit still"
    keys = [row["case_key"] for row in rows]
    assert sorted(keys) == sorted({MEASUREMENT["case_key"], "cell 1", "cell 2", "cell 3"}), "and once"
    (unit,) = Reading(site.database).units(job["id"])
    assert (unit["title"], unit["outcome"]) == ("3 cells", "succeeded")


@pytest.mark.parametrize("case", ["another code", "no cursor", "no such runner"])
def test_other_failures_end_the_job(site: Site, case: str) -> None:
    seen = []

    def play(unit: Unit) -> None:
        seen.append(unit)
        unit.say({"type": "progress", "done": 1, "total": 3, "message": "a cell"})
        if case != "no cursor":
            unit.say({"type": "cursor", "position": 1})
        if case == "another code":
            unit.say({"type": "outcome", "code": "failed", "detail": "no"})
            unit.end()
        else:
            unit.die()

    job = site.run(play, BENCHMARK if case == "no such runner" else CELLS)
    assert (job["state"], job["error"]["code"]) == ("failed", "failed" if case == "another code" else "crashed")
    assert len(seen) == 1


class Runner:
    """Plans the units that the test wants, for the benchmark's spec. Their processes are played, so nothing runs."""

    kind = "benchmark"

    def __init__(self, *units: Planned) -> None:
        self.units = list(units)

    def plan(self, _spec: Any) -> list[Planned]:
        return self.units

    def run(self, _spec: Any, _unit: Planned, _report: Any) -> None:
        raise AssertionError("its process is played")


class Collector(Runner):
    """One that reads what wrappers have written."""

    def collect(self, _spec: Any, _unit: Planned, _scratch: Path, _report: Any) -> None:
        raise AssertionError("its process is played")


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Callable[[Runner], None]:
    return lambda runner: monkeypatch.setitem(RUNNERS, "benchmark", runner)


def validity(verdict: str) -> dict[str, Any]:
    checks = [{"name": "clocks", "ok": verdict == "valid", "detail": "as they are"}]
    return {"type": "validity", "verdict": verdict, "checks": checks, "case_key": "key", "title": "a case"}


class TestUnits:
    def test_results_are_stamped_with_their_unit(self, site: Site, planned: Callable[[Runner], None]) -> None:
        planned(Runner(Planned("first", side="baseline"), Planned("second", side="candidate")))

        def play(unit: Unit) -> None:
            assert Path(unit.request.ceilings) == site.settings.ceilings_dir, "which later jobs read"
            assert not list((site.settings.data_dir / "scratch").rglob("taken/*")), "a stored file is not there, too"
            title = unit.request.unit["title"]
            unit.say({"type": "environment", "environment": {"of": title}})
            unit.say(MEASURED, TABLE)
            unit.give("trace.json.gz", title)
            unit.succeed(validity("valid" if title == "first" else "suspect"))

        job = site.run(play)
        assert (job["state"], job["error"]) == ("succeeded", None)
        reading = Reading(site.database)
        rows = reading.measurements(job["id"])["rows"]
        assert [(row["unit_index"], row["validity"]) for row in rows] == [(0, "valid"), (1, "suspect")]
        artifacts = reading.artifacts(job["id"])
        files = ArtifactFiles(site.settings.artifacts_dir)
        assert {artifact["name"]: files.open_path(artifact["sha256"]).read_text() for artifact in artifacts} == {
            "trace.json.gz": "first",
            "trace-unit-1.json.gz": "second",
        }
        shown = [(unit["title"], unit["side"], unit["outcome"]) for unit in reading.units(job["id"])]
        assert shown == [("first", "baseline", "succeeded"), ("second", "candidate", "succeeded")]
        assert job["environment"] == {"of": "first", "neighbours": [3, 7]}
        assert (job["validity"]["verdict"], job["validity"]["counts"]) == ("suspect", {"valid": 1, "suspect": 1})
        with site.database.read() as connection:
            stored = connection.exec_driver_sql("SELECT unit_index, name, row_count FROM result_table").all()
        assert [tuple(row) for row in stored] == [(0, "kernels", 2), (1, "kernels", 2)]

    def test_a_failure_names_the_side_that_failed(self, site: Site, planned: Callable[[Runner], None]) -> None:
        """As where the candidate's code cannot be imported."""
        planned(Runner(Planned("first", side="baseline"), Planned("second", side="candidate")))

        def play(unit: Unit) -> None:
            failed = {"type": "outcome", "code": "unsupported", "detail": "no module named 'flash'"}
            unit.say(SUCCESS if unit.request.unit["title"] == "first" else failed)
            unit.end()

        error = site.run(play)["error"]
        assert (error["code"], error["detail"]) == ("unsupported", "the candidate: no module named 'flash'")

    def test_of_a_unit_that_fails_everything_is_kept(self, site, planned) -> None:
        planned(Runner(Planned("first"), Planned("second"), Planned("third")))

        def play(unit: Unit) -> None:
            unit.say(MEASURED)
            unit.give("trace.json", "content")
            unit.succeed() if unit.request.unit["title"] == "first" else unit.die()

        job = site.run(play)
        reading = Reading(site.database)
        assert [unit["outcome"] for unit in reading.units(job["id"])] == ["succeeded", "crashed"]
        assert len(reading.measurements(job["id"])["rows"]) == 2
        assert {artifact["name"] for artifact in reading.artifacts(job["id"])} == {"trace.json", "trace-unit-1.json"}

    def test_late_writes_to_a_file_are_in_its_hash(self, site: Site) -> None:
        def play(unit: Unit) -> None:
            path = unit.scratch / "trace"
            with path.open("wb") as file:
                file.write(b"first")
                file.flush()
                unit.tell(path, "x")
                while path.exists():
                    time.sleep(0.01)
                file.write(b" and last")
            unit.succeed()

        job = site.run(play)
        artifact = Reading(site.database).artifact(job["id"], "x")
        content = ArtifactFiles(site.settings.artifacts_dir).open_path(artifact["sha256"]).read_bytes()
        assert (content, artifact["sha256"]) == (b"first and last", hashlib.sha256(b"first and last").hexdigest())


WRAPPED = Planned("wrapped", start="exec", wrap=("nsys", "profile", "-o", "{scratch}/report"))


class TestWrapped:
    def test_a_wrapped_units_report_is_collected_afterwards(self, site, planned) -> None:
        planned(Collector(Planned("plain"), WRAPPED))
        seen: list[tuple[str, str, list[str], bool]] = []

        def play(unit: Unit) -> None:
            request = unit.request
            report = Path(request.scratch) / "report"
            seen.append((request.task, unit.start, request.wrap, report.exists()))
            unit.say(STARTED, {"type": "progress", "done": 1, "total": 2, "message": "half"})
            if request.wrap:
                assert request.wrap == ["nsys", "profile", "-o", str(report)]
                report.write_text("written after the end")
            if request.task == "collect":
                unit.say(TABLE)
                unit.give("report.txt", report.read_text(), path="report")
            unit.succeed()

        job = site.run(play)
        assert (job["state"], job["error"]) == ("succeeded", None)
        assert [(task, start, bool(wrap), report) for task, start, wrap, report in seen] == [
            ("run", "fork", False, False),
            ("run", "exec", True, False),
            ("collect", "fork", False, True),
        ]
        assert [artifact["name"] for artifact in Reading(site.database).artifacts(job["id"])] == ["report-unit-1.txt"]
        assert len(Reading(site.database).units(job["id"])) == 2
        events = Reading(site.database).events(job["id"])
        done = [event["data"]["done"] / event["data"]["total"] for event in events if event["type"] == "progress"]
        assert done == sorted(done)

    @pytest.mark.parametrize(
        ("said", "ending", "code", "words"),
        [
            ([SUCCESS], (3, None), "invalid_environment", "ended with exit code 3, although"),
            ([], (0, None), "invalid_environment", "exit code 0 and never started the unit"),
            ([STARTED], (139, None), "crashed", "'nsys', under which it ran"),
            ([{"type": "outcome", "code": "unsupported", "detail": "no GPU"}], (69, None), "unsupported", "no GPU"),
        ],
    )
    def test_a_wrapper_fails_the_job_in_its_own_words(self, site, planned, said, ending, code, words) -> None:
        planned(Collector(WRAPPED))
        seen = []

        def play(unit: Unit) -> None:
            seen.append(unit.request.task)
            os.write(unit.log, b"ERR_NVGPUCTRPERM: no permission\n")
            unit.say(*said)
            unit.end(*ending)

        job = site.run(play)
        assert (job["state"], job["error"]["code"]) == ("failed", code)
        assert words in job["error"]["detail"]
        if code == "invalid_environment":
            assert "ERR_NVGPUCTRPERM: no permission" in job["error"]["detail"]
        assert seen == ["run"], "there is nothing to collect"

    @pytest.mark.parametrize(
        ("last", "words", "code"),
        [
            (SUCCESS, "ERR_NVGPUCTRPERM", "invalid_environment"),
            ({"type": "outcome", "code": "failed", "detail": "CUDA error"}, "ERR_NVGPUCTRPERM", "invalid_environment"),
            ({"type": "outcome", "code": "unsupported", "detail": "no such device"}, "ERR_NVGPUCTRPERM", "unsupported"),
            ({"type": "outcome", "code": "failed", "detail": "CUDA error"}, None, "failed"),
            (SUCCESS, None, None),
        ],
    )
    def test_a_wrappers_error_is_believed(self, site, planned, last, words, code) -> None:
        seen: list[Any] = []

        class Knowing(Collector):
            def wrapper_error(self, spec, unit, scratch, output, *, succeeded) -> str | None:
                seen.append((spec.kind, unit.title, (scratch / "report").exists(), output, succeeded))
                return words

        planned(Knowing(WRAPPED))

        def play(unit: Unit) -> None:
            if unit.request.task == "collect":
                seen.append("collect")
                unit.succeed()
                return
            (unit.scratch / "report").touch()
            os.write(unit.log, b"ERR_NVGPUCTRPERM\n")
            unit.say(STARTED, last)
            unit.end()

        job = site.run(play)
        assert (job["error"] or {}).get("code") == code
        questions = [("benchmark", "wrapped", True, "ERR_NVGPUCTRPERM\n", last is SUCCESS)]
        if code == "invalid_environment":
            assert job["error"]["detail"] == words
        assert seen == [*(questions if code != "unsupported" else []), *(["collect"] if code is None else [])]

    def test_a_wrapper_that_never_starts_its_unit_is_ended(self, site: Site, planned: Callable[[Runner], None]) -> None:
        planned(Runner(WRAPPED))
        clock = site.clock = Clock()

        def play(unit: Unit) -> None:
            order = None
            while order not in (KILL, b""):
                clock.sleep(WRAPPER_START_S)
                if unit.is_told_to_end(FLUSH_S / 10):
                    order = unit.control.recv(1)
            unit.die(9)

        job = site.run(play)
        assert job["error"]["code"] == "invalid_environment"
        assert "did not start the unit within 300 s" in job["error"]["detail"]


class TestLeftovers:
    """Processes of a killed agent's job, which may use the devices."""

    def test_no_unit_starts_before_they_have_ended(self, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
        site.lease, found = HeldDevices(descriptors=[os.open(os.devnull, os.O_RDONLY)]), [[17, 18], [18]]
        monkeypatch.setattr(Launcher, "end_leftovers", lambda _launcher: found.pop(0) if found else [])
        looks: list[bool] = []

        def play(unit: Unit) -> None:
            looks.append(bool(found))
            unit.succeed()

        assert site.run(play)["state"] == "succeeded"
        assert looks == [False]


class TestHugeArtifacts:
    """A file takes as long to read as it is long, holes count, and nothing may wait for that."""

    @pytest.mark.parametrize("sizes", [(1 << 40,), (600, 600)], ids=["one", "together"])
    def test_too_many_bytes_are_refused_unread(self, site: Site, sizes: tuple[int, ...]) -> None:
        site.settings = site.settings.model_copy(update={"max_artifact_bytes": 1024})

        def play(unit: Unit) -> None:
            for number, size in enumerate(sizes):
                file = unit.scratch / f"trace-{number}"
                file.touch()
                os.truncate(file, size)
                unit.tell(file, file.name)
            unit.control.recv(1)  # it is told to end
            unit.die(15)

        error = site.run(play)["error"]
        assert error["code"] == "too_large"
        assert f"artifact 'trace-{len(sizes) - 1}' has {sizes[-1]} bytes" in error["detail"]
        assert "keeps 1024 of a job (FLOPWATCH_MAX_ARTIFACT_BYTES)" in error["detail"]

    def store_slowly(self, site, act, **options) -> dict[str, Any]:
        """Run a job with an artifact of five parts, each of which takes 0.1 s to store. Something happens to its run
        when it begins to store."""
        clock = site.clock = Clock()

        def begin() -> None:
            act(site.running, clock)

        site.files = WatchedFiles(site.settings.artifacts_dir, begin, lambda: clock.sleep(0.1))

        def play(unit: Unit) -> None:
            unit.give("trace", "x" * (5 * CHUNK_BYTES))
            unit.succeed()

        return site.run(play, **options)

    def test_storing_ends_with_the_timeout(self, site: Site) -> None:
        job = self.store_slowly(site, lambda _run, clock: clock.sleep(60), timeout_s=60)
        assert job["error"]["code"] == "timeout"
        assert job["error"]["detail"] == "its time was over after 60 s, while it stored trace"
        assert [path for path in site.settings.artifacts_dir.rglob("*") if path.is_file()] == []
        assert list((site.settings.data_dir / "scratch").iterdir()) == []

    @pytest.mark.parametrize(
        ("reason", "state", "grace_s"),
        [(Cancelled(), "cancelled", 0.2), (GivenBack(), "queued", 60), (Abandoned(), "running", 60)],
    )
    def test_storing_ends_with_a_stop(self, site, reason, state, grace_s) -> None:
        """At once, without a grace, when the result is not wanted."""
        site.settings = site.settings.model_copy(update={"grace_s": grace_s})
        job = self.store_slowly(site, lambda run, _clock: run.stop.set(reason))
        assert job["state"] == state
        error = None if job["error"] is None else (job["error"]["code"], job["error"]["detail"])
        assert error == (("cancelled", CANCELLED_WHILE) if state == "cancelled" else None)


class TestObjectStore:
    """The job's files go to an object store whose network is cut."""

    @pytest.fixture
    def remote(self, site: Site, bucket: Bucket) -> Site:
        site.files = ObjectFiles(bucket.url, site.database)
        site.clock = Clock()
        return site

    def run(self, site: Site, bucket: Bucket, mended_after: float, **options: Any) -> dict[str, Any]:
        """Run a job with a file, whose first upload is cut; the network is mended after so many pauses."""
        paused, sleep = 0, site.clock.sleep

        def pause(seconds: float) -> None:
            nonlocal paused
            paused += 1
            if paused == mended_after:
                bucket.network.mend()
            sleep(seconds)

        site.clock.sleep = pause  # type: ignore[method-assign]

        def play(unit: Unit) -> None:
            unit.say(STARTED, MEASURED)
            unit.give("trace.json", "a trace")
            bucket.network.cut_after = 10
            unit.succeed()

        return site.run(play, **options)

    def test_it_keeps_its_results_however_long_that_takes(self, remote: Site, bucket: Bucket) -> None:
        job = self.run(remote, bucket, mended_after=1000, timeout_s=30)
        assert remote.clock() > 10 * remote.settings.lease_s
        assert (job["state"], job["error"]) == ("succeeded", None)
        [artifact] = Reading(remote.database).artifacts(job["id"])
        assert remote.files.read(artifact["sha256"]) == b"a trace"
        assert remote.running.unfit is None
        remote.files.remove_unreferenced(remote.database, 0)
        with remote.database.read() as connection:
            names = connection.exec_driver_sql("SELECT name FROM stored_object").scalars().all()
        assert len(names) < 5, "no try leaves a row"
        assert {name.rpartition("/")[2] for name in bucket.names()} == set(names)

    def test_a_cancel_does_not_wait_for_the_store(self, remote: Site, bucket: Bucket) -> None:
        sleep = remote.clock.sleep

        def pause(seconds: float) -> None:
            remote.running.stop.set(Cancelled())
            sleep(seconds)

        remote.clock.sleep = pause  # type: ignore[method-assign]

        def play(unit: Unit) -> None:
            unit.give("trace.json", "a trace")
            bucket.network.cut()
            unit.succeed()

        job = remote.run(play)
        assert job["state"] == "cancelled"
        assert remote.clock() < Clock()() + remote.settings.lease_s
