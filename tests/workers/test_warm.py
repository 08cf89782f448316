from __future__ import annotations

import errno
import os

import pytest

from workers import warm


def test_a_fork_that_fails_is_only_its_own_unit_s_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fork() -> int:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", fork)
    reader, writer = os.pipe()
    assert warm._fork_keeper([writer], close=[]) == warm.NOT_FORKED
    assert os.read(reader, 1) == b""  # what the agent takes for the unit's end
    os.close(reader)
    assert "cannot start a process" in capsys.readouterr().err
