"""Jobs of several ranks with the real server and a real worker, on the CPU."""

from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.conftest import Site
from tests.acceptance.sabotage import get
from tools.service import submit, wait_for_job

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(180)]

GONE_S = 5.0
"""How soon the ranks of a killed worker's job are gone, on a busy machine."""
SHARED_S = 30.0
"""How long other tests may have files in shared memory that they remove themselves. What is left of ranks stays."""
DDP: dict[str, Any] = {
    "kind": "ddp",
    "model": {"d_model": 8, "d_ff": 8, "num_layers": 1, "num_heads": 1, "vocab_size": 16},
    "context_length": 4,
    "warmup_steps": 1,
    "measure_steps": 2,
}


def ranks_alive(folder: Path) -> list[str]:
    """Command lines of processes that are ranks of jobs of the service with this folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            environment = path.read_bytes()
            if b"TORCHELASTIC_RUN_ID=" in environment and bytes(folder) in environment:
                found.append((path.parent / "cmdline").read_bytes().decode(errors="replace"))
        except OSError:  # it has just ended, or is somebody else's
            continue
    return found


def test_a_killed_rank_ends_the_job(site: Site) -> None:
    client = site.client
    killed = {**DDP, "strategy": "naive", "model": {**DDP["model"], "name": "killed_rank"}}
    dead, sound = (submit(client, {"spec": spec}) for spec in (killed, {**DDP, "sharded_optimizer": True}))
    job = wait_for_job(client, dead, timeout_s=90)
    assert job["state"] == "failed"
    assert job["error"]["code"] == "crashed"
    assert job["error"]["detail"] == "rank 1 died after step 0; see rank-1.log"
    assert "the last words of a rank" in client.get(f"/jobs/{dead}/artifacts/rank-1.log").text
    log = client.get(f"/jobs/{dead}/logs").text
    assert "rank 1 died" in log
    assert "the last words of a rank" in log

    job = wait_for_job(client, sound, timeout_s=90)
    assert job["state"] == "succeeded", job["error"]
    found = {row["metric"]: row for row in get(client, f"/jobs/{sound}/measurements")["rows"]}
    for metric in ("step_ms", "exposed_communication_ms", "communication_ms", "tokens_per_s", "communication_mib"):
        assert found[metric]["outcome"] == "ok", found[metric]
    assert (found["gradient_error"]["median"], found["parameter_error"]["median"]) == pytest.approx((0, 0), abs=1e-6)
    assert (found["step_ms"]["strategy"], found["step_ms"]["world_size"]) == ("bucketed", 2)
    tables = {table["name"] for table in get(client, f"/jobs/{sound}/tables")}
    by_step = {"operations", "timeline", "waits", "stragglers", "values"}
    assert tables == {"ranks", "communication", "kernels", "classes", *by_step}
    checks = {check["name"] for check in job["validity"]["checks"]}
    assert {"parity", "cores", "host_load"} <= checks
    shown = client.get("/tables", params={"job": sound, "format": "markdown"}).text
    assert "exposed_communication_ms" in shown
    assert "bucketed" in shown
    assert not ranks_alive(site.folder)
