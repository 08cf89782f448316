"""Jobs on real GPUs: each has its own, as many at once as there are, and CPU measurements alone."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.acceptance.conftest import Site, short_job
from tests.acceptance.sabotage import get, open_gate, started, wait_for_state
from tools.service import submit, wait_until

pytestmark = [pytest.mark.acceptance, pytest.mark.alone, pytest.mark.gpu]


def gated(device: str, **fields: Any) -> dict[str, Any]:
    """A job that waits in its forward pass."""
    body = short_job("gated", **fields)
    return {**body, "spec": {**body["spec"], "device": device}}


def gpu_count(client: httpx.Client) -> int:
    [worker] = get(client, "/workers")
    return sum(device["type"] == "cuda" for device in worker["devices"])


def test_as_many_jobs_run_as_there_are_gpus_each_on_its_own(site: Site) -> None:
    client, folder = site.client, site.folder
    gpus = gpu_count(client)
    assert gpus >= 1
    jobs = [submit(client, gated("cuda")) for _ in range(gpus + 1)]
    wait_until(lambda: len(started(folder)) == gpus, timeout_s=120, what="a job on every GPU")
    assert [get(client, f"/jobs/{job}")["state"] for job in jobs] == ["running"] * gpus + ["queued"]
    open_gate(folder)
    ended = [wait_for_state(client, job, "succeeded", timeout_s=120) for job in jobs]
    first = [job["environment"]["device"]["uuid"] for job in ended[:gpus]]
    assert len(set(first)) == gpus
    assert ended[-1]["environment"]["device"]["uuid"] in first
    neighbours = [job["environment"]["neighbours"] for job in ended[:gpus]]
    assert neighbours == [jobs[:index] for index in range(gpus)]


def test_a_cpu_job_waits_for_the_host_and_nobody_overtakes_it(site: Site) -> None:
    client, folder = site.client, site.folder
    on_gpu = submit(client, gated("cuda"))
    wait_until(lambda: started(folder), timeout_s=120, what="the job on a GPU")
    on_cpu, later = submit(client, gated("cpu")), submit(client, gated("cuda"))
    # Were a free GPU given to the last job, it would be now: the worker looks 20 times a second.
    with pytest.raises(TimeoutError):
        wait_until(lambda: len(started(folder)) > 1, timeout_s=3, what="somebody to overtake the CPU job")
    open_gate(folder)
    ended = [wait_for_state(client, job, "succeeded", timeout_s=120) for job in (on_gpu, on_cpu, later)]
    assert [job["environment"]["device"]["type"] for job in ended] == ["cuda", "cpu", "cuda"]
    starts, ends = ([job[key] for job in ended] for key in ("started_at", "finished_at"))
    assert ends[0] <= starts[1]
    assert ends[1] <= starts[2]
