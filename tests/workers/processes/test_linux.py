"""What a keeper does to the processes below it."""

import subprocess
from pathlib import Path

from workers.processes.linux import ask_for_stacks


def test_a_process_whose_name_is_cut_within_a_character_is_not_asked_for_stacks(tmp_path: Path) -> None:
    """Linux keeps 15 bytes of an executable's name."""
    (tmp_path / "aaaaaaaaaaaaaaä").symlink_to("/bin/sleep")
    with subprocess.Popen(["sleep", "3600"], executable=tmp_path / "aaaaaaaaaaaaaaä") as process:
        try:
            assert ask_for_stacks() == 0
            assert Path(f"/proc/{process.pid}/comm").read_bytes() == b"a" * 14 + b"\xc3\n"
        finally:
            process.kill()
