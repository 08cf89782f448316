"""A job that computes on paper, with the real server and a real worker whose host is taken."""

from __future__ import annotations

from typing import Any

import pytest

from tests.acceptance.conftest import Site, short_job
from tests.acceptance.sabotage import get, open_gate, wait_for_start, wait_for_state
from tools.service import submit, wait_for_job

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(120)]


def on_the_processor(model: str) -> dict[str, Any]:
    job = short_job(model)
    return {**job, "spec": {**job["spec"], "device": "cpu"}}


def test_an_estimate_runs_beside_any_job(site: Site) -> None:
    client = site.client
    busy = submit(client, on_the_processor("gated"))
    wait_for_start(site.folder)
    waiting = submit(client, on_the_processor("counted"))
    spec: dict[str, Any] = {"kind": "estimate", "architecture": "feed_forward_stack", "context_length": 1024}
    job = wait_for_job(client, submit(client, {"spec": {**spec, "batch_size": 1}}))
    assert job["state"] == "succeeded", job["error"]
    assert get(client, f"/jobs/{busy}")["state"] == "running"
    assert get(client, f"/jobs/{waiting}")["state"] == "queued", "a job that needs the processor waits"
    tables = {table["name"] for table in get(client, f"/jobs/{job['id']}/tables")}
    assert tables == {"answer", "batch", "fits", "formulas", "memory", "per-device", "symbols"}
    assert job["environment"]["software"]["flopwatch"]
    shown = client.get("/tables", params={"job": job["id"], "format": "markdown"}).text
    assert "stack-d16384-f53248-b126" in shown
    assert "395.3" in shown
    open_gate(site.folder)
    wait_for_state(client, waiting, "succeeded")
