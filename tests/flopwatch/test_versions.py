"""Versions of one's own code: files, folders and revisions."""

import io
import subprocess
import zipfile
from pathlib import Path

import pytest

from flopwatch.own_code import ROLE, ROLES, OwnCode, put_into

OLD, NEW = "def attention(*inputs):\n    return 1\n", "def attention(*inputs):\n    return 2\n"


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


def test_a_file_stands_in_for_the_file_that_is_named(tmp_path: Path) -> None:
    (tmp_path / "before.py").write_text(OLD)
    old = OwnCode.of_version(str(tmp_path / "before.py"), "code/mine.py:attention")
    assert (old.content.decode(), old.name) == (OLD, "mine.py")
    with pytest.raises(ValueError, match="--code goes along with folders and revisions"):
        OwnCode.of_version(str(tmp_path / "before.py"), "code/mine.py:attention", Path("code"))


def test_a_clean_folder_and_its_revision_are_the_same_bytes(repository: Path) -> None:
    for name, content in ((".hidden", "tracked"), ("other.py", OLD), ("inner/data.txt", "1")):
        (repository / "code" / name).parent.mkdir(exist_ok=True)
        (repository / "code" / name).write_text(content)
    (repository / "code" / "link.py").symlink_to("other.py")
    (repository / "code" / "inner" / "linked").symlink_to("../lib")
    (repository / ".gitattributes").write_text("other.py export-ignore\n")
    git(repository, "init", "--quiet", "library")
    (repository / "library" / "size.py").write_text(OLD)
    git(repository / "library", "add", ".")
    git(repository / "library", "commit", "--quiet", "--message=of the submodule")
    git(repository, *["-c", "protocol.file.allow=always", "submodule", "--quiet", "add", "./library", "code/lib"])
    git(repository, "add", "code", ".gitattributes")
    git(repository, "commit", "--quiet", "--message=second")
    (repository / "code" / "not_tracked.py").write_text(NEW)
    named, folder = "code/mine.py:attention", Path("code")
    clean, main = (OwnCode.of_version(version, named, folder) for version in (".", "main"))
    assert clean.sha256 == main.sha256
    with zipfile.ZipFile(io.BytesIO(main.content)) as archive:
        files = {name: archive.read(name).decode() for name in archive.namelist()}
    own = dict.fromkeys(("other.py", "link.py", "lib/size.py", "inner/linked/size.py"), OLD)
    assert files == {".hidden": "tracked", "inner/data.txt": "1", "mine.py": NEW, **own}
    assert clean.as_field()["revision"]["dirty"] is False
    (repository / "code" / "other.py").write_text(NEW)
    edited = OwnCode.read(named, folder)
    assert edited.sha256 != main.sha256
    assert edited.as_field()["revision"]["diff"] == "1 file changed, 1 insertion(+), 1 deletion(-)"


def test_an_absolute_path_is_of_no_other_version(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    named = f"{repository}/code/mine.py:attention"
    assert OwnCode.of_version(".", named).content.decode() == NEW
    with pytest.raises(ValueError, match="an absolute path outside of it"):
        OwnCode.of_version(str(tmp_path_factory.mktemp("other")), named)


def test_a_file_that_git_does_not_track_has_no_revision(repository: Path) -> None:
    (repository / "code" / "new.py").write_text(NEW)
    assert "revision" not in OwnCode.read("code/new.py:attention").as_field()


@pytest.mark.parametrize(
    ("version", "named", "words"),
    [
        ("no-such", "code/mine.py:attention", r"no git revision of the folder of code/mine\.py$"),
        ("main", "code/other.py:attention", "revision main has no code/other.py"),
        ("main", "code/mine.py:other", "defines no 'other'"),
        (".", "code/other.py:attention", "No such file"),
    ],
)
def test_what_a_version_lacks_is_named(repository: Path, version: str, named: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        OwnCode.of_version(version, named)


@pytest.mark.parametrize(("option", "role"), [(option, role) for option, roles in ROLES.items() for role in roles])
def test_each_option_may_name_the_code_of_either_side(repository: Path, option: str, role: str) -> None:
    specs = [{"kind": "benchmark", "schema": {"properties": {"own": {ROLE: role}}}}]
    (repository / "before.py").write_text(OLD)
    for version, name in (("main", "code/mine.py"), ("before.py", "any.py"), ("code", "mine.py")):
        spec = {"kind": "benchmark"}
        (code,) = put_into(spec, specs, {option: f"{name}:attention"}, version=version)
        assert code.content.decode() == (NEW if version == "code" else OLD)
        assert spec == {"kind": "benchmark", "own": code.as_field()}
