"""A built wheel is complete: the service runs from it, outside the checkout."""

import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from flopwatch import Flopwatch
from tests.acceptance.test_names import ENTRANCES, check_entrance
from tests.acceptance.test_names import PROJECT as NAMED
from tools.service import Service

INSIDE = ("app", "kernels", "migrations", "parallel", "workers")
"""Packages that the wheel has as folders of `flopwatch`."""

HIDE_THE_EXTRA = """
import importlib.machinery
find_spec = importlib.machinery.PathFinder.find_spec
hidden = {"torch", "psutil", "pynvml", "ninja", "triton"}
importlib.machinery.PathFinder.find_spec = lambda name, *rest: None if name in hidden else find_spec(name, *rest)
"""

SERVE_A_JOB = """
import json, sys
from pathlib import Path
import flopwatch, flopwatch.app, flopwatch.kernels, flopwatch.migrations, flopwatch.parallel, flopwatch.workers
from flopwatch.app.main import create_app
from flopwatch.app.settings import Settings
from fastapi.testclient import TestClient

folder = Path(sys.argv[1])
with TestClient(create_app(Settings(data_dir=folder)), base_url="http://localhost") as client:
    answers = {path: client.get(path) for path in ("/healthz", "/ui", "/docs", "/specs")}
    answers["POST /jobs"] = client.post("/jobs", json={"spec": {"kind": "benchmark"}})
    print(json.dumps({
        "files": [module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "flopwatch"],
        "short": [name for name in ("app", "kernels", "migrations", "parallel", "workers") if name in sys.modules],
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
    files = [path.relative_to(root) for path in sources]
    expected = {file.as_posix() for file in files if file.parts[0] == "flopwatch"}
    expected |= {f"flopwatch/{file.as_posix()}" for file in files if file.parts[0] in INSIDE}
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert packed == expected, "tools, tests and benchmarks stay out"


def test_the_wheel_has_its_licences(wheel: Path, root: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        (licence,) = [name for name in archive.namelist() if name.endswith(".dist-info/licenses/LICENSE")]
        assert archive.read(licence) == (root / "LICENSE").read_bytes()
        about = archive.read(metadata).decode()
        assert "\nLicense-Expression: Apache-2.0 AND 0BSD AND MIT\n" in about
        assert {"Classifier: Typing :: Typed", "Classifier: Programming Language :: Python :: 3.11"} <= {
            *about.split("\n")
        }
        vendored = {path.relative_to(root).as_posix() for path in (root / "app/web/static/vendor").glob("*/LICENSE")}
        assert len(vendored) == 4
        assert all(f"\nLicense-File: {name}\n" in about for name in vendored)
        assert "flopwatch/py.typed" in archive.namelist()
    assert "END OF TERMS AND CONDITIONS" in (root / "LICENSE").read_text()


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which pip has installed the wheel."""
    folder = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet"]
    subprocess.run([*pip, "--no-index", "--no-deps", "--target", str(folder), str(wheel)], check=True, timeout=120)
    return folder


@pytest.mark.long
def test_the_command_runs_in_a_project_with_our_names(site: Path) -> None:
    def printed(*command: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(site)}
        done = subprocess.run(command, cwd=NAMED, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "submit" in printed(str(site / "bin" / "flopwatch"), "--help")
    assert "submit" in printed(sys.executable, "-P", "-m", "flopwatch", "--help")
    by_itself = printed(sys.executable, "script.py")
    assert "the project's own; modules in sight of Flopwatch: []" in by_itself
    assert "step: " in by_itself


class InstalledService(Service):
    """A service that runs from a folder with the wheel."""

    def __init__(self, folder: Path, site: Path) -> None:
        super().__init__(folder, {"PYTHONPATH": str(site), "FLOPWATCH_ALLOW_CODE": "true"})
        self._start = site / "flopwatch" / "start.py"

    def launch(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        with log.open("wb") as output:
            return subprocess.Popen(
                [sys.executable, "-P", str(self._start), *arguments],
                cwd=NAMED,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )


@pytest.mark.long
def test_the_wheel_measures_the_users_own(site: Path, tmp_path: Path) -> None:
    """Each entrance of tests/acceptance/test_names.py, through an installed server and worker."""
    with InstalledService(tmp_path, site) as service:
        service.start_server()
        service.start_worker()
        with Flopwatch(service.url) as client:
            for entrance in ENTRANCES:
                check_entrance(client, entrance, timeout_s=600)


def test_the_wheel_runs_without_torch(wheel: Path, tmp_path: Path) -> None:
    """The server imports only packages that it declares: none of the extra's can be found here."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        requirements = re.findall(r"^Requires-Dist: ([\w-]+).*", archive.read(metadata).decode(), flags=re.MULTILINE)
    assert {"torch", "psutil", "nvidia-ml-py"} <= set(requirements)
    server = run_without_the_extra(SERVE_A_JOB, str(tmp_path / "data"), folder=tmp_path)
    assert server.returncode == 0, server.stderr
    answer = json.loads(server.stdout)
    assert all(Path(file).is_relative_to(tmp_path) for file in answer["files"])
    assert answer["short"] == []
    assert answer["statuses"] == {"/healthz": 200, "/ui": 200, "/docs": 200, "/specs": 200, "POST /jobs": 201}
    worker = run_without_the_extra("from flopwatch.start import run; run('workers', 'agent')", folder=tmp_path)
    assert worker.returncode == 1
    assert worker.stderr.splitlines() == [
        "flopwatch: a worker needs torch, psutil, pynvml, too: install flopwatch[worker]"
    ]


def run_without_the_extra(code: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run code as on a host with nothing of flopwatch[worker]."""
    return subprocess.run(
        [sys.executable, "-c", f"{HIDE_THE_EXTRA}\n{code}", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
