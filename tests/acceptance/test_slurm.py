"""Jobs on a throw-away Slurm cluster, with the queue on PostgreSQL, whatever Slurm does meanwhile. After each test
nothing is left of its jobs: no allocation, no process and no file."""

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import psutil
import pytest

from tests.acceptance.conftest import end_all_jobs, environment
from tests.acceptance.sabotage import (
    POLL_S,
    attempt_states,
    fails_without,
    get,
    open_gate,
    plain_job,
    plain_kind,
    wait_for_start,
    wait_for_state,
)
from tests.forked import ForkedService
from tests.postgres import Server
from tests.slurm_cluster import Cluster
from tools.service import Service, submit, wait_for_job
from tools.waiting import wait_until
from workers.slurm.check import examine

pytestmark = pytest.mark.acceptance

ENDS_S = 120.0
LATER = ["--begin=now+1hour"]
"""Arguments of sbatch by which allocations stay pending."""


@dataclass
class Site:
    """A server and a worker that submits to the cluster."""

    service: Service
    cluster: Cluster
    client: httpx.Client
    folder: Path
    """Of the test."""
    misbehave: Path
    """Where the jobs tell what they did."""

    def start_worker(
        self, *, path: str | None = None, command: Sequence[str] = ("workers", "slurm"), **settings: Any
    ) -> subprocess.Popen[bytes]:
        """Start the worker with settings of the cluster; `path` comes before PATH. The command that users type becomes
        a new interpreter, which takes a second of a core."""
        # Each node has device locks of its own, as if it were a host.
        setup = [f"export TMPDIR={self.folder}/$SLURMD_NODENAME", "mkdir -p $TMPDIR"]
        values = {
            "folder": str(self.folder / "handover"),
            "poll_s": 0.3,
            "command_timeout_s": 20,
            "max_nodes": 2,
            **settings,
            "setup": "\n".join([*setup, settings.get("setup", "")]),
        }
        file = self.folder / "slurm.toml"
        file.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items()))
        changed = {"PATH": f"{path}:{self.cluster.environment['PATH']}"} if path else {}
        worker, log = self.service.start_process("worker", [*command, str(file)], **changed)
        wait_until(lambda: b"ready" in log.read_bytes() or worker.poll() is not None, what="the worker")
        assert worker.poll() is None, log.read_text()
        return worker

    def submit_pending(self, behaviour: str) -> int:
        """Submit a job whose allocation stays pending; returns its id once it says so."""
        job_id = submit(self.client, plain_job(behaviour))
        wait_until(lambda: "BeginTime" in str(get(self.client, f"/jobs/{job_id}")["waiting"]), what="its reason")
        return job_id

    def is_clean(self) -> bool:
        """Return True if nothing is left of any job."""
        files = sorted(path.name for path in (self.folder / "handover").glob("*"))
        return not self.cluster.allocations() and not self.cluster.processes_of_jobs() and files == ["worker.lock"]


@pytest.fixture(scope="module")
def shared_server(slurm: Cluster, postgres: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("slurm")
    with postgres.database() as url:
        settings = {**environment(folder), **plain_kind(), **slurm.environment, "FLOPWATCH_DATABASE_URL": str(url)}
        with ForkedService(folder / "service", settings) as running:
            running.start_server()
            yield running


@pytest.fixture
def site(shared_server: Service, slurm: Cluster, tmp_path: Path, misbehave_folder: Path) -> Iterator[Site]:
    shared_server.environment.update({**environment(tmp_path), **plain_kind(), **slurm.environment})
    slurm.wait_until_idle()
    site = Site(shared_server, slurm, shared_server.client(), tmp_path, misbehave_folder)
    try:
        yield site
        end_all_jobs(site.client)
        wait_until(site.is_clean, what="nothing to be left", poll_s=0.1)
    finally:
        shared_server.stop_processes(*(one for one in shared_server.processes if one is not shared_server.server))
        print(shared_server.logs()[-20_000:])
        for path in (tmp_path / "handover").glob("*.log"):
            print(path, path.read_text())


def ends(site: Site, job_id: int) -> dict[str, Any]:
    return wait_for_job(site.client, job_id, timeout_s=ENDS_S)


def test_a_job_runs_in_an_allocation(site: Site) -> None:
    worker = site.start_worker(command=("app.cli", "worker", "--executor", "slurm", "--slurm-settings"))
    job_id = submit(site.client, plain_job("gated"))
    wait_for_start(site.misbehave)
    (name,) = site.cluster.allocations()
    assert name == f"flopwatch-{job_id}-1"
    running = get(site.client, f"/jobs/{job_id}")
    workers = {one["id"]: one for one in get(site.client, "/workers")}
    assert workers[running["worker_id"]]["pid"] != worker.pid, "its agent has taken it over"
    assert workers[running["worker_id"]]["state"] == "draining", "its agent takes no other job"
    open_gate(site.misbehave)
    assert ends(site, job_id)["state"] == "succeeded"
    assert attempt_states(site.client, job_id) == ["succeeded"]
    assert site.client.get(f"/jobs/{job_id}/measurements").json()["rows"]


def test_a_pending_job_is_cancelled(site: Site) -> None:
    site.start_worker(extra_arguments=LATER)
    job_id = site.submit_pending("counted")
    pending = get(site.client, f"/jobs/{job_id}")
    assert (pending["state"], pending["started_at"]) == ("queued", None)
    assert site.client.post(f"/jobs/{job_id}/cancel").json()["state"] == "cancelled", "at once"
    assert "it had not begun" in ends(site, job_id)["error"]["detail"]
    assert attempt_states(site.client, job_id) == ["cancelled"]
    wait_until(lambda: not site.cluster.allocations(), timeout_s=ENDS_S, what="no allocation")


def test_control_of_cancelled_allocations(site: Site) -> None:
    with fails_without(site.service, "scancel", match="no allocation"), patch.dict(globals(), ENDS_S=5.0):
        test_a_pending_job_is_cancelled(site)
    site.cluster.run("scancel", f"--user={os.geteuid()}")


def unfit_worker(site: Site) -> dict[str, Any]:
    """Wait until the worker is unfit; why it is."""

    def found() -> Any:
        workers = [one for one in get(site.client, "/workers") if one["state"] == "unfit"]
        return workers[0]["unfit"] if workers else None

    wait_until(found, what="the worker to be unfit")
    return found()


def test_a_cluster_that_takes_no_job_makes_the_worker_unfit(site: Site) -> None:
    worker = site.start_worker(partition="nowhere")
    job_id = submit(site.client, plain_job("counted"))
    unfit = unfit_worker(site)
    assert unfit["code"] == "slurm_refused"
    assert "invalid partition" in unfit["reason"].lower()
    assert unfit["next_try_at"] is not None

    def returned() -> dict[str, Any] | None:
        """The job, once it is back: before the worker knows itself unfit it may claim again what it returned."""
        job = get(site.client, f"/jobs/{job_id}")
        return job if (job["state"], job["attempt"]) == ("queued", 0) else None

    assert "invalid partition" in wait_until(returned, what="the job to be back")["waiting"]
    worker.terminate()
    assert worker.wait(30) == 0
    site.start_worker()
    assert ends(site, job_id)["attempt"] == 1


def test_control_jobs_that_slurm_refuses_fail_alone(site: Site) -> None:
    """However many there are, other users' jobs do not wait for them."""
    site.start_worker(gpus_per_node=64)
    specs = [{"kind": "collective", "backend": "nccl", "world_size": size} for size in (58, 59, 60)]
    for job_id in [submit(site.client, {"spec": spec}) for spec in specs]:
        job = ends(site, job_id)
        assert job["error"]["code"] == "unsupported"
        assert "node configuration is not available" in job["error"]["detail"]
    assert {one["state"] for one in get(site.client, "/workers") if one["state"] != "stopped"} == {"active"}
    assert ends(site, submit(site.client, plain_job("counted")))["state"] == "succeeded"


def test_doctor_examines_the_cluster(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in site.cluster.environment.items():
        monkeypatch.setenv(name, value)
    site.start_worker()  # whose folder tells afterwards that nothing is left
    file, folder = site.folder / "cluster.toml", f'folder = "{site.folder}/shared"\n'
    file.write_text(folder)
    assert [(one.name, one.state) for one in examine(file)] == [("slurm", "works"), ("folder", "works")]
    file.write_text(f'{folder}partition = "nowhere"\n')
    (finding,) = examine(file)
    assert finding.state == "broken"
    assert "nowhere" in finding.found
    monkeypatch.setenv("PATH", str(site.folder))
    (finding,) = examine(file)
    assert "no sbatch" in finding.found


def test_an_allocation_has_the_gpus_that_the_job_needs(site: Site) -> None:
    site.start_worker(gpus_per_node=4, extra_arguments=LATER)
    job_id = submit(site.client, {"spec": {"kind": "collective", "backend": "nccl", "world_size": 6, "nodes": 2}})
    wait_until(site.cluster.allocations, what="its allocation")
    assert site.cluster.run("squeue", "-h", "-o", "%b %D").split() == ["gres:gpu:3", "2"]
    site.client.post(f"/jobs/{job_id}/cancel")


@pytest.mark.long
def test_a_worker_that_ends_gives_back_what_waits_and_leaves_what_runs(site: Site) -> None:
    worker = site.start_worker()
    running = submit(site.client, plain_job("gated"))
    wait_for_start(site.misbehave)
    worker.terminate()
    assert worker.wait(30) == 0
    worker = site.start_worker(extra_arguments=LATER)
    waiting = site.submit_pending("gated")
    worker.terminate()
    assert worker.wait(30) == 0
    assert wait_for_state(site.client, waiting, "queued")["attempt"] == 0
    assert site.cluster.allocations() == [f"flopwatch-{running}-1"]
    open_gate(site.misbehave)
    assert ends(site, running)["state"] == "succeeded"
    site.start_worker()  # which tidies up


@pytest.mark.long
def test_a_killed_workers_allocations_do_not_run(site: Site) -> None:
    worker = site.start_worker(extra_arguments=LATER)
    job_id = submit(site.client, plain_job("counted"))
    wait_until(site.cluster.allocations, what="its allocation")
    worker.kill()
    worker.wait()
    wait_for_state(site.client, job_id, "queued", timeout_s=30)
    site.start_worker()
    assert ends(site, job_id)["attempt"] == 1, "it had not begun"
    assert (site.misbehave / "runs").read_text().split() == ["0"]


@pytest.mark.long
def test_a_preempted_job_runs_again(site: Site) -> None:
    """It has lost its node to another partition's job."""
    site.start_worker()
    job_id = submit(site.client, plain_job("gated"))
    wait_for_start(site.misbehave)
    site.cluster.run("sbatch", "-p", "urgent", "-N2", "--exclusive", "-o/dev/null", "--wrap=sleep 1")
    wait_until(lambda: attempt_states(site.client, job_id)[0] != "running", what="the attempt's end", poll_s=POLL_S)
    assert attempt_states(site.client, job_id)[0] == "lost"
    wait_for_start(site.misbehave, 2, timeout_s=ENDS_S)
    open_gate(site.misbehave)
    assert ends(site, job_id)["state"] == "succeeded"
    attempts = get(site.client, f"/jobs/{job_id}/attempts")
    assert [attempt["state"] for attempt in attempts] == ["lost", "succeeded"]
    assert attempts[0]["error"]["code"] == "worker_lost"
    assert "preemption" in attempts[0]["error"]["detail"]


def forgetful_sbatch(folder: Path) -> str:
    """Return a folder with an sbatch that submits, and does not answer the first time."""
    folder.mkdir()
    script = folder / "sbatch"
    script.write_text(
        f'#!/bin/bash\nPATH="${{PATH#*:}}"\nsbatch "$@" > {folder}/answer || exit\n'
        f"mkdir {folder}/once 2> /dev/null && exec sleep 60\ncat {folder}/answer\n"
    )
    script.chmod(0o755)
    return str(folder)


@pytest.mark.long
def test_a_lost_answer_of_sbatch_is_found_again(site: Site) -> None:
    """Allocations begin once they are counted: one that began before the worker asks for it would run the job, and
    there would be no second."""
    site.start_worker(path=forgetful_sbatch(site.folder / "bin"), command_timeout_s=3, extra_arguments=LATER)
    job_id = site.submit_pending("counted")
    found = site.cluster.run("squeue", "-h", "-o", "%i", f"--name=flopwatch-{job_id}-1").split()
    for one in found:
        site.cluster.run("scontrol", "update", f"JobId={one}", "StartTime=now")
    assert ends(site, job_id)["state"] == "succeeded"
    assert len(found) == 1


def agents_of(site: Site) -> list[psutil.Process]:
    found = []
    for pid in site.cluster.processes_of_jobs():
        try:
            process = psutil.Process(pid)
            if "one-job" in process.cmdline():
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.mark.long
def test_a_node_that_was_given_up_writes_nothing(site: Site) -> None:
    """Kill the slurmd of a job, and stop the job's agent until another node has run the job; then let it go on."""
    site.start_worker()
    job_id = submit(site.client, plain_job("gated"))
    (child,) = wait_for_start(site.misbehave)
    (agent,) = agents_of(site)
    node = agent.environ()["SLURMD_NODENAME"]
    site.cluster.kill(node)
    agent.send_signal(signal.SIGSTOP)
    try:
        (second,) = wait_for_start(site.misbehave, 2, timeout_s=ENDS_S)
        open_gate(site.misbehave, second)
        job = ends(site, job_id)
        open_gate(site.misbehave, child)
        agent.send_signal(signal.SIGCONT)
        wait_until(lambda: not agent.is_running() or agent.status() == psutil.STATUS_ZOMBIE, what="the zombie's end")
    finally:
        site.cluster.start_node(node)
    site.cluster.wait_until_idle()
    events = get(site.client, f"/jobs/{job_id}/events")
    assert (job["state"], sum(event["type"] == "done" for event in events)) == ("succeeded", 1)
    assert attempt_states(site.client, job_id) == ["lost", "succeeded"]


@pytest.mark.parametrize(
    ("mechanism", "test", "wrong"),
    [
        ("fence", test_a_node_that_was_given_up_writes_nothing, r"\('succeeded', 2\) =="),
        ("found_allocations", test_a_lost_answer_of_sbatch_is_found_again, "2 == 1"),
        ("settling", test_a_preempted_job_runs_again, "'failed' == 'lost'"),
    ],
    ids=["fence", "lost answers", "preemption"],
)
def test_control_on_the_cluster(site: Site, mechanism: str, test: Callable[[Site], None], wrong: str) -> None:
    with fails_without(site.service, mechanism, match=wrong):
        test(site)


@pytest.mark.long
def test_data_parallel_training_on_two_nodes(site: Site) -> None:
    model = {"vocab_size": 64, "d_model": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    steps = {"batch_size": 1, "context_length": 8, "measure_steps": 2, "warmup_steps": 1}
    spec = {"kind": "ddp", "model": model, "strategy": "bucketed", **steps}
    site.start_worker()
    job = ends(site, submit(site.client, {"spec": {**spec, "nodes": 2, "world_size": 2, "backend": "gloo"}}))
    assert job["state"] == "succeeded", job["error"]
    hosts = [node["host"]["hostname"] for node in (job["environment"], *job["environment"]["other_nodes"])]
    assert len(hosts) == 2
    assert len(set(hosts)) == 1, "the cluster's nodes are this host"
    ranks = site.client.get(f"/jobs/{job['id']}/tables/ranks").json()["rows"]
    assert [(row["rank"], row["node"]) for row in ranks] == [(0, 0), (1, 1)]
    rows = site.client.get(f"/jobs/{job['id']}/measurements").json()["rows"]
    (error,) = [row for row in rows if row["metric"] == "gradient_error"]
    assert error["outcome"] == "ok", error
    assert (error["nodes"], error["world_size"]) == (2, 2)


@pytest.mark.long
def test_a_lost_node_of_two_is_a_lost_worker(site: Site) -> None:
    """The job is given up at once, and runs again."""
    site.start_worker()
    spec = {"kind": "collective", "operations": ["all_reduce"], "size_mb": [0.01], "measure_steps": 10_000}
    job_id = submit(site.client, {"spec": {**spec, "nodes": 2, "world_size": 2}, "max_attempts": 1})
    wait_until(
        lambda: "measuring" in get(site.client, f"/jobs/{job_id}")["progress"]["message"],
        timeout_s=ENDS_S,
        what="the measuring",
    )
    (second,) = [agent for agent in agents_of(site) if agent.environ()["SLURM_PROCID"] == "1"]
    second.kill()
    job = ends(site, job_id)
    assert job["error"]["code"] == "worker_lost", job["error"]
