"""The folder of a unit: its size, and that nothing of it stays."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from workers.working_directory import bytes_below, enter_empty

LOCKED = """
import os, sys
from pathlib import Path
from workers.working_directory import remove

os.chdir(sys.argv[1])
os.setegid(65534)
os.seteuid(65534)
folder, elsewhere = Path("folder"), Path("elsewhere")
(folder / "deep" / "deeper").mkdir(parents=True)
(folder / "deep" / "deeper" / "file").touch()
elsewhere.mkdir()
elsewhere.chmod(0o500)
(folder / "deep" / "link").symlink_to(elsewhere.absolute())
(folder / "deep" / "deeper").chmod(0)
(folder / "deep").chmod(0o500)
remove(folder)
print(folder.exists(), oct(elsewhere.stat().st_mode & 0o777))
"""


def test_the_folder_is_empty_and_entered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    enter_empty(tmp_path)
    assert list(Path().iterdir()) == []
    assert subprocess.check_output("pwd; echo $PWD", shell=True, text=True).split() == [str(Path.cwd())] * 2
    assert Path.cwd().parent == tmp_path


def test_the_size_is_what_the_files_take(tmp_path: Path) -> None:
    (tmp_path / "folder" / "deep").mkdir(parents=True)
    (tmp_path / "outside").write_bytes(b"x" * 1_000_000)
    (tmp_path / "folder" / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "folder" / "deep" / "file").write_bytes(b"x" * 100_000)
    with (tmp_path / "folder" / "sparse").open("wb") as file:
        file.truncate(1 << 30)
    assert 100_000 <= bytes_below(tmp_path / "folder") < 200_000
    assert bytes_below(tmp_path / "not there") == 0


@pytest.mark.skipif(os.getuid() != 0, reason="only root can run something as another user")
def test_folders_that_a_job_has_locked_go_and_nothing_outside_is_touched() -> None:
    """As another user, since nothing is locked for root."""
    place = Path(tempfile.mkdtemp(prefix="locked-"))
    try:
        place.chmod(0o777)
        done = subprocess.run(
            [sys.executable, "-c", LOCKED, str(place)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout.split() == ["False", "0o500"], done.stderr
    finally:
        shutil.rmtree(place)
