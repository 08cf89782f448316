"""What is left when an agent and the keeper of its unit are killed at once: a daemon that nobody watches."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.processes import is_alive
from tools.waiting import wait_until
from workers.processes.leftovers import VARIABLE, end_leftovers, own_mark

AGENT = """
import os, sys
from workers.processes.keeper import Request
from workers.processes.launch import Launcher

folder, shell = sys.argv[1:]
launcher = Launcher()
unit = {"title": "unit", "params": {}, "start": "exec", "environment": {}}
process = launcher.start(Request("benchmark", {}, unit, folder, wrap=["sh", "-c", shell]), "exec", [])
process.report()
"""
PLAIN, WITHOUT_VARIABLES = "sleep 3600", "env -i sleep 3600"


@contextmanager
def agent_with_a_daemon(folder: Path, daemon: str) -> Iterator[tuple[psutil.Process, int]]:
    """An agent whose job has started a daemon in a session of its own, and the daemon's pid."""
    pids = folder / "pids"
    shell = f"setsid {daemon} & echo $! > {pids}; while :; do sleep 3600; done"
    command = [sys.executable, "-c", AGENT, str(folder), shell]
    environment = {**os.environ, "TMPDIR": str(folder)}
    with subprocess.Popen(command, env=environment) as process:
        wait_until(lambda: pids.exists() and pids.read_text().endswith("\n"), timeout_s=30, what="the daemon")
        pid = int(pids.read_text())
        # The shell has forked; the session is made, and the program is executed, a moment later.
        wait_until(lambda: psutil.Process(pid).name() == "sleep", timeout_s=30, what="the daemon's program")
        try:
            yield psutil.Process(process.pid), pid
        finally:
            process.kill()
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)


def kill_together(agent: psutil.Process) -> None:
    """Kill an agent and its keeper so that neither can react to the other's death."""
    [keeper] = agent.children()
    keeper.suspend()
    agent.kill()
    keeper.kill()


def mark_of(folder: Path) -> str:
    """The mark of another agent with the device locks of that folder."""
    return own_mark(folder / "flopwatch-locks")


def swept(folder: Path) -> Callable[[], bool]:
    return lambda: not end_leftovers(mark_of(folder))


def test_a_daemon_of_a_killed_agent_is_ended(tmp_path: Path) -> None:
    with agent_with_a_daemon(tmp_path, PLAIN) as (agent, pid):
        end_leftovers(mark_of(tmp_path))
        assert is_alive(pid), "its agent is alive"
        kill_together(agent)
        agent.wait()
        end_leftovers(mark_of(tmp_path / "other devices"))
        assert is_alive(pid), "this is for agents that share its devices"
        wait_until(swept(tmp_path), timeout_s=20, what="the end of what is left")
        wait_until(lambda: not is_alive(pid), timeout_s=20, what="the daemon's end")


def test_control_of_the_mark(tmp_path: Path) -> None:
    """Without the variable the daemon lives on beside the job's next attempt."""
    with agent_with_a_daemon(tmp_path, WITHOUT_VARIABLES) as (agent, pid):
        kill_together(agent)
        agent.wait()
        wait_until(swept(tmp_path), timeout_s=20, what="the end of what is left")
        assert is_alive(pid)


@pytest.mark.parametrize("mark", ["", "nonsense", "1-2-3", "0-1-1-{folder}", "{namespace}-x-1-{folder}"])
def test_foreign_processes_are_left_alone(tmp_path: Path, mark: str) -> None:
    namespace, _pid, _start, folder = mark_of(tmp_path).split("-")
    variable = {VARIABLE: mark.format(namespace=namespace, folder=folder)}
    with subprocess.Popen(["sleep", "3600"], env=variable) as process:
        assert end_leftovers(mark_of(tmp_path)) == []
        assert process.poll() is None
        process.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_another_users_process_is_left_alone(tmp_path: Path) -> None:
    """Root too, who could kill it, believes only what its own processes say."""
    namespace, pid, start, folder = mark_of(tmp_path).split("-")
    dead = f"{namespace}-{pid}-{int(start) - 1}-{folder}"
    with subprocess.Popen(["sleep", "3600"], env={VARIABLE: dead}, user=64_998) as process:
        assert end_leftovers(mark_of(tmp_path)) == []
        assert process.poll() is None
        process.kill()


def test_a_pid_that_another_process_has_now_tells_of_no_life(tmp_path: Path) -> None:
    namespace, pid, start, folder = mark_of(tmp_path).split("-")
    for started, ended in ((start, False), (str(int(start) - 1), True)):
        with subprocess.Popen(["sleep", "3600"], env={VARIABLE: f"{namespace}-{pid}-{started}-{folder}"}) as process:
            assert end_leftovers(mark_of(tmp_path)) == ([process.pid] if ended else [])
            process.kill()


@pytest.mark.parametrize(
    ("error", "ended"), [(errno.EMFILE, False), (errno.ENOENT, True), (errno.ESRCH, True)], ids=errno.errorcode.get
)
def test_an_agent_that_cannot_be_looked_at_is_not_dead(tmp_path, monkeypatch, error, ended) -> None:
    """The agent lives; its status cannot be read, or is gone."""
    mark, read_text = mark_of(tmp_path), Path.read_text

    def read(path: Path, *args: Any, **options: Any) -> str:
        if path == Path(f"/proc/{os.getpid()}/stat"):
            raise OSError(error, os.strerror(error))
        return read_text(path, *args, **options)

    monkeypatch.setattr(Path, "read_text", read)
    with subprocess.Popen(["sleep", "3600"], env={VARIABLE: mark}) as process:
        assert end_leftovers(mark) == ([process.pid] if ended else [])
        process.kill()
