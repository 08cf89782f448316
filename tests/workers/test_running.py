"""A claimed job with a unit played by the test: what it says, and when it ends, is up to the test."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic_core import to_json

from app.settings import Settings
from app.specs import spec_adapter
from app.store.artifacts import ArtifactFiles
from app.store.engine import Database, open_database
from app.store.queue import Queue
from app.store.reading import Reading
from app.store.records import NewJob, Offer
from workers.child import PipeReporter
from workers.devices import Lease
from workers.keeper import KILL, TERMINATE
from workers.launch import Process
from workers.running import JobRun

MEASUREMENT = {
    "case": {"context_length": 1},
    "phase": "forward",
    "metric": "forward_ms",
    "unit": "ms",
    "outcome": "ok",
    "reason": None,
    "n": 1,
    "samples": None,
} | dict.fromkeys(("mean", "std", "median", "min", "max", "p05", "p25", "p75", "p95"), 1.0)
BENCHMARK = {"kind": "benchmark", "device": "cpu"}
CELLS = {"kind": "attention", "device": "cpu", "implementations": ["tiled"], "sequence_lengths": [16, 32, 64]}
SUCCESS = {"type": "outcome", "code": None, "detail": ""}


@dataclass
class Unit:
    """The unit's ends of its pipes, and its keeper's of the control socket."""

    control: socket.socket
    messages: int
    log: int
    scratch: Path
    params: dict[str, Any]

    def say(self, *messages: Any) -> None:
        for message in messages:
            os.write(self.messages, json.dumps(message).encode() + b"\n")

    def close_pipes(self) -> None:
        os.close(self.messages)
        os.close(self.log)

    def end(self) -> None:
        """End as a unit does whose work is done."""
        self.close_pipes()
        self.report(exit_code=0, signal=None)

    def crash(self) -> None:
        """End as one does that reads memory that is not its own."""
        self.close_pipes()
        self.report(exit_code=None, signal=signal.SIGSEGV)

    def report(self, **how: int | None) -> None:
        self.control.sendall(json.dumps(how).encode() + b"\n")
        self.control.close()


class Launcher:
    """Starts no process but a thread that plays one."""

    def __init__(self, play: Callable[[Unit], None]) -> None:
        self.play = play

    def start(self, request: Any, _start: str, _locks: Any) -> Process:
        ours, theirs = socket.socketpair()
        messages, messages_in = os.pipe()
        log, log_in = os.pipe()
        unit = Unit(theirs, messages_in, log_in, Path(request.scratch), request.unit["params"])
        threading.Thread(target=self.play, args=(unit,)).start()
        return Process(ours, messages, log, on_close=lambda: None)


@dataclass
class Site:
    """A store with one job."""

    database: Database
    settings: Settings
    folder: Path

    def run(self, play: Callable[[Unit], None], spec: dict[str, Any] = BENCHMARK, **options: Any) -> dict[str, Any]:
        """Run a job whose units do this; the job afterwards."""
        queue = Queue(self.database)
        queue.submit(NewJob(spec_adapter.validate_python(spec), **options))
        offer = Offer(frozenset({spec["kind"]}), frozenset(), total_gpus=0, free_gpus=0, idle=True)
        claim = queue.claim("worker", offer)
        assert claim is not None
        run = JobRun(
            claim,
            Lease(),
            queue=queue,
            artifacts=ArtifactFiles(self.settings.artifacts_dir),
            launcher=Launcher(play),  # type: ignore[arg-type]
            settings=self.settings,
            neighbours=[],
            on_end=lambda: None,
        )
        run.start()
        deadline = time.monotonic() + 20
        while not run.ended:
            assert time.monotonic() < deadline, "the job does not end"
            time.sleep(0.01)
        run.join()
        job, _version = Reading(self.database).job(claim.job_id)
        to_json(job)  # what the server does with it
        return job


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    settings = Settings(data_dir=tmp_path / "data", grace_s=0.2)
    database = open_database(settings)
    yield Site(database, settings, tmp_path)
    database.close()


def test_what_a_unit_measures_lands_with_its_success(site: Site) -> None:
    def play(unit: Unit) -> None:
        unit.say({"type": "started"}, {"type": "measurement", "measurement": MEASUREMENT}, SUCCESS)
        os.write(unit.log, b"hello\n")
        unit.end()

    job = site.run(play)
    assert (job["state"], job["error"]) == ("succeeded", None)
    assert len(Reading(site.database).measurements(job["id"])["rows"]) == 1
    assert Reading(site.database).log(job["id"]) == "hello\n"


@pytest.mark.parametrize(
    "message",
    [
        {},
        [],
        "started",
        {"type": "gossip"},
        {"type": "measurement", "measurement": MEASUREMENT | {"metric": {}}},
        {"type": "measurement", "measurement": MEASUREMENT | {"mean": "fast"}},
        {"type": "measurement", "measurement": MEASUREMENT | {"case": ["context_length"]}},
        {"type": "measurement", "measurement": MEASUREMENT | {"n": 2**70}},
        {"type": "measurement", "measurement": {}},
        {"type": "progress", "done": "many", "total": 2, "message": ""},
        {"type": "progress", "done": 1, "total": 2, "message": "caf\udce9"},
        {"type": "environment", "environment": ["linux"]},
        {"type": "validity", "validity": {"verdict": "fine", "checks": []}},
        {"type": "artifact", "path": "\0", "name": "trace.json", "kind": "trace", "media_type": "text/plain"},
        {"type": "outcome"},
        {"type": "outcome", "code": "pineapple", "detail": ""},
        {"type": "outcome", "code": [], "detail": ""},
        {"type": "outcome", "code": "failed", "detail": None},
    ],
    ids=json.dumps,
)
def test_a_message_that_makes_no_sense_fails_the_job(site: Site, message: Any) -> None:
    def play(unit: Unit) -> None:
        unit.say(message, SUCCESS)
        unit.end()

    job = site.run(play)
    assert (job["state"], job["error"]["code"]) == ("failed", "failed")
    assert Reading(site.database).measurements(job["id"])["rows"] == []


def test_deep_nesting_fails_the_job(site: Site) -> None:
    def play(unit: Unit) -> None:
        os.write(unit.messages, b"[" * 20_000 + b"\n")
        unit.end()

    assert site.run(play)["error"]["code"] == "failed"


def test_an_error_whose_text_is_no_unicode_can_be_read(site: Site) -> None:
    def play(unit: Unit) -> None:
        reporter = PipeReporter(unit.messages, unit.scratch)
        reporter.send("outcome", code="failed", detail="no such file: caf\udce9")
        unit.end()

    assert site.run(play)["error"]["detail"] == "no such file: caf?"


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
        unit.say({"type": "artifact", "path": str(path), "name": "file", "kind": "x", "media_type": "text/plain"})
        unit.say(SUCCESS)
        unit.end()

    job = site.run(play)
    assert job["error"]["code"] == "failed"
    assert treasure.exists()
    assert Reading(site.database).artifacts(job["id"]) == []


@pytest.mark.parametrize("order", [TERMINATE, KILL])
def test_a_unit_that_closes_its_pipes_and_goes_on_still_times_out(site: Site, order: bytes) -> None:
    def play(unit: Unit) -> None:
        unit.close_pipes()
        while unit.control.recv(1) not in (order, b""):  # b"": nobody is left to give it
            continue
        unit.report(exit_code=None, signal=15)

    job = site.run(play, timeout_s=0.2)
    assert job["error"]["code"] == "timeout"


def test_a_unit_that_crashes_goes_on_in_a_new_process_where_its_runner_says(site: Site) -> None:
    seen: list[dict[str, Any]] = []

    def play(unit: Unit) -> None:
        seen.append(unit.params)
        unit.say({"type": "started"}, {"type": "measurement", "measurement": MEASUREMENT})
        unit.say({"type": "progress", "done": len(seen), "total": 3, "message": "a cell"})
        if len(seen) < 3:
            unit.crash()
        else:
            unit.say(SUCCESS)
            unit.end()

    job = site.run(play, CELLS)
    assert (job["state"], job["error"]) == ("succeeded", None)
    assert [params["first"] for params in seen] == [0, 1, 2], "each goes on with the cell that crashed, to report it"
    assert "crashed" not in seen[0]
    assert "SIGSEGV" in seen[1]["crashed"]
    assert len(Reading(site.database).measurements(job["id"])["rows"]) == 3, "what was measured before is kept"


@pytest.mark.parametrize("case", ["another code", "no progress", "no such runner"])
def test_other_failures_end_the_job(site: Site, case: str) -> None:
    seen = []

    def play(unit: Unit) -> None:
        seen.append(unit)
        if case != "no progress":
            unit.say({"type": "progress", "done": 1, "total": 3, "message": "a cell"})
        if case == "another code":
            unit.say({"type": "outcome", "code": "failed", "detail": "no"})
            unit.end()
        else:
            unit.crash()

    job = site.run(play, BENCHMARK if case == "no such runner" else CELLS)
    assert (job["state"], job["error"]["code"]) == ("failed", "failed" if case == "another code" else "crashed")
    assert len(seen) == 1
