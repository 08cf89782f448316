"""Jobs of many cells with the real server and a real worker: what becomes of the others when one goes wrong."""

from typing import Any

import pytest

from tests.acceptance.conftest import Site
from tests.acceptance.sabotage import get
from tools.service import submit, wait_for_job

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(120)]

SPEC = {
    "kind": "attention",
    "implementations": ["own", "dies"],
    "batch_size": 1,
    "head_dims": [8],
    "sequence_lengths": [16, 32],
    "causal": [False, True],
    "dtypes": ["fp32"],
    "warmup_steps": 0,
    "measure_steps": 2,
}


def outcomes(rows: list[dict[str, Any]]) -> dict[tuple[str, int, bool], str]:
    """Outcome of the forward pass by implementation, length and mask."""
    return {
        (row["implementation"], row["sequence_length"], row["causal"]): row["outcome"]
        for row in rows
        if row["metric"] == "forward_ms"
    }


def test_cells_that_take_their_process_down_cost_no_other(site: Site) -> None:
    client = site.client
    job = wait_for_job(client, submit(client, {"spec": SPEC}))
    assert job["state"] == "succeeded", job["error"]
    rows = get(client, f"/jobs/{job['id']}/measurements")["rows"]
    found = outcomes(rows)
    assert len(found) == 8
    # One in the middle, one the very last.
    assert {cell for cell, outcome in found.items() if outcome != "ok"} == {("dies", 32, False), ("dies", 32, True)}
    crashed = [row for row in rows if row["outcome"] == "crashed"]
    assert all("SIGSEGV" in row["reason"] and not row["partial"] for row in crashed)
    assert job["attempt"] == 1
    assert job["progress"]["done"] == job["progress"]["total"] == 8
    assert job["validity"]["verdict"]
    log = client.get(f"/jobs/{job['id']}/logs").text
    assert log.count("about to fall over") == 2, "a cell that crashed is not tried again"
    assert "crashed" in client.get("/tables", params={"job": job["id"], "format": "markdown"}).text
