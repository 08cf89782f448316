"""Packing a project's folder: what goes along, and that equal contents are equal bytes."""

import io
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest

from flopwatch import packing
from flopwatch.own_code import ROLE, OwnCode, put_into
from flopwatch.packing import pack
from tests.flopwatch.test_versions import git


@pytest.fixture
def project(tmp_path: Path) -> Path:
    project = tmp_path / "project"
    (project / "inner/__pycache__").mkdir(parents=True)
    (project / "train.py").write_text("from inner.model import make\n\n\ndef make_step(device):\n    return make\n")
    (project / "inner/model.py").write_text("def make():\n    pass\n")
    (project / "inner/__pycache__/model.pyc").write_bytes(b"compiled")
    (project / ".secret").write_text("token")
    (project / "link.py").symlink_to("/etc/hostname")
    return project


def names(packed: bytes) -> list[str]:
    with zipfile.ZipFile(io.BytesIO(packed)) as archive:
        return archive.namelist()


def test_without_git_all_but_hidden_files_go_along(project: Path) -> None:
    packed = pack(project, project / "train.py")
    assert names(packed) == ["inner/model.py", "train.py"]
    with zipfile.ZipFile(io.BytesIO(packed)) as archive:
        assert archive.comment == b"train.py"


def test_links_to_links_go_along_and_one_to_itself_does_not(project: Path) -> None:
    for link, target in (("latest", "second"), ("second", "inner"), ("loop", "loop")):
        (project / link).symlink_to(target)
    along = ["inner/model.py", "latest/model.py", "second/model.py", "train.py"]
    assert names(pack(project, project / "train.py")) == along


def test_of_a_repository_go_tracked_files_with_their_present_content(project: Path) -> None:
    git(project, "init", "-q")
    git(project, "add", "train.py", "inner/model.py", "link.py")
    git(project, "commit", "-qm", "first")
    (project / "scratch.py").write_text("not tracked")
    (project / "inner/model.py").write_text("changed = 1\n")
    packed = pack(project, project / "train.py")
    assert names(packed) == ["inner/model.py", "train.py"]
    with zipfile.ZipFile(io.BytesIO(packed)) as archive:
        assert archive.read("inner/model.py") == b"changed = 1\n"
    with pytest.raises(ValueError, match="git add"):
        pack(project, project / "scratch.py")


def test_an_untracked_file_that_the_code_would_import_is_refused(project: Path) -> None:
    (project / "train.py").write_text("try:\n    import fast, made\nexcept ImportError:\n    pass\nmake_step = print\n")
    for name in ("fast.py", "made.py", "scratch.py"):
        (project / name).write_text("")
    named = f"{project}/train.py:make_step"
    assert OwnCode.read(named, project).name == "train.py"
    git(project, "init", "-q")
    (project / ".gitignore").write_text("made.py\n")
    git(project, "add", "train.py")
    with pytest.raises(ValueError, match=r"imports fast\.py, which git does not track"):
        OwnCode.read(named, project)
    git(project, "add", "fast.py")
    assert names(OwnCode.read(named, project).content) == ["fast.py", "train.py"]


def test_equal_contents_are_equal_bytes_and_others_are_not(project: Path) -> None:
    first = pack(project, project / "train.py")
    os.utime(project / "train.py", (1, 1))
    (project / "train.py").chmod(0o600)
    assert pack(project, project / "train.py") == first
    assert pack(project, project / "inner/model.py") != first
    (project / "inner/model.py").write_text("def make():\n    return 1\n")
    assert pack(project, project / "train.py") != first


def test_a_file_outside_of_the_folder_is_refused(project: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    with pytest.raises(ValueError, match="is not in the folder"):
        pack(project, tmp_path / "train.py")


def test_a_folder_that_is_too_large_or_not_there_is_refused(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "data.bin").write_bytes(bytes(3 << 20))
    monkeypatch.setattr(packing, "MAX_BYTES", 2 << 20)
    with pytest.raises(ValueError, match=r"3 files of 3 MiB .* at most 10000 of 2 MiB .* data\.bin, of 3 MiB"):
        pack(project, project / "train.py")
    with pytest.raises(ValueError, match="there is no such folder"):
        pack(project / "none", project / "train.py")


def test_a_folder_alone_names_no_code(project: Path) -> None:
    with pytest.raises(ValueError, match="--code goes along with --step"):
        put_into({"kind": "benchmark"}, [], {}, project)


@pytest.mark.parametrize(
    ("option", "role", "held"),
    [("step", "step_code", {}), ("model", "code", {}), ("step", "step_code", {"step_code": {"function": "former"}})],
)
def test_both_sides_of_a_comparison_get_a_step_and_the_candidate_other_code(project, option, role, held) -> None:
    schemas = [{"kind": "benchmark", "schema": {"properties": {role: {ROLE: option}}}}]
    before, after = {"kind": "benchmark", **held}, {"kind": "benchmark"}
    spec: dict[str, Any] = {"kind": "compare", "baseline": before.copy(), "candidate": after.copy()}
    (code,) = put_into(spec, schemas, {option: f"{project / 'train.py'}:{'make_step' if option == 'step' else 'make'}"})
    assert spec["candidate"] == {**after, role: code.as_field()}
    assert spec["baseline"] == (spec["candidate"] if option == "step" and not held else before)
