"""A unit's limits: when a job takes too much, the job ends and not the agent."""

import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workers.processes import limits
from workers.processes.keeper import Request, fork_child
from workers.processes.limits import limit_unit


def in_a_fork(work: Callable[[], Any]) -> Any:
    """Return what `work` returns in a fork of this process."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.write(writer, json.dumps(work()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        found = answer.read()
    os.waitpid(pid, 0)
    assert found, "it has failed"
    return json.loads(found)


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
