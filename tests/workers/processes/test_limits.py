"""A unit's limits: when a job takes too much, the job ends and not the agent."""

import json
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workers.processes import limits
from workers.processes.keeper import Request, fork_child
from workers.processes.limits import limit_unit


def in_a_fork(work: Callable[[], Any]) -> Any:
    """Return what `work` returns in a fork of this process; kill the fork's own forks, which stay in its group."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.setpgid(0, 0)
            os.write(writer, json.dumps(work()).encode() + b"\n")
            time.sleep(60)
        finally:
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader) as answer:
        line = answer.readline()
    if line:
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert line, "it has failed"
    return json.loads(line)


def test_a_unit_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "OPEN_FILES", 300)

    def tell(_request: Request) -> int:
        names = (resource.RLIMIT_CORE, resource.RLIMIT_NOFILE)
        os.write(writer, json.dumps([resource.getrlimit(name) for name in names]).encode())
        return 0

    reader, writer = os.pipe()
    start = fork_child(tell, close=[])
    pid = in_a_fork(lambda: os.waitpid(start(Request("", {}, {}, "")) or 0, 0)[1])
    assert pid == 0
    assert json.loads(os.read(reader, 100)) == [[0, 0], [300, 300]]
    os.close(reader)
    os.close(writer)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 300


def oom_scores(prepare: Callable[[], None]) -> tuple[int, int]:
    """The kernel's scores of a unit and of its agent, which is larger; it ends the process with the highest."""
    unit = in_a_fork(lambda: (prepare(), int(Path("/proc/self/oom_score").read_text()))[1])
    return unit, int(Path("/proc/self/oom_score").read_text())


def test_out_of_memory_ends_the_unit_before_the_agent() -> None:
    unit, agent = oom_scores(limit_unit)
    assert unit > agent


def test_control_of_the_score() -> None:
    unit, agent = oom_scores(lambda: None)
    assert unit <= agent


def agent_starts_a_thread_beside_a_fork_bomb(limit: Callable[[], None]) -> bool:
    """Let a unit of a user with few processes fork until it can no more."""

    def agent() -> bool:
        # A user of this process alone: other tests' forks, or those that were just killed, would count, too.
        nobody = 20_000 + os.getpid() % 40_000
        os.setgid(nobody)
        os.setuid(nobody)
        resource.setrlimit(resource.RLIMIT_NPROC, (40, 40))
        reader, writer = os.pipe()
        unit = os.fork()
        if not unit:
            limit()
            _fork_until_refused()
            os.write(writer, b"x")
            time.sleep(60)
        os.read(reader, 1)
        try:
            threading.Thread(target=int).start()
        except RuntimeError:
            return False
        return True

    return bool(in_a_fork(agent))


def _fork_until_refused() -> None:
    while True:
        try:
            if not os.fork():
                time.sleep(60)
        except BlockingIOError:  # EAGAIN
            return


@pytest.mark.long
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become a user who has no process")
def test_a_fork_bomb_leaves_threads_to_the_agent() -> None:
    assert agent_starts_a_thread_beside_a_fork_bomb(limit_unit)


@pytest.mark.long
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become a user who has no process")
def test_control_of_the_reserve() -> None:
    assert not agent_starts_a_thread_beside_a_fork_bomb(lambda: None)
