"""Jobs of several ranks with the real server and a real worker, on the CPU."""

import os
import signal
import time
from typing import Any

import psutil
import pytest

from tests.acceptance.conftest import Site
from tests.acceptance.sabotage import get
from tests.processes import is_alive
from tools.service import submit, wait_for_job
from tools.waiting import wait_until

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(120)]

SPEC: dict[str, Any] = {"kind": "collective", "size_mb": [0.01], "warmup_steps": 1, "measure_steps": 3}


def ranks_of(site: Site) -> dict[int, int]:
    """The process of each rank that runs."""
    found = {}
    for process in psutil.Process(site.worker.pid).children(recursive=True):
        try:
            if "rank_main" in " ".join(process.cmdline()):
                found[int(process.environ()["RANK"])] = process.pid
        except psutil.NoSuchProcess:
            continue
    return found


def test_a_killed_rank_fails_the_job_at_once(site: Site) -> None:
    client = site.client
    # The second cell takes many seconds.
    spec = {**SPEC, "operations": ["all_reduce"], "size_mb": [0.01, 64], "measure_steps": 300}
    job_id = submit(client, {"spec": spec})
    wait_until(
        lambda: get(client, f"/jobs/{job_id}")["progress"]["message"] == "all_reduce, 64 MB, fp32: measuring",
        timeout_s=90,
        what="the second cell",
    )
    ranks = ranks_of(site)
    assert ranks.keys() == {0, 1}
    killed_at = time.monotonic()
    os.kill(ranks[1], signal.SIGKILL)
    job = wait_for_job(client, job_id)
    assert time.monotonic() - killed_at < 10
    assert (job["state"], job["error"]["code"]) == ("failed", "crashed")
    assert "rank 1 died" in job["error"]["detail"]
    rows = get(client, f"/jobs/{job_id}/measurements")["rows"]
    assert {(row["size_mb"], row["partial"]) for row in rows} == {(0.01, True)}
    assert {row["n"] for row in rows if row["metric"] == "latency_ms"} == {300}
    assert not any(is_alive(pid) for pid in ranks.values())
