"""A job that computes on paper, with the real server and a real worker whose host is taken."""

from __future__ import annotations

from typing import Any

import pytest

from tests.acceptance.conftest import Site, short_job
from tests.acceptance.sabotage import get, open_gate, wait_for_start
from tools.service import submit, wait_for_job
from tools.waiting import wait_until

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(120)]


def on_the_processor(model: str) -> dict[str, Any]:
    job = short_job(model)
    return {**job, "spec": {**job["spec"], "device": "cpu"}}


def test_an_estimate_waits_while_the_processor_is_measured(site: Site) -> None:
    client = site.client
    busy = submit(client, on_the_processor("gated"))
    wait_for_start(site.folder)
    spec: dict[str, Any] = {"kind": "estimate", "architecture": "feed_forward_stack", "context_length": 1024}
    estimate = submit(client, {"spec": {**spec, "batch_size": 1}})
    wait_until(lambda: get(client, f"/jobs/{estimate}")["waiting"], "a reason to wait")
    assert get(client, f"/jobs/{busy}")["state"] == "running"
    assert get(client, f"/jobs/{estimate}")["state"] == "queued"
    open_gate(site.folder)
    job = wait_for_job(client, estimate)
    assert job["state"] == "succeeded", job["error"]
    tables = {table["name"] for table in get(client, f"/jobs/{job['id']}/tables")}
    assert tables == {"answer", "batch", "fits", "formulas", "memory", "per-device", "symbols"}
    assert job["environment"]["software"]["flopwatch"]
    shown = client.get("/tables", params={"job": job["id"], "format": "markdown"}).text
    assert "stack-d16384-f53248-b126" in shown
    assert "395.3" in shown
