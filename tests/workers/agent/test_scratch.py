"""Which scratch folders an agent removes when it starts: those of dead agents, whatever their pids were."""

import subprocess
import sys
from pathlib import Path

import pytest

from app.errors import CannotRunHere
from workers.agent.scratch import Scratch

OTHER = """
import sys
from pathlib import Path
from workers.agent.scratch import Scratch

folder = Scratch(Path(sys.argv[1])).path
(folder / "file").touch()
print(folder, flush=True)
sys.stdin.read()
"""


def test_files_of_killed_agents_go(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OTHER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        theirs = Path(other.stdout.readline().strip())
        mine = Scratch(tmp_path)
        mine.remove_those_of_dead_agents()
        assert (theirs / "file").exists()
        assert mine.path.exists()
        other.kill()
    assert theirs.exists()
    mine.remove_those_of_dead_agents()
    assert list(tmp_path.iterdir()) == [mine.path]
    mine.close()
    assert list(tmp_path.iterdir()) == []


def test_what_no_agent_has_made_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "scratch" / "mine").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "scratch" / ("a" * 16)).symlink_to(tmp_path / "elsewhere")
    (tmp_path / "scratch" / ("b" * 16)).touch()
    before = sorted((tmp_path / "scratch").iterdir())
    mine = Scratch(tmp_path / "scratch")
    mine.remove_those_of_dead_agents()
    mine.close()
    assert sorted((tmp_path / "scratch").iterdir()) == before
    assert (tmp_path / "elsewhere").exists()


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "scratch").touch()
    with pytest.raises(CannotRunHere, match="scratch, the folder for the files of running jobs, cannot be used"):
        Scratch(tmp_path / "scratch")
