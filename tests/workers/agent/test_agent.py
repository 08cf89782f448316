"""A real agent on a database of its own, while that database cannot be written; and what an agent offers to run."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.settings import Settings
from app.states import FINISHED_STATES
from app.store.database.engine import Database
from app.store.queue.transitions import Queue
from app.store.reading.queries import Reading
from app.store.records import Claim, NewJob
from tests.forked import PLUGINS, PROJECT, forkserver
from tests.plugins.plain_kind.specs.plain import PlainSpec
from tools.waiting import wait_until
from workers.agent.agent import STEADY_S, Agent
from workers.devices.discovery import Gpu, Host
from workers.devices.locks import DeviceLocks, HeldDevices

BUSY_TIMEOUT_S = 0.3


@pytest.fixture
def agent(tmp_path: Path, settings: Settings, database: Database) -> Iterator[subprocess.Popen[bytes]]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, [PLUGINS / "plain_kind", PROJECT, PLUGINS])),
        "MISBEHAVE_FOLDER": str(tmp_path),
        "TMPDIR": str(tmp_path),
        "FLOPWATCH_DATA_DIR": str(settings.data_dir),
        "FLOPWATCH_BUSY_TIMEOUT_S": str(BUSY_TIMEOUT_S),
        "FLOPWATCH_GRACE_S": "1",
    }
    log = tmp_path / "log"
    log.touch()
    process = forkserver().start(["-m", "workers", "agent"], environment, log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        print(log.read_text())


def submit_a_gated_job(database: Database) -> int:
    """Submit a job of the kind in tests/plugins/plain_kind, which waits until a file `open` is there; its id."""
    return int(Queue(database).submit(NewJob(PlainSpec(behaviour="gated"))).response["id"])


def test_a_database_that_is_gone_for_a_while_costs_no_job(tmp_path, settings, database, agent) -> None:
    job_id = submit_a_gated_job(database)
    wait_until((tmp_path / "started").exists, "the job's start")
    file, aside = settings.data_dir / "flopwatch.sqlite3", settings.data_dir / "aside"
    file.rename(aside)
    (tmp_path / "open").touch()
    time.sleep(4 * BUSY_TIMEOUT_S)  # the job ends meanwhile, and its result cannot be written
    assert agent.poll() is None
    aside.rename(file)
    reading = Reading(database)
    wait_until(lambda: reading.job(job_id)[0]["state"] in FINISHED_STATES, "the job's end")
    job, _version = reading.job(job_id)
    assert (job["state"], job["attempt"], job["error"]) == ("succeeded", 1, None)
    assert reading.measurements(job_id)["rows"]


HOST = Host(gpus=(), cpu_count=2, memory_mib=1)


def claim_of(device_type: str, *, exclusive_host: bool = False) -> Claim:
    spec = {"kind": "benchmark"}
    return Claim(1, 1, "token", 1, "worker", "benchmark", None, spec, None, device_type, 1, exclusive_host)


def agent_with(*device_types: str, locks: DeviceLocks | None = None) -> Any:
    """What an agent knows of itself that runs jobs on these types of devices."""
    runs = {number: SimpleNamespace(claim=claim_of(name)) for number, name in enumerate(device_types)}
    return SimpleNamespace(runs=runs, _capabilities=frozenset(), _host=HOST, _locks=locks)


def test_the_store_learns_what_others_hold_for_a_while_and_not_what_this_agent_holds() -> None:
    now = [10.0]
    own = SimpleNamespace(devices=HeldDevices((Gpu(uuid="GPU-1", name="H200", memory_mib=1),), descriptors=[3]))
    agent: Any = SimpleNamespace(
        runs={}, _others_hold=frozenset(), _others_since=0.0, _reported_others=frozenset(), _next_beat=99.0
    )
    agent._clock = lambda: now[0]

    def reported(*taken: str, after_s: float = 0.0) -> set[str]:
        now[0] += after_s
        Agent._note_others(agent, frozenset(taken))
        return set(agent._reported_others)

    assert reported("host") == reported("host", after_s=STEADY_S / 2) == set()
    assert reported(after_s=STEADY_S / 4) == set(), "the host was free for a moment"
    assert reported("host") == reported("host", after_s=STEADY_S / 2) == set()
    assert agent._next_beat == 99.0
    assert reported("host", after_s=STEADY_S / 2) == {"host"}
    assert agent._next_beat == now[0], "a heartbeat is due"
    Agent._note_others(agent, None)
    assert reported("host", after_s=STEADY_S) == {"host"}
    agent.runs[1] = own
    assert reported("host", "GPU-1", "GPU-2") == {"host"}
    assert reported("host", "GPU-1", "GPU-2", after_s=STEADY_S) == {"GPU-2"}


@pytest.mark.parametrize("gpus", [(), (Gpu(uuid="GPU-1", name="H200", memory_mib=1),)])
def test_a_removed_lock_gives_no_device_to_a_second_job(tmp_path: Path, gpus: tuple[Gpu, ...]) -> None:
    locks = DeviceLocks(Host(gpus=gpus, cpu_count=2, memory_mib=1), tmp_path / "locks")
    held = locks.keep_only(locks.take_free(), gpus=len(gpus), alone=not gpus)
    agent, claimed = agent_with(locks=locks), []
    agent.runs[1] = SimpleNamespace(devices=held)
    agent.id, agent._queue = "w", SimpleNamespace(claim=lambda *offer: claimed.append(offer))
    agent._refused_with, agent._note_others, agent._offer = None, lambda _taken: None, lambda free: free.gpus
    agent._is_to_join_first = lambda _run: False
    agent._holds_some_of = partial(Agent._holds_some_of, agent)
    shutil.rmtree(tmp_path / "locks")
    Agent._claim_jobs(agent)
    assert not claimed
    held.release()
    Agent._claim_jobs(agent)
    assert len(claimed) == 1


@pytest.mark.parametrize("gpus", [(), (Gpu(uuid="GPU-1", name="H200", memory_mib=1),)])
def test_a_job_without_a_device_shares_the_host(tmp_path: Path, gpus: tuple[Gpu, ...]) -> None:
    host = Host(gpus=gpus, cpu_count=2, memory_mib=1)
    locks = DeviceLocks(host, tmp_path)
    agent = agent_with(locks=locks)
    agent._host = host
    papers = [Agent._devices_for(agent, claim_of("none"), locks.take_free()) for _ in range(2)]
    assert [(len(paper.descriptors), paper.alone, paper.gpus) for paper in papers] == [(1, False, ())] * 2
    free = locks.take_free()
    assert (free.alone, free.gpus) == (False, gpus), "no job may have the host alone now"
    for held in (free, *papers):
        held.release()
    for claim in (claim_of("none", exclusive_host=True), claim_of("cpu")):
        alone = Agent._devices_for(agent, claim, locks.take_free())
        assert alone.alone
        assert not locks.take_free().descriptors, "it runs beside none"
        alone.release()
