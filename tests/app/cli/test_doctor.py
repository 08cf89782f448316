"""`flopwatch doctor` on this host as it is, and with planted faults: it names each, and its cure."""

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from app import importing
from app.cli.commands import cli
from app.settings import Settings
from app.store import checking
from app.store.database.file_systems import refuse_network_file_system
from flopwatch.packages import START
from tests.app.cli.conftest import PROJECT
from tests.databases import put_database
from tests.disks import small_disk
from workers import doctor

Findings = dict[str, dict[str, str]]
NO_WORKER = "raise SystemExit('not asked')"
"""A program that does not start, for tests of what the service needs: to import torch takes seconds."""


def found_in(code: int, output: str, errors: str) -> Findings:
    """Return the findings by name, of several the broken one."""
    assert code in (0, 1), errors
    told = json.loads(output)
    assert told["ok"] == (code == 0)
    findings: Findings = {}
    for one in told["findings"]:
        if one["name"] not in findings or findings[one["name"]]["state"] != "broken":
            findings[one["name"]] = one
    return findings


@pytest.fixture
def examine(tmp_path: Path) -> Callable[..., tuple[int, Findings]]:
    """Run the real command; returns its exit code and its findings."""

    def run(*first_on_path: Path, **environment: str) -> tuple[int, Findings]:
        path = os.pathsep.join(map(str, (*first_on_path, PROJECT)))
        settings = {"FLOPWATCH_DATA_DIR": str(tmp_path / "data"), "PYTHONPATH": path}
        done = subprocess.run(
            [sys.executable, "-P", START, "app.cli", "doctor", "--json"],
            env={**os.environ, **settings, **environment},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, found_in(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def examine_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, Findings]]:
    """Run the command in this process, which has imported it already, with a worker that does not start."""
    (tmp_path / "no_worker.py").write_text(NO_WORKER)
    monkeypatch.setattr(importing, "START", str(tmp_path / "no_worker.py"))
    settings = {"FLOPWATCH_DATA_DIR": str(tmp_path / "data")}

    def run(**environment: str) -> tuple[int, Findings]:
        done = CliRunner().invoke(cli, ["doctor", "--json"], env={**settings, **environment})
        return done.exit_code, found_in(done.exit_code, done.stdout, done.stderr)

    return run


def broken(findings: Findings) -> set[str]:
    return {name for name, one in findings.items() if one["state"] == "broken"}


def test_a_host_as_it_is_to_which_foreign_packages_do_no_harm(examine: Any, tmp_path: Path) -> None:
    """Also the control of the faults: without them nothing is found, and nothing is made in the data folder."""
    for name in ("app", "kernels", "workers"):
        (tmp_path / "other" / name).mkdir(parents=True)
        (tmp_path / "other" / name / "__init__.py").write_text("raise SystemExit('it was imported')")
    code, findings = examine(tmp_path / "other")
    assert (code, broken(findings)) == (0, set())
    expected = {"permissions", "disk", "database", "server", "worker", "compiler", "cuda", "nccl", "triton", "torchao"}
    assert expected | {"attention", "driver", "profilers"} <= set(findings)
    assert "cpu_flash" in findings["attention"]["found"]
    assert not (tmp_path / "data").exists()


def test_a_full_disk(examine_service: Any, tmp_path: Path) -> None:
    with small_disk(tmp_path / "data", "size=2m") as full:
        put_database(full)
        with pytest.raises(OSError, match="No space left"):
            (full / "big").write_bytes(bytes(4 << 20))
        code, findings = examine_service()
    assert (code, "disk" in broken(findings)) == (1, True)
    assert "cannot be written: No space left on device" in findings["disk"]["found"]
    assert "make room on that disk" in findings["disk"]["cure"]
    assert "make room on that disk" in findings["database"]["cure"]


def test_an_unreachable_database(examine_service: Any) -> None:
    code, findings = examine_service(FLOPWATCH_DATABASE_URL="postgresql+psycopg://me:secret@127.0.0.1:1/jobs")
    assert (code, broken(findings)) == (1, {"database", "worker"})
    assert "refused" in findings["database"]["found"]
    assert "start PostgreSQL, and check FLOPWATCH_DATABASE_URL" in findings["database"]["cure"]
    assert "secret" not in str(findings)
    assert "the check after 'its start' ended with exit code 1: not asked" in findings["worker"]["found"]


def test_a_postgresql_that_answers(examine_service: Any, postgres: Any) -> None:
    with postgres.database() as url:
        _, findings = examine_service(FLOPWATCH_DATABASE_URL=url.render_as_string(hide_password=False))
    assert findings["database"]["state"] == "works"
    assert "PostgreSQL " in findings["database"]["found"]
    assert findings["files"]["state"] == "works"


def test_settings_and_server(examine_service: Any, site: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, findings = examine_service(FLOPWATCH_PORT="none")
    assert "FLOPWATCH_PORT" in findings["settings"]["found"]
    put_database(tmp_path / "data")
    _, findings = examine_service(FLOPWATCH_URL=site.url)
    assert findings["server"]["state"] == "works"
    assert findings["database"]["found"].startswith("SQLite 3.")
    _, findings = examine_service(FLOPWATCH_URL="http://127.0.0.1:1")
    assert "flopwatch serve" in findings["server"]["cure"]
    assert "does not answer: " in findings["server"]["found"]
    other = httpx.Response(200, json="ok", request=httpx.Request("GET", site.url))
    monkeypatch.setattr(httpx, "get", lambda *_, **__: other)
    _, findings = examine_service(FLOPWATCH_URL=site.url)
    assert "does not answer as Flopwatch does" in findings["server"]["found"]


def test_a_kernel_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    tensors = [torch.ones(1, 2, 8, 8) for _ in range(3)]
    assert doctor._tried("eager", tensors, torch.ones(1, 2, 8, 8)) is None
    assert "eager is wrong: its largest error is 1" in doctor._tried("eager", tensors, torch.zeros(1, 2, 8, 8)).found


def test_a_network_file_system_is_a_fault_with_sqlite_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"server:/home {tmp_path} nfs4 rw 0 0\n")
    monkeypatch.setattr(checking, "refuse_network_file_system", partial(refuse_network_file_system, mount_table=mounts))

    def faults(**settings: Any) -> list[str]:
        return [one.name for one in checking.examine(Settings(data_dir=tmp_path, **settings)) if one.state == "broken"]

    assert faults() == ["disk"]
    assert faults(database_url="postgresql+psycopg://nobody@127.0.0.1:1/none") == ["database"]


@pytest.mark.parametrize(
    ("package", "version", "state"),
    [
        ("torch", "2.99.0+cu140", "absent"),
        ("triton", "99.0", "absent"),
        ("torch", "2.1.0", "broken"),
        ("fastapi", "99.0", "broken"),
    ],
)
def test_a_torch_that_is_newer_than_the_tests_is_a_note(package, version, state, monkeypatch) -> None:
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name == package else real(name))
    monkeypatch.setattr(
        importlib.metadata,
        "requires",
        lambda name, of=importlib.metadata.requires: of(name) if name == "flopwatch" else [],
    )
    found = {finding.name: finding for finding in doctor._requirements()}
    assert found[package].state == state
    assert ("is newer than the versions that Flopwatch was tested with" in found[package].found) == (state == "absent")
    assert f"pip install '{package}" in found[package].cure
    assert ("worker" in found) == (state == "absent"), "nothing else is said to be in order"
