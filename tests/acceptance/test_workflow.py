"""The workflow in deploy/github, run as GitHub's runner does: its commands, its environment, its conditions.

The service that tests share stands for the one that the workflow starts: `up` itself is tested in tests/app/cli.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.processes import is_alive
from tools.waiting import wait_until

ROOT = Path(__file__).parents[2]
SHA = "0123456789abcdef" * 2 + "01234567"
REAL_SIZE = "sequence_lengths=1024"
SMALL_SIZE = (
    "sequence_lengths=16 head_dims=8 dtypes=fp32 causal=false batch_size=1 mode=forward device=cpu warmup_steps=1 "
    "measure_steps=5"
)
SOURCE = """
import torch


def attention(q, k, v, is_causal):
    return {output}
"""
PORT = "8123"
COMMAND = """#!/bin/sh
if [ "$1" = up ]; then exec sleep 600; fi
exec {python} -m app.cli "$@"
"""


@pytest.fixture(scope="module")
def workflow() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "deploy" / "github" / "speed.yml").read_text())


def steps_of(job: dict[str, Any], event: str) -> list[str]:
    """The scripts that a runner runs for an event, as long as none fails."""
    conditions = {None: True, "always()": True, f"github.event_name == '{event}'": True}
    other = {"push": "pull_request", "pull_request": "push"}[event]
    conditions[f"github.event_name == '{other}'"] = False
    return [step["run"] for step in job["steps"] if "run" in step and conditions[step.get("if")]]


def run(script: str, checkout: Path, environment: dict[str, str]) -> tuple[int, str]:
    """Run one step, as a runner does: by bash, which ends at the first command that fails. Returns its exit code and
    output."""
    assert "${{" not in script
    (checkout / "step.sh").write_text(script)
    done = subprocess.run(
        ["bash", "-e", "step.sh"], cwd=checkout, env=environment, capture_output=True, text=True, timeout=120
    )
    print(script, done.stdout, done.stderr, sep="\n")
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("answered", "exit_code"), [(0, 0), (3, 3), (4, 0), (5, 5), (6, 6), (8, 8), (9, 0), (1, 1)], ids=str
)
def test_only_what_turns_could_not_tell_or_not_measure_is_a_warning(workflow, tmp_path, answered, exit_code) -> None:
    (job,) = workflow["jobs"].values()
    (check,) = [step["run"] for step in job["steps"] if "check --baseline" in step.get("run", "")]
    command = tmp_path / ".venv" / "bin" / "flopwatch"
    command.parent.mkdir(parents=True)
    command.write_text(f"#!/bin/sh\necho $* > arguments\nexit {answered}\n")
    command.chmod(0o755)
    (tmp_path / "job.json").write_text('{"id": 17}')
    code, out = run(check, tmp_path, dict(os.environ))
    assert code == exit_code
    assert ("::warning::" in out) == (answered in (4, 9))
    assert (tmp_path / "arguments").read_text() == "check --baseline main 17 --fail-above 5% --alternate\n"


def test_actions_are_pinned_and_no_push_is_dropped(workflow: dict[str, Any]) -> None:
    (job,) = workflow["jobs"].values()
    actions = [step["uses"] for step in job["steps"] if "uses" in step]
    assert actions
    assert all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action) for action in actions)
    assert workflow["permissions"] == {"contents": "read"}
    # In one group for all, GitHub would cancel a waiting push when the next run comes.
    assert "github.event_name == 'push' && github.sha" in workflow["concurrency"]["group"]


@pytest.fixture
def happens(workflow, started_service, tmp_path) -> Callable[[str, str], tuple[list[int], str]]:
    """Runs the workflow for an event, after a change of the code; returns its steps' exit codes, and their output."""
    command = tmp_path / ".venv" / "bin" / "flopwatch"  # where `make install` puts it
    command.parent.mkdir(parents=True)
    command.write_text(COMMAND.format(python=sys.executable))
    command.chmod(0o755)
    (tmp_path / "data").mkdir()
    (job,) = workflow["jobs"].values()
    assert REAL_SIZE in str(job["steps"])
    assert job["env"]["FLOPWATCH_PORT"] == PORT
    port = started_service[0].client().base_url.port
    settings = job["env"] | {"FLOPWATCH_DATA_DIR": str(tmp_path / "data"), "FLOPWATCH_PORT": str(port)}
    environment = {**os.environ, **settings, "PYTHONPATH": str(ROOT), "GITHUB_SHA": SHA}
    environment.pop("FLOPWATCH_URL", None)

    def run_all(event: str, output: str) -> tuple[list[int], str]:
        (tmp_path / "my_attention.py").write_text(f"# {event}\n" + SOURCE.format(output=output))
        first, *scripts = steps_of(job, event)
        assert first == "make install"
        small = [script.replace(PORT, str(port)).replace(REAL_SIZE, SMALL_SIZE) for script in scripts]
        ran = [run(script, tmp_path, environment) for script in small]
        server = int((tmp_path / "flopwatch.pid").read_text())
        wait_until(lambda: not is_alive(server), timeout_s=10, what="the end of the server, by the last step")
        return [code for code, _ in ran], "".join(printed for _, printed in ran)

    return run_all


@pytest.mark.usefixtures("site")
def test_a_pull_request_is_checked_against_the_last_push(happens, started_service) -> None:
    client = started_service[0].client()
    client.delete("/baselines/main")  # that of another test
    codes, printed = happens("push", "torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)")
    assert codes == [0, 0, 0, 0], "start, measure, set, and end"
    assert '{"status":"ready"}' in printed, "curl has asked the server"
    (kept,) = client.get("/baselines/main").json()["cases"]
    assert client.get(f"/jobs/{kept['jobs'][0]}").json()["labels"] == {"commit": SHA}
    codes, printed = happens("pull_request", "v")
    client.delete("/baselines/main")
    assert codes == [0, 0, 8, 0], "start, measure, check, and end"
    assert "differs from the reference" in printed
