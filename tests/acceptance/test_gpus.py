"""Jobs on real GPUs: each has its own, as many at once as there are."""

from typing import Any

import httpx
import pytest

from tests.acceptance.conftest import Site, short_job
from tests.acceptance.sabotage import get, open_gate, started, wait_for_state
from tools.service import submit, wait_for_job
from tools.waiting import wait_until

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


RANKS: dict[str, dict[str, Any]] = {
    "collective": {"size_mb": [1, 64], "warmup_steps": 5, "measure_steps": 20},
    "ddp": {"model": {"size": "tiny"}, "strategy": "bucketed", "sharded_optimizer": True, "measure_steps": 10},
    "fsdp": {"kind": "ddp", "model": {"size": "tiny"}, "strategy": "fsdp", "precision": "bf16", "measure_steps": 10},
}


@pytest.mark.parametrize("name", RANKS)
def test_two_ranks_measure_on_two_gpus(site: Site, name: str) -> None:
    client = site.client
    if gpu_count(client) < 2:
        pytest.skip("needs two GPUs")
    job_id = submit(client, {"spec": {"kind": name, "backend": "nccl", "world_size": 2, **RANKS[name]}})
    job = wait_for_job(client, job_id, timeout_s=120)
    assert job["state"] == "succeeded", job["error"]
    uuids = [device["uuid"] for device in (job["environment"]["device"], *job["environment"]["other_devices"])]
    assert len(set(uuids)) == 2
    rows = get(client, f"/jobs/{job_id}/measurements")["rows"]
    print(*(f"{row['metric']} {row['median']} {row['unit']}" for row in rows), sep="\n")
    assert {row["outcome"] for row in rows} <= {"ok", "unknown"}
    if name == "collective":
        rates = [row["median"] for row in rows if row["metric"] == "bus_gb_per_s" and row["size_mb"] == 64]
        assert min(rates) > 20  # GB/s: neither NVLink nor PCIe 5 is slower
    else:
        errors = [row["median"] for row in rows if row["metric"] in ("gradient_error", "parameter_error")]
        assert len(errors) == 2
        assert max(errors) < 1e-2
        streams = client.get(f"/jobs/{job_id}/tables/timeline", params={"limit": 1000}).json()["rows"]
        assert {row["stream"] for row in streams} >= {"compute", "communication"}
