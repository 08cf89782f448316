"""Why a job waits: what no connected worker has."""

from typing import Any

import pytest

from app.specs._base import Resources
from app.specs.benchmark import BenchmarkSpec
from app.store.queue.hosts import Host, Needs, gpus_of_one_job
from app.store.queue.transitions import Queue
from app.store.queue.waiting import missing_for, occupied_for
from app.store.reading.queries import Reading
from app.store.records import Finish, NewJob

EAGER = frozenset({"attention:eager", "model:transformer_lm"})


def host(gpus: int = 0, state: str = "active", kind: str = "benchmark", capabilities: frozenset[str] = EAGER) -> Host:
    return Host(state, frozenset({kind}), capabilities, gpus)


def on(hostname: str, *held: str, gpus: int = 0) -> Host:
    """A host where others hold these devices."""
    held_gpus = sum(name != "host" for name in held)
    return Host("active", frozenset({"benchmark"}), EAGER, gpus, hostname, frozenset(held), held_gpus)


def needs(device_type: str = "auto", devices: int = 1, requirements: Any = EAGER, *, alone: bool = False) -> Needs:
    return Needs("benchmark", device_type, devices, requirements, alone)


@pytest.mark.parametrize(
    ("uuids", "most"),
    [
        ([], 0),
        (["GPU-1", "GPU-2", "GPU-3"], 3),
        (["MIG-1"], 1),
        (["MIG-1", "MIG-2"], 1),
        (["GPU-1", "GPU-2", "MIG-1", "MIG-2"], 2),
    ],
)
def test_a_job_gets_several_whole_gpus_but_one_instance(uuids: list[str], most: int) -> None:
    assert gpus_of_one_job(uuids) == most


@pytest.mark.parametrize(
    ("job", "connected"),
    [
        (needs(), [host()]),
        (needs("cpu"), [host(gpus=8)]),
        (needs("none", 0), [host()]),
        (needs("auto", 4), [host()]),  # as many processes, on a CPU
        (needs("cuda", 2), [host(), host(gpus=2)]),
        (needs(), [host(state="draining"), host()]),
    ],
)
def test_a_job_that_a_worker_could_run_has_no_reason(job: Needs, connected: list[Host]) -> None:
    assert missing_for(job, connected) is None


@pytest.mark.parametrize(
    ("job", "connected", "reason"),
    [
        (needs(), [], "no worker is connected: if none is starting, start one"),
        (needs(), [host(state="draining")], "is stopping"),
        (needs(), [host(kind="kernel")], 'runs the kind "benchmark"'),
        (needs("cuda"), [host()], "needs a GPU, and no connected worker has any"),
        (needs("cuda", 4), [host(gpus=2), host(gpus=1)], "needs 4 GPUs, and no connected worker has more than 2"),
        (needs(requirements=EAGER | {"attention:new"}), [host()], 'has the attention "new"'),
        (needs(requirements=EAGER | {"nodes:2"}), [host()], "has, up to its setting max_nodes"),
        (
            needs(),
            [host(capabilities=frozenset({name})) for name in EAGER],
            'has the attention "eager", the model "transformer_lm" together',
        ),
        (needs("cuda"), [host(), host(gpus=1, capabilities=frozenset())], "with such devices has"),
    ],
)
def test_what_it_needs_and_nobody_has_is_named(job: Needs, connected: list[Host], reason: str) -> None:
    told = missing_for(job, connected)
    assert reason in told


FREE = "no worker that could run it is free now"


@pytest.mark.parametrize(
    ("job", "connected", "running", "reason"),
    [
        (needs(), [host()], {}, None),
        (needs(), [on("a", "host")], {}, 'another Flopwatch holds the CPU of "a"'),
        (needs(), [on("a", "host"), on("b")], {}, None),
        (needs(), [on("a")], {"a": [needs("cpu")]}, FREE),
        (needs(), [on("a", "host")], {"a": [needs("cpu")]}, FREE),  # held by another worker of ours
        (needs(), [on("a", "host"), on("b")], {"b": [needs("cpu")]}, "other workers that could run it run other jobs"),
        (needs("none", 0), [on("a", "host")], {}, None),
        (needs("cuda", 2), [on("a", "host", "GPU-1", gpus=4)], {}, None),
        (needs("cuda", 4), [on("a", "host", "GPU-1", gpus=4)], {}, "another Flopwatch holds the GPUs"),
        (needs("cpu"), [on("a", "host", "GPU-1", gpus=4)], {}, "another Flopwatch holds the CPU"),
        (needs("cuda", 2), [on("a", gpus=4)], {"a": [needs("cuda", 2)]}, None),
        (needs("cuda", 2), [on("a", gpus=4)], {"a": [needs("cuda", 2), needs("cuda", 1)]}, FREE),
        (needs("cpu"), [on("a", gpus=4)], {"a": [needs("cuda", 1)]}, FREE),
        (needs("cuda"), [on("a"), on("b", "host", "GPU-1", gpus=1)], {}, 'the GPUs of "b"'),  # "a" has none
    ],
)
def test_who_holds_the_devices_is_named(job, connected, running, reason) -> None:
    waiting = occupied_for(job, connected, running)
    assert waiting == reason or (reason is not None and reason in str(waiting))


@pytest.mark.parametrize(
    ("ids", "named"), [([8], FREE + ": job 8 runs"), ([7, 8], FREE + ": jobs 7, 8 run"), ([5, 6, 7, 8], FREE)]
)
def test_the_jobs_that_it_waits_for_are_named(ids: list[int], named: str) -> None:
    running = {"a": [needs("cpu")]}
    assert occupied_for(needs(), [on("a")], running, {"a": ids, "b": [9]}) == named


class TestInTheQueue:
    def test_a_cluster_has_the_gpus_of_its_nodes_and_is_never_occupied(self, shop: Any, queue: Queue) -> None:
        cluster = [{"type": "slurm", "name": "Slurm", "count": 4, "gpus_per_node": 2}]
        shop.registration.register_worker("w", "host", 1, {"benchmark"}, EAGER, cluster, {})
        for _ in range(3):
            assert queue.submit(NewJob(BenchmarkSpec(device="cuda"))).response["waiting"] is None
            assert shop.try_claim("w", total_gpus=2, free_gpus=2, capabilities=EAGER)

    def test_the_reason_comes_and_goes_with_the_devices(self, shop: Any, queue: Queue, reading: Reading) -> None:
        def waiting(job_id: int) -> Any:
            return reading.job(job_id)[0]["waiting"]

        shop.register()
        claim, job_id = shop.running_job(), shop.submit()
        assert waiting(job_id) == f"{FREE}: job {claim.job_id} runs"
        queue.finish(claim, Finish("succeeded"))
        assert waiting(job_id) is None
        queue.renew([], ("worker", "active"), {"held_by_others": ["host"]})
        assert waiting(job_id) == 'another Flopwatch holds the CPU of "host"'
        queue.renew([], ("worker", "active"), {"held_by_others": []})
        assert waiting(job_id) is None

    def test_what_waits_is_what_no_worker_claims(self, shop, queue, reading, monkeypatch) -> None:
        """The reason and the claim agree, whatever the job needs and the host has."""
        for gpus, (device_type, devices) in [
            (gpus, needed)
            for gpus in (0, 2)
            for needed in [("auto", 1), ("auto", 3), ("cpu", 1), ("cuda", 1), ("cuda", 2), ("cuda", 3), ("none", 0)]
        ]:
            shop.register(gpus=gpus)
            resources = Resources(device_type=device_type, devices=devices)  # type: ignore[arg-type]
            monkeypatch.setattr(BenchmarkSpec, "resources", lambda self, resources=resources: resources)
            job_id = shop.submit()
            waits = reading.job(job_id)[0]["waiting"] is not None
            claim = shop.try_claim(total_gpus=gpus, free_gpus=gpus)
            assert (claim is None) == waits, (gpus, device_type, devices)
            if claim is None:
                queue.cancel(job_id)
            else:
                queue.finish(claim, Finish("succeeded"))
