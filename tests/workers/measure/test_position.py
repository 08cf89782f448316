"""The step that a process is in, which outlives it."""

import os
from math import inf, nan
from pathlib import Path
from struct import pack

import pytest

from workers.measure import position


def test_the_step_of_a_process_that_leaves_at_once_is_known(tmp_path: Path) -> None:
    file = tmp_path / "position"
    assert str(position.read(file)) == ""
    pid = os.fork()
    if not pid:
        position.keep(file)
        for number in (1, 2):
            position.step_begins(number)
            position.step_ends()
        position.step_begins(3)
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    found = position.read(file)
    assert (found.step, found.inside, str(found)) == (3, True, "in step 3")
    assert found.began_s > 0


@pytest.mark.parametrize(
    "kept", [b"", b"\0" * 7, b"\0" * 25, pack("3d", nan, 1, 1), pack("3d", inf, 1, 1), pack("3d", 4, 1, -inf)]
)
def test_what_is_no_position_is_before_any_step(tmp_path: Path, kept: bytes) -> None:
    """A process may die, or find the disk full, while it makes the file."""
    (tmp_path / "position").write_bytes(kept)
    assert position.read(tmp_path / "position") == position.Position(0, False, 0.0)


def test_words_between_steps() -> None:
    assert str(position.Position(2, False, 1.0)) == "after step 2"
