"""A client that openapi-python-client generates from /openapi.json submits a job and reads its results."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.conftest import Site

GENERATOR = ["openapi-python-client==0.29.*", "typer==0.27.*", "ruamel.yaml>=0.18,<0.20", "attrs>=25,<27"]
"""It needs an older typer than we do, so it gets a folder of its own."""


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which the generator was installed; skips where there is no package index."""
    folder = tmp_path_factory.mktemp("generator")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *GENERATOR]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"openapi-python-client cannot be installed here: {done.stderr[-300:]}")
    return folder


@pytest.fixture
def api(site: Site, generator: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that imports a module of the generated package."""
    document = tmp_path / "openapi.json"
    document.write_text(json.dumps(site.client.get("/openapi.json").raise_for_status().json()))
    package = tmp_path / "generated_flopwatch"
    program = "from openapi_python_client.cli import app; app()"
    options = ["--meta", "none", "--output-path", str(package), "--fail-on-warning"]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # it formats by ruff
    done = subprocess.run(
        [sys.executable, "-c", program, "generate", "--path", str(document), *options],
        env={**os.environ, "PATH": path, "PYTHONPATH": str(generator)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # At the end: the generated client needs attrs from there, and our own programs a newer typer than that one.
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path), str(generator)])
    yield lambda name: importlib.import_module(f"generated_flopwatch.{name}")
    for name in [name for name in sys.modules if name.partition(".")[0] == "generated_flopwatch"]:
        del sys.modules[name]


@pytest.mark.long
def test_a_generated_client_submits_a_job_and_reads_its_table(site: Site, api: Any) -> None:
    client = api("client").Client(base_url=str(site.client.base_url))
    models = api("models")
    body = models.JobBody(spec=models.EstimateSpec(kind="estimate"), name="generated")
    job = api("api.jobs.submit_job").sync(client=client, body=body, prefer="wait=30")
    assert isinstance(job, models.Job)
    assert (job.kind, job.state, job.name) == ("estimate", "succeeded", "generated")
    assert api("api.jobs.get_job").sync(job.id, client=client).finished_at > job.created_at, "times are datetimes"
    sheet = api("api.results.get_table").sync(client=client, job=[job.id])
    (row,) = sheet.rows
    assert row["model"] == "small"
    text = client.get_httpx_client().get("/tables", params={"job": job.id}, headers={"Accept": "text/csv"}).text
    assert text.startswith("model,")
    problem = api("api.jobs.get_job").sync("999999", client=client)
    assert isinstance(problem, models.Problem)
    assert problem.code == "not_found"
    page = api("api.jobs.list_jobs").sync(client=client, limit=1)
    assert [one.id for one in page.data] == [job.id]
    client.get_httpx_client().close()
