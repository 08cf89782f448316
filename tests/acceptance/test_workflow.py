"""The GitHub Actions example of docs/comparing.md, run as a runner does: its commands, its environment, its conditions.

The service that tests share stands for the one that the workflow starts: `up` itself is tested in tests/app/cli.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.processes import is_alive
from tools.waiting import wait_until

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "comparing.md").read_text()
SHA = "0123456789abcdef" * 2 + "01234567"
REAL_SIZE = "model.size=small context_length=512 precision=bf16 replicates=8"
SMALL_SIZE = "model.size=tiny context_length=8 batch_size=1 mode=forward device=cpu warmup_steps=0 measure_steps=1"
PORT = "8123"
COMMAND = """#!/bin/sh
if [ "$1" = up ]; then exec sleep 600; fi
exec {python} -m app.cli "$@"
"""


@pytest.fixture
def workflow() -> dict[str, Any]:
    (text,) = re.findall(r"```yaml\n(# \.github/workflows/.*?)```", PAGE, flags=re.DOTALL)
    found: dict[str, Any] = yaml.safe_load(text)
    return found


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the command where `make install` puts it."""
    command = tmp_path / ".venv" / "bin" / "flopwatch"
    command.parent.mkdir(parents=True)
    command.write_text(COMMAND.format(python=sys.executable))
    command.chmod(0o755)
    return tmp_path


@pytest.fixture
def without_baseline(site: Any) -> Iterator[None]:
    """The service that tests share has no baseline `main`, before and after."""
    site.client.delete("/baselines/main")
    yield
    site.client.delete("/baselines/main")


def steps_of(job: dict[str, Any], event: str) -> list[str]:
    """The scripts that a runner runs for an event, as long as none fails."""
    conditions = {None: True, "always()": True, f"github.event_name == '{event}'": True}
    other = {"push": "pull_request", "pull_request": "push"}[event]
    conditions[f"github.event_name == '{other}'"] = False
    return [step["run"] for step in job["steps"] if "run" in step and conditions[step.get("if")]]


def run(script: str, checkout: Path, environment: dict[str, str]) -> str:
    """Run one step, as a runner does: by bash, which ends at the first command that fails."""
    assert "${{" not in script
    (checkout / "step.sh").write_text(script)
    done = subprocess.run(
        ["bash", "-e", "step.sh"], cwd=checkout, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def small(script: str, port: int) -> str:
    """The script on the port of the tests' server, and with work for a test's time."""
    return script.replace(PORT, str(port)).replace(REAL_SIZE, SMALL_SIZE)


def test_actions_are_pinned_and_no_push_is_dropped(workflow: dict[str, Any]) -> None:
    (job,) = workflow["jobs"].values()
    actions = [step["uses"] for step in job["steps"] if "uses" in step]
    assert actions
    assert all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action) for action in actions)
    assert workflow["permissions"] == {"contents": "read"}
    # In one group for all, GitHub would cancel a waiting push when the next run comes.
    assert "github.event_name == 'push' && github.sha" in workflow["concurrency"]["group"]


@pytest.mark.usefixtures("without_baseline")
def test_a_push_sets_the_baseline_of_pull_requests(workflow: dict[str, Any], site: Any, checkout: Path) -> None:
    (job,) = workflow["jobs"].values()
    port = site.client.base_url.port
    assert REAL_SIZE in str(job["steps"])
    assert job["env"]["FLOPWATCH_PORT"] == PORT
    (checkout / "data").mkdir()
    settings = job["env"] | {"FLOPWATCH_DATA_DIR": str(checkout / "data"), "FLOPWATCH_PORT": str(port)}
    environment = {**os.environ, **settings, "PYTHONPATH": str(ROOT), "GITHUB_SHA": SHA}
    environment.pop("FLOPWATCH_URL", None)

    printed = ""
    for event in ("push", "pull_request"):
        scripts = [small(script, port) for script in steps_of(job, event)]
        assert scripts[0] == "make install"
        assert len(scripts) == 4
        for script in scripts[1:]:
            printed += run(script, checkout, environment)
        server = int((checkout / "flopwatch.pid").read_text())
        wait_until(
            lambda server=server: not is_alive(server), timeout_s=10, what="the end of the server, by the last step"
        )

    assert printed.count('{"status":"ready"}') == 2, "curl has asked the server"
    (kept,) = site.client.get("/baselines/main").json()["cases"]
    first = site.client.get(f"/jobs/{kept['jobs'][0]}").json()
    assert first["labels"] == {"commit": SHA}
    checked = site.client.get("/jobs", params={"label": "check:main"}).json()["data"][0]
    assert checked["labels"] == {"check": "main", "commit": SHA}
    assert (checked["state"], checked["spec"]) == ("succeeded", first["spec"])
    # One process each cannot tell a difference from chance.
    assert f"job {checked['id']} against main: step_ms: inconclusive: 1 process each" in printed
    assert "::warning::inconclusive; see the log" in printed
