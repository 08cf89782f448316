"""schemathesis sends requests that /openapi.json allows, and some that it does not, to a real server."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.acceptance.conftest import environment
from tests.forked import ForkedService

pytest.importorskip("schemathesis", reason="pip install -e .[dev]")

SEED = 1
TOKEN = "the admin's"
NOT_EXPRESSED = {
    "/jobs/{job_id}/events": "the header Last-Event-ID may be left out, which is written as null",
    "/jobs": "DELETE needs one of four filters; times are written in several ways",
    "/jobs/cancel": "needs one of four filters",
    "/compare": "needs both sides, or a job that has them",
    "/history": "needs a case or a job",
    "/tables": "times are written in several ways",
    "/workers": "a cursor is a time and an id",
    "/sweeps": "needs a grid or a search, and a spec below its base",
    "/usage": "as for /tables",
    "/jobs/{job_id}/tables/{name}": "a column is renamed once",
    "/sweeps/{sweep_id}/tables/{name}": "as for a job's",
    "/jobs/{job_id}/plots/{name}": "each option is for some plots",
    "/sweeps/{sweep_id}/plots/{name}": "as for a job's",
    "/compare/plots/{name}": "as for a job's",
    "/files/{sha256}": "the path has the digest of the body",
}
"""Paths on which a request may fit the document and be refused: what they ask for has no expression there."""
PROGRAM = "from schemathesis.cli import schemathesis; schemathesis()"


@pytest.mark.long
@pytest.mark.parametrize("every_check", [True, False], ids=["answers", "valid requests are taken"])
def test_the_server_does_what_its_document_says(every_check: bool, tmp_path: Path) -> None:
    """No 500, no answer of another shape or media type; and, where the document can say it, no valid request is
    refused."""
    with ForkedService(tmp_path / "service", environment(tmp_path)) as service:
        client = service.start_server(FLOPWATCH_API_TOKEN=TOKEN)  # so that tokens that it makes shut nobody out
        document = str(client.base_url.join("/openapi.json"))
        command = [sys.executable, "-c", PROGRAM, "run", document, "--seed", str(SEED), "--max-examples", "1"]
        command += ["--header", f"Authorization: Bearer {TOKEN}", "--no-color"]
        if every_check:
            command += ["--phases", "fuzzing", "--exclude-checks", "positive_data_acceptance"]
        else:
            command += ["--phases", "coverage", "--checks", "positive_data_acceptance"]
            command += [word for path in NOT_EXPRESSED for word in ("--exclude-path", path)]
        print("seed", SEED)
        done = subprocess.run(command, cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
        assert "Operations" in done.stdout
