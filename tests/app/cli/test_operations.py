"""docs/lab-server.md and docs/operations.md, executed: a folder becomes a queue of several people and hosts."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import httpx
from typer.testing import CliRunner

from app.cli.commands import cli
from tests.app.conftest import TINY
from tests.postgres import programs

DOCS = Path(__file__).parents[3] / "docs"
PAGES = (DOCS / "lab-server.md").read_text() + (DOCS / "operations.md").read_text()
ADMIN = "the-admins-token"


def commands(*beginnings: str) -> list[list[str]]:
    """The words of the pages' commands that begin so, in their order, with this process's variables."""
    blocks = re.findall(r"```sh\n(.*?)```", PAGES, flags=re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith(beginnings)]
    return [shlex.split(os.path.expandvars(line), comments=True) for line in lines]


def run(words: list[str]) -> str:
    result = CliRunner().invoke(cli, words[1:])
    assert result.exit_code == 0, (words, result.output)
    return result.stdout


def test_tokens_are_made_and_the_folder_moves(serve, postgres, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FLOPWATCH_API_TOKEN", ADMIN)
    monkeypatch.setenv("FLOPWATCH_DATA_DIR", str(tmp_path))
    with serve(tmp_path, api_token=ADMIN) as site:
        monkeypatch.setenv("FLOPWATCH_URL", site.url)
        of_ada, _of_nightly, listed = [run(words) for words in commands("flopwatch token")]
        assert re.search(r"nightly +submit .* never +never", listed), listed
        [token] = re.findall(r"fw_\w+", of_ada)
        job = httpx.post(f"{site.url}/jobs", json={"spec": TINY}, headers={"Authorization": f"Bearer {token}"})
        assert job.status_code == 201, job.text
    [createdb] = commands("createdb")
    server = ["--host", str(postgres.folder), "--username", "flopwatch"]
    folder = programs()
    subprocess.run([folder / createdb[0], *server, *createdb[1:]], check=True)
    try:
        [exported] = commands("export FLOPWATCH_DATABASE_URL")
        url = exported[1].partition("=")[2].replace("@db.example.org/", "@/") + f"?host={postgres.folder}"
        monkeypatch.setenv("FLOPWATCH_DATABASE_URL", url)
        [move] = commands("flopwatch move")
        assert "all rows are in flopwatch on" in run(move)
        with serve(tmp_path, database_url=url) as site:
            headers = {"Authorization": f"Bearer {token}"}
            [moved] = httpx.get(f"{site.url}/jobs", headers=headers).raise_for_status().json()["data"]
            assert (moved["id"], moved["submitted_by"]) == (job.json()["id"], "ada")
    finally:
        postgres.execute("DROP DATABASE flopwatch WITH (FORCE)")
