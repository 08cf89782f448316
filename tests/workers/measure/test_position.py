"""The step that a process is in, which outlives it."""

import os
from pathlib import Path

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
