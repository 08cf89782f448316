"""A database whose file or disk is gone, broken or full: not ready, nothing accepted, and the reason said."""

import contextlib
import fcntl
from pathlib import Path
from typing import Any

import pytest

from app.store.database.engine import Database
from app.store.database.sqlite import SQLite, driver
from tests.app.conftest import TINY
from tests.disks import small_disk
from tools.waiting import wait_until


def refusals(site: Any, status: int, code: str, *, hint: str) -> list[str]:
    """What else than this problem a readiness check and a submission are answered."""
    found = []
    for method, path, body in [("GET", "/readyz", None), ("POST", "/jobs", {"spec": TINY})]:
        answer = site.http.request(method, path, json=body)
        if (answer.status_code, answer.json().get("code")) != (status, code) or hint not in answer.text:
            found.append(f"{method} {path}: {answer.status_code} {answer.text}")
    if (alive := site.http.get("/healthz").status_code) != 200:
        found.append(f"GET /healthz: {alive}")
    return found


def remove_the_database(site: Any) -> list[str]:
    site.submit()
    path = Path(site.services.database.backend.path)
    for file in path.parent.glob(f"{path.name}*"):
        if not file.name.endswith(".lock"):
            file.unlink()
    return refusals(site, 503, "database_gone", hint=str(path)) + [f"made {path}"] * path.exists()


def test_a_removed_database(fresh_site: Any) -> None:
    assert remove_the_database(fresh_site) == []


def test_control_of_the_removed_database(fresh_site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SQLite, "_check_file", lambda _self: None)
    found = remove_the_database(fresh_site)
    assert any(line.startswith("GET /readyz: 200") for line in found)
    assert any(line.startswith("POST /jobs: 201") for line in found), "accepted, and lost with the process"


def test_a_replaced_database_and_one_put_back(fresh_site: Any) -> None:
    job = fresh_site.submit()
    path = Path(fresh_site.services.database.backend.path)
    aside = path.with_name("aside")
    path.rename(aside)
    assert refusals(fresh_site, 503, "database_gone", hint="removed or replaced") == []
    other = Database(f"sqlite:///{path}")
    with other.read():
        pass
    other.close()
    assert path.exists()
    assert refusals(fresh_site, 503, "database_gone", hint="removed or replaced") == []
    aside.rename(path)
    assert fresh_site.http.get("/readyz").status_code == 200
    assert fresh_site.submit()["id"] == job["id"] + 1


def test_a_damaged_database(fresh_site: Any) -> None:
    path = Path(fresh_site.services.database.backend.path)
    with path.open("r+b") as file:
        file.write(b"x" * path.stat().st_size)
    assert refusals(fresh_site, 503, "storage_failed", hint="damaged") == []


@pytest.mark.parametrize("has_inodes", [False, True])
def test_without_inodes_for_files_it_is_not_ready(serve: Any, tmp_path: Path, *, has_inodes: bool) -> None:
    """Also where the database is on another disk."""
    with serve(tmp_path / "data") as site, small_disk(site.services.settings.artifacts_dir, "nr_inodes=50") as disk:
        if not has_inodes:
            with contextlib.suppress(OSError):
                for number in range(50):
                    (disk / str(number)).touch()
        answer = site.http.get("/readyz")
        assert answer.status_code == (200 if has_inodes else 507)
        assert has_inodes or (answer.json()["code"] == "disk_full" and str(disk) in answer.json()["detail"])


def test_a_readiness_check_changes_nothing(serve: Any, tmp_path: Path) -> None:
    with serve(tmp_path, busy_timeout_s=600) as site:  # far longer than the client waits for an answer
        before = site.rows()
        with site.services.database.write():
            assert site.http.get("/readyz").status_code == 200, "somebody writes: that is no fault"
        with contextlib.closing(driver().connect(str(site.services.database.backend.path))) as foreign:
            foreign.execute("BEGIN IMMEDIATE")
            assert site.http.get("/readyz").status_code == 200, "a program that is not ours, too"
        assert site.http.get("/readyz").status_code == 200
        assert site.rows() == before


@pytest.mark.parametrize("holder", ["ours", "another program's"])
def test_a_lock_held_for_good_is_not_ready(serve: Any, tmp_path: Path, holder: str) -> None:
    with serve(tmp_path, busy_timeout_s=0.5) as site, contextlib.ExitStack() as held:
        path = site.services.database.backend.path
        if holder == "ours":
            file = held.enter_context(open(f"{path}.lock", "r+"))  # noqa: PTH123
            fcntl.flock(file, fcntl.LOCK_EX)
        else:
            held.enter_context(contextlib.closing(driver().connect(str(path)))).execute("BEGIN IMMEDIATE")
        assert site.http.post("/jobs", json={"spec": TINY}).status_code == 503
        answer = wait_until(lambda: (found := site.http.get("/readyz")).status_code != 200 and found, "not ready")
        assert (answer.status_code, answer.json()["code"]) == (503, "database_busy")
        assert "Writes have been refused for " in answer.json()["detail"]
        held.close()
        assert site.http.get("/readyz").status_code == 200
        site.submit()


def test_a_readiness_check_writes(fresh_site: Any) -> None:
    watch = fresh_site.services.database.watch()
    watch.changed()
    assert not watch.changed()
    assert fresh_site.http.get("/readyz").status_code == 200
    assert watch.changed()
