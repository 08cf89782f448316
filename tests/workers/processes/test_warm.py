import errno
import os
import socket
from pathlib import Path

import pytest

from workers.outcome import HostExhausted
from workers.processes import launch, warm
from workers.processes.keeper import Request
from workers.processes.launch import Launcher


def test_a_fork_that_fails_is_only_its_own_unit_s_end(monkeypatch, capsys) -> None:
    def fork() -> int:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", fork)
    reader, writer = os.pipe()
    assert warm._fork_keeper([writer], close=[]) == warm.NOT_FORKED
    assert os.read(reader, 1) == b""  # what the agent takes for the unit's end
    os.close(reader)
    assert "cannot start a process" in capsys.readouterr().err


@pytest.fixture
def childless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a launcher run in pytest's own process, without a child to end."""
    monkeypatch.setattr(launch, "adopt_orphans", lambda: None)
    monkeypatch.setattr(launch, "reap", dict)
    monkeypatch.setattr(launch, "kill_all", lambda **_limit: None)


def test_the_agent_hears_that_the_host_has_no_processes_left(childless, tmp_path, monkeypatch) -> None:
    launcher = Launcher()
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(launcher, "_warm_socket", lambda: ours)
    theirs.sendall(warm.PID.pack(warm.NOT_FORKED))
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(HostExhausted, match="no processes left"):
        launcher.start(Request("benchmark", {}, {}, str(tmp_path)), "fork", [])
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    ours.close()
    theirs.close()
    launcher.close()
