"""The agent survives whatever one job does to it, and such an attempt counts."""

import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from app.errors import DatabaseBusy
from app.settings import Settings
from app.specs import spec_adapter
from app.store.database.engine import Database, open_database
from app.store.files.artifacts import ArtifactFiles
from app.store.queue.transitions import Queue
from app.store.reading.queries import Reading
from app.store.records import NewJob
from tests.clock import Clock
from tests.databases import put_database
from workers.agent import job_run, serving, unit_run
from workers.agent.agent import TURN_S, Agent
from workers.agent.fitness import MAX_BACKOFF_S, MIN_BACKOFF_S
from workers.agent.job_run import LEFTOVERS_S, JobRun
from workers.agent.spool import Spool
from workers.devices.discovery import Host
from workers.devices.locks import DeviceLocks
from workers.jobs import RUNNERS
from workers.outcome import Abandoned, GivenBack, HostExhausted, Succeeded
from workers.processes import launch

HOST = Host(gpus=(), cpu_count=2, memory_mib=1)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def locks(tmp_path: Path) -> DeviceLocks:
    return DeviceLocks(HOST, tmp_path / "locks")


class IdleLauncher:
    """A launcher of a host that can start no process."""

    def __init__(self) -> None:
        self.error: Exception = HostExhausted(launch.NOT_FORKED)
        self.end_leftovers: Callable[[], list[int]] = list

    def start(self, *_: Any, **_options: Any) -> NoReturn:
        raise self.error

    def end_orphans(self) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def launcher() -> IdleLauncher:
    return IdleLauncher()


@pytest.fixture
def make_agent(tmp_path, database, locks, launcher, clock) -> Iterator[Callable[..., Agent]]:
    """Make an agent whose loop the test turns; its host has a CPU and locks of its own."""
    agents: list[Agent] = []

    def make(clock: Callable[[], float] = clock, **settings: Any) -> Agent:
        agent = Agent(
            Settings(data_dir=tmp_path / "data", **settings),
            database,
            host=HOST,
            locks=locks,
            launcher=launcher,  # type: ignore[arg-type]
            clock=clock,
        )
        agent.register()
        agents.append(agent)
        return agent

    yield make
    for agent in agents:
        agent.close()


@pytest.fixture
def agent(make_agent: Callable[..., Agent]) -> Agent:
    return make_agent()


BENCHMARK = {"kind": "benchmark", "device": "cpu", "model": {"size": "tiny"}}


def submit(database: Database, spec: dict[str, Any] = BENCHMARK, **options: Any) -> int:
    return int(Queue(database).submit(NewJob(spec_adapter.validate_python(spec), **options)).response["id"])


def job_after(database: Database, job_id: int) -> dict[str, Any]:
    return Reading(database).job(job_id)[0]


def turn(agent: Agent) -> None:
    """Turn the loop once, and let the jobs that run end."""
    agent.serve_queue()
    for run in list(agent.runs.values()):
        assert run.wait(20)
    agent.join_ended()


def no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def no_descriptor(*_: object) -> tuple[int, int]:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def no_memory(*_: object, **__: object) -> None:
    raise MemoryError


def leave(*_: object) -> None:
    raise SystemExit("reason")


CANNOT_START = {
    "no thread is left": (threading.Thread, "start", no_thread, "RuntimeError: can't start new thread"),
    "no descriptor is left": (os, "pipe2", no_descriptor, "OSError: [Errno 24] Too many open files"),
    "no memory is left": (JobRun, "__init__", no_memory, "MemoryError"),
}


@pytest.mark.parametrize("how", CANNOT_START.values(), ids=CANNOT_START.keys())
def test_a_job_that_cannot_start_uses_up_its_attempts(agent, clock, locks, database, monkeypatch, how) -> None:
    owner, name, fault, says = how
    job_id = submit(database, max_attempts=2)
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, fault)
        attempts = []
        for _ in range(3):
            clock.now += MAX_BACKOFF_S
            turn(agent)
            attempts.append(job_after(database, job_id)["attempt"])
    assert attempts == [1, 2, 2]
    job = job_after(database, job_id)
    assert (job["state"], job["error"]["code"]) == ("failed", "worker_lost")
    assert job["error"]["detail"] == f"The worker could not go on with the job: {says}. It was attempt 2 of 2."
    assert [attempt["state"] for attempt in Reading(database).attempts(job_id)] == ["lost", "lost"]
    assert agent.runs == {}
    free = locks.take_free()
    assert free.alone, "its devices are free again"
    free.release()


SPOOL, PLAN = (Spool, "begin_unit"), (type(RUNNERS["benchmark"]), "plan")


@pytest.mark.parametrize(
    ("where", "fault", "says"), [(SPOOL, no_memory, "MemoryError"), (PLAN, leave, "SystemExit: reason")]
)
def test_an_error_ends_the_attempt_with_a_code(agent, clock, locks, database, monkeypatch, where, fault, says) -> None:
    """The job is tried again only when the host was out of something."""
    job_id = submit(database, max_attempts=2)
    monkeypatch.setattr(*where, fault)
    states = []
    for pause_s in (0.0, 0.0, MAX_BACKOFF_S):
        clock.now += pause_s
        turn(agent)
        states.append(job_after(database, job_id)["state"])
    job = job_after(database, job_id)
    exhausted = fault is not leave
    assert states == (["queued", "queued", "failed"] if exhausted else ["failed"] * 3), "the agent pauses"
    assert job["error"]["code"] == ("worker_lost" if exhausted else "failed")
    assert says in job["error"]["detail"]
    assert agent.runs == {}
    free = locks.take_free()
    assert free.alone
    free.release()


@pytest.mark.parametrize(
    "error", [HostExhausted(launch.NOT_FORKED), OSError(errno.ENFILE, "Too many open files in system")]
)
def test_a_job_on_an_exhausted_host_is_retried(agent, launcher, database, error) -> None:
    launcher.error = error
    jobs = [submit(database, max_attempts=2) for _ in range(2)]
    for _ in range(3):
        turn(agent)
    ended = [job_after(database, job_id) for job_id in jobs]
    assert [(job["state"], job["attempt"]) for job in ended] == [("queued", 1), ("queued", 0)], "the agent pauses"
    [attempt] = Reading(database).attempts(jobs[0])
    assert (attempt["state"], attempt["error"]["code"]) == ("lost", "worker_lost")
    assert str(error) in attempt["error"]["detail"]


def test_leftovers_that_cannot_be_ended_fail_no_job(agent, clock, launcher, database, monkeypatch, caplog) -> None:
    def fail_to_end() -> list[int]:
        clock.sleep(LEFTOVERS_S)
        return [17, 18]

    launcher.end_leftovers = fail_to_end
    # The job is back in the queue before the agent looks for another one to claim.
    start = JobRun.start
    monkeypatch.setattr(JobRun, "start", lambda run: (start(run), run.wait(20)))
    job_id = submit(database, max_attempts=1)
    for claims, pause_s in enumerate((0.0, MIN_BACKOFF_S, 2 * MIN_BACKOFF_S), 1):
        clock.now += pause_s
        for _ in range(2):
            turn(agent)
        job = job_after(database, job_id)
        assert (job["state"], job["attempt"]) == ("queued", 0)
        assert len(Reading(database).attempts(job_id)) == claims, "it claims nothing for a while"
    assert "the job goes back: processes of a killed worker's job do not end: 17, 18" in caplog.text


def test_devices_are_given_back_whatever_fails_at_the_end(agent, locks, database, monkeypatch) -> None:
    job_id = submit(database)
    monkeypatch.setattr(Spool, "begin_unit", leave)
    monkeypatch.setattr(ArtifactFiles, "release", no_memory)
    monkeypatch.setattr(threading, "excepthook", lambda _args: None)
    turn(agent)
    assert job_after(database, job_id)["state"] == "failed"
    free = locks.take_free()
    assert free.alone
    free.release()


def test_agents_of_one_host_take_turns(tmp_path: Path, launcher: IdleLauncher) -> None:
    """The agents A and B of two Flopwatches run two jobs each. A looks three times for jobs before B looks once."""
    launcher.error = ValueError("the job fails at once")
    clock, started, left = Clock(), "", {"A": 2, "B": 2}
    databases = {}
    for name in left:
        put_database(tmp_path / name)
        databases[name] = open_database(Settings(data_dir=tmp_path / name))
    agents = {
        name: Agent(
            Settings(data_dir=tmp_path / name),
            database,
            host=HOST,
            locks=DeviceLocks(HOST, tmp_path / "shared"),
            launcher=launcher,  # type: ignore[arg-type]
            clock=clock,
        )
        for name, database in databases.items()
    }
    for agent in agents.values():
        agent.serve_queue()
        agent.serve_queue()
    for database in databases.values():
        for _ in range(2):
            submit(database, max_attempts=1)
    while any(left.values()):
        for name in "AAAB":
            agent = agents[name]
            agent.serve_queue()
            for run in agent.runs.values():
                assert run.wait(20)
                started, left[name] = started + name, left[name] - 1
        clock.now += TURN_S / 2
    for name, database in databases.items():
        agents[name].close()
        database.close()
    assert started == "ABAB"


def test_the_loop_goes_on_after_any_error(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [RuntimeError("a bug"), MemoryError(), ValueError("a row"), DatabaseBusy("now"), OSError("then")]
    monkeypatch.setattr(serving, "RETRY_S", 0.001)
    turns = iter(errors)

    def fail() -> None:
        error = next(turns, None)
        if error is None:
            agent.drain()
            return
        raise error

    monkeypatch.setattr(agent, "serve_queue", fail)
    agent.serve_until_drained()
    assert next(turns, None) is None


def test_an_agents_error_counts_as_an_attempt(agent, database, monkeypatch) -> None:
    for error, attempt in ((None, 0), ("it is broken", 1)):
        job_id = submit(database)
        started = threading.Event()

        def wait_to_be_stopped(self: JobRun, started: threading.Event = started) -> Any:
            started.set()
            while not isinstance(self.stop.reason, GivenBack):
                time.sleep(0.005)
            return self.stop.reason

        monkeypatch.setattr(JobRun, "_run_units", wait_to_be_stopped)
        agent.serve_queue()
        assert started.wait(20)
        agent.give_back_all(error)
        job = job_after(database, job_id)
        assert (job["state"], job["attempt"]) == ("queued", attempt)
        Queue(database).cancel(job_id)


@pytest.mark.parametrize(("signals", "grace_s"), [(1, 0.1), (2, 60.0)], ids=["after the grace", "at the second signal"])
def test_an_agent_ends_although_its_jobs_end_cannot_be_stored(
    make_agent, locks, database, tmp_path, monkeypatch, signals, grace_s
) -> None:
    """The job is left to its lease, since nobody can write; a write that waited as usual would last for minutes."""
    may_end = threading.Event()
    monkeypatch.setattr(unit_run, "RECORD_S", 0.1)
    monkeypatch.setattr(job_run, "RECORD_S", 0.1)
    monkeypatch.setattr(JobRun, "_run_units", lambda _run: may_end.wait(20) and Succeeded())
    agent = make_agent(time.monotonic, grace_s=grace_s, lease_s=1.0)
    job_id = submit(database)
    agent.serve_queue()
    (run,) = agent.runs.values()
    monkeypatch.setattr(database.backend, "_busy_timeout_s", 300.0)

    def end() -> None:
        agent.serve_until_drained()
        agent.announce("stopped")

    ending = threading.Thread(target=end)
    with (tmp_path / "data" / "flopwatch.sqlite3.lock").open("rb+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for _ in range(signals):
            agent.drain()
        ending.start()
        may_end.set()
        ending.join(20)
        assert not ending.is_alive()
    assert run.wait(20)
    assert [attempt["state"] for attempt in Reading(database).attempts(job_id)] == ["running"]
    locks.take_free().release()


def test_a_lost_job_may_be_claimed_before_its_run_ends(agent, clock, database, monkeypatch) -> None:
    may_end = threading.Event()
    monkeypatch.setattr(JobRun, "_run_units", lambda _run: may_end.wait(20) and Succeeded())
    job_id = submit(database, {"kind": "estimate"})
    agent.serve_queue()
    (former,) = agent.runs.values()
    Queue(database).recover(Queue(database).running()[0])
    agent.serve_queue()
    latter = next(run for run in agent.runs.values() if run is not former)
    clock.now += 60.0
    agent.serve_queue()
    assert [run.stop.reason for run in (former, latter)] == [Abandoned(), None]
    may_end.set()
    for run in (former, latter):
        assert run.wait(20)
    agent.join_ended()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(former.stop.descriptor)
    assert [attempt["state"] for attempt in Reading(database).attempts(job_id)] == ["lost", "succeeded"]
