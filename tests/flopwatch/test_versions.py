"""Versions of one's own code: files, folders and revisions."""

from __future__ import annotations

import io
import subprocess
import zipfile
from pathlib import Path

import pytest

from flopwatch.own_code import OwnCode

OLD, NEW = "def attention():\n    return 1\n", "def attention():\n    return 2\n"


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *identity, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit, on branch main, and a change of it that is not committed; the current folder."""
    git(tmp_path, "init", "--quiet", "--initial-branch=main")
    (tmp_path / "code").mkdir()
    path = tmp_path / "code" / "mine.py"
    path.write_text(OLD)
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message=first")
    path.write_text(NEW)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_revisions_and_the_working_tree(repository: Path) -> None:
    commit = git(repository, "rev-parse", "HEAD")
    old, new = (OwnCode.of_version(version, "code/mine.py:attention") for version in ("main", "."))
    assert (old.content.decode(), new.content.decode()) == (OLD, NEW)
    assert old.as_field()["revision"] == {"label": "main", "commit": commit, "dirty": False}
    changes = {"dirty": True, "diff": "1 file changed, 1 insertion(+), 1 deletion(-)"}
    assert new.as_field()["revision"] == {"label": ".", "commit": commit, **changes}
    assert old.as_field()["file"] == new.as_field()["file"] == "mine.py"
    assert OwnCode.read("code/mine.py:attention").as_field()["revision"] == {"commit": commit, **changes}


def test_files_and_folders(tmp_path: Path) -> None:
    for name, source in (("old", OLD), ("new", NEW)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(source)
    folder, file = (
        OwnCode.of_version(str(path), "mine.py:attention") for path in (tmp_path / "old", tmp_path / "new" / "mine.py")
    )
    assert (folder.content.decode(), file.content.decode()) == (OLD, NEW)


def test_a_folder_goes_along(repository: Path) -> None:
    named, folder = "code/mine.py:attention", Path("code")
    versions = [OwnCode.of_version("main", named, folder), OwnCode.of_version(".", named, folder)]
    sources = []
    for version in versions:
        with zipfile.ZipFile(io.BytesIO(version.content)) as packed:
            sources.append(packed.read("mine.py").decode())
    assert sources == [OLD, NEW]
    assert [version.as_field()["file"] for version in versions] == ["mine.py", "mine.py"]


@pytest.mark.parametrize(
    ("version", "named", "words"),
    [
        ("no-such", "code/mine.py:attention", "no git revision"),
        ("main", "code/other.py:attention", "revision main has no code/other.py"),
        ("main", "code/mine.py:other", "defines no 'other'"),
        (".", "code/other.py:attention", "No such file"),
    ],
)
def test_what_a_version_lacks_is_named(repository: Path, version: str, named: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        OwnCode.of_version(version, named)
