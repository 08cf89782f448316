"""The agent in an allocation, before it takes the claim over: what it meets there is not the job's fault."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest

from app.errors import CannotRunHere, DatabaseBusy
from app.store.records import HandedOver
from tests.clock import Clock
from workers.devices.discovery import Gpu, Host
from workers.devices.locks import HeldDevices
from workers.slurm import one_job
from workers.slurm.handover import HandOver
from workers.slurm.one_job import AWAY_S, OneJobAgent, _patiently

GPUS = tuple(Gpu(f"GPU-{number}", "a GPU", 1000) for number in range(2))
CPU_JOB = HandOver(HandedOver(1, 1, "token"), 1, "cpu", 1, False)
GPU_JOB = replace(CPU_JOB, device_type="cuda", devices=2)
NO_DEVICE = replace(CPU_JOB, device_type="none")


@pytest.fixture
def agent(tmp_path, settings, database, monkeypatch) -> Iterator[OneJobAgent]:
    monkeypatch.setattr("workers.agent.agent.Launcher", lambda: SimpleNamespace(close=lambda: None))
    agent = OneJobAgent(settings, database, tmp_path / "file.json", CPU_JOB, {})
    yield agent
    agent.close()


@pytest.mark.parametrize(
    ("job", "gpus", "held_gpus", "alone", "locked", "words"),
    [
        (CPU_JOB, (), (), True, True, None),
        (CPU_JOB, (), (), False, True, "Another Flopwatch"),
        (CPU_JOB, (), (), False, False, "Another Flopwatch"),
        (NO_DEVICE, (), (), False, False, None),
        (GPU_JOB, GPUS, GPUS, False, True, None),
        (GPU_JOB, GPUS, GPUS[:1], False, True, "Another Flopwatch"),
        (replace(GPU_JOB, exclusive_host=True), GPUS, GPUS, False, True, "Another Flopwatch"),
        (replace(GPU_JOB, exclusive_host=True), GPUS, GPUS, True, True, None),
        (GPU_JOB, GPUS[:1], GPUS[:1], True, True, "needs 2 GPUs, and its process on .* sees 1"),
        (GPU_JOB, (), (), True, True, "sees 0"),
    ],
)
def test_a_node_without_the_jobs_devices_takes_nothing_over(agent, job, gpus, held_gpus, alone, locked, words) -> None:
    agent._handed, agent._host = job, Host(gpus=gpus, cpu_count=2, memory_mib=1)
    held = HeldDevices(held_gpus, alone, [99] if locked else [])
    if words is None:
        agent._check_node(held)
    else:
        with pytest.raises(CannotRunHere, match=words):
            agent._check_node(held)


def test_an_allocation_that_is_ended_takes_nothing_over(agent: OneJobAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the signal comes while it waits for the database."""
    asked = []

    def take_over(*_: object) -> None:
        asked.append(True)
        agent.drain()
        raise DatabaseBusy("the database is away")

    monkeypatch.setattr(agent._queue, "take_over", take_over)
    monkeypatch.setattr(one_job, "AGAIN_S", 0.0)
    with pytest.raises(CannotRunHere, match="has not begun"):
        agent._take_over()
    assert len(asked) == 1
    with pytest.raises(CannotRunHere, match="has not begun"):
        agent._check_node(HeldDevices((), True, [99]))


def test_a_database_that_is_away_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(one_job.time, "monotonic", clock)
    monkeypatch.setattr(one_job.time, "sleep", clock.sleep)
    back_at = clock.now + AWAY_S / 2

    def ask() -> str:
        if clock.now < back_at:
            raise DatabaseBusy("it is away")
        return "here"

    assert _patiently(ask) == "here"
    back_at = clock.now + 2 * AWAY_S
    with pytest.raises(DatabaseBusy):
        _patiently(ask)
