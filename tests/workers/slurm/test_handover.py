"""The files by which claims reach their allocations."""

import stat
from pathlib import Path

import pytest

from app.errors import CannotRunHere
from app.store.records import Claim, HandedOver
from workers.slurm import handover
from workers.slurm.handover import HandOver, HandOverFolder, mark_of

CLAIM = Claim(7, 2, "secret", 1, "worker", "benchmark", None, {}, None, "cpu", 1, False)


@pytest.fixture
def folder(tmp_path: Path) -> HandOverFolder:
    return HandOverFolder(tmp_path / "handover")


def test_a_claim_reaches_its_allocation_for_its_owners_eyes_only(folder: HandOverFolder) -> None:
    file = folder.write(CLAIM, 3)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert handover.read(file) == HandOver(HandedOver(7, 2, "secret"), 3, "cpu", 1, False)
    assert "secret" not in str(file)
    assert folder.is_waiting(mark_of("secret"))
    file.rename(handover.taken(file))
    assert not folder.is_waiting(mark_of("secret"))
    assert handover.read(file) == HandOver(HandedOver(7, 2, "secret"), 3, "cpu", 1, False)


@pytest.mark.parametrize("text", [None, "", "{}", '{"job": "x", "attempt": 1, "token": "t", "nodes": 1}'])
def test_what_is_no_hand_over_file_is_told(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "file.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(CannotRunHere, match="is gone" if text is None else "is no hand-over file"):
        handover.read(file)


def test_a_folder_is_one_workers(folder: HandOverFolder) -> None:
    with pytest.raises(CannotRunHere, match="Another worker uses"):
        HandOverFolder(folder.path)
    folder.close()
    HandOverFolder(folder.path).close()


def test_a_folder_that_others_could_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)  # whatever the umask is
    with pytest.raises(CannotRunHere, match="chmod 700"):
        HandOverFolder(tmp_path / "open")


def test_tidying_keeps_what_is_needed(folder: HandOverFolder) -> None:
    file = folder.write(CLAIM, 1)
    (folder.path / "0123.log").write_text("old")
    folder.tidy({mark_of("secret")})
    assert sorted(path.name for path in folder.path.iterdir()) == sorted([file.name, handover.LOCK])
