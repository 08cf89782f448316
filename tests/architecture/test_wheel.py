"""A built wheel is complete: the service runs from it, outside the checkout."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

PACKAGES = ("app", "kernels", "migrations", "parallel", "workers")

SERVE_A_JOB = """
import json, sys
from pathlib import Path
import app, kernels, migrations, parallel, workers
from app.main import create_app
from app.settings import Settings
from fastapi.testclient import TestClient

folder = Path(sys.argv[1])
with TestClient(create_app(Settings(data_dir=folder)), base_url="http://localhost") as client:
    answers = {path: client.get(path) for path in ("/healthz", "/ui", "/docs", "/specs")}
    answers["POST /jobs"] = client.post("/jobs", json={"spec": {"kind": "benchmark"}})
    print(json.dumps({
        "files": [module.__file__ for module in (app, kernels, migrations, parallel, workers)],
        "statuses": {path: answer.status_code for path, answer in answers.items()},
    }))
"""


@pytest.fixture(scope="module")
def wheel(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the checkout. The build backend is one of the development tools, so nothing is downloaded."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    built = subprocess.run(
        [*pip, "wheel", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(root)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (found,) = folder.glob("*.whl")
    return found


def test_the_wheel_has_every_file_of_the_packages(wheel: Path, root: Path, sources: list[Path]) -> None:
    expected = {path.relative_to(root).as_posix() for path in sources if path.relative_to(root).parts[0] in PACKAGES}
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert packed == expected
    for needed in (
        "migrations/versions/*.py",
        "app/web/*/*.html",
        "app/web/static/*.css",
        "kernels/attention/cpu/source/*.cpp",
    ):
        assert any(Path(name).match(needed) for name in packed), needed


def test_the_service_runs_from_the_wheel(wheel: Path, tmp_path: Path, run_python: Callable[..., str]) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    answer = json.loads(run_python(SERVE_A_JOB, str(tmp_path / "data"), folder=tmp_path, PYTHONPATH=str(site)))
    assert all(Path(file).is_relative_to(site) for file in answer["files"])
    assert answer["statuses"] == {"/healthz": 200, "/ui": 200, "/docs": 200, "/specs": 200, "POST /jobs": 201}
