"""Causes that make a worker unfit, and beside them the faults of jobs, which never do. The agent, the queue and the
database are real; what jobs do is played."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from sqlalchemy import select

from app.errors import DatabaseBusy, StoreUnreachable
from app.settings import Settings
from app.specs import spec_adapter
from app.specs._schema import RELEASED, SCHEMA, fingerprint, name_of
from app.store import service_settings, tables
from app.store.checking import examine
from app.store.database.engine import Database
from app.store.queue.registration import Registration, announce_server
from app.store.queue.transitions import Queue
from app.store.reading.queries import Reading
from app.store.records import Claim, NewJob
from app.store.tokens import Tokens
from tests.clock import Clock
from tools.waiting import wait_until
from workers.agent import fitness, host_check, readings
from workers.agent.agent import Agent
from workers.agent.fitness import BLAMED_S, MAX_BACKOFF_S, MIN_BACKOFF_S, SAME, Unfit
from workers.agent.job_run import JobRun
from workers.agent.readings import SILENT_S
from workers.devices.discovery import Gpu, Host
from workers.devices.locks import DeviceLocks
from workers.measure import nvml
from workers.outcome import Failed, Outcome, Succeeded

HOST = Host(gpus=(), cpu_count=2, memory_mib=1)
GPU = Gpu("GPU-1", "a GPU", 1000)
CRASH = Failed("crashed", "the job's process was killed by SIGBUS at 0x7f3a, step 12")
CUDA = Failed("failed", "RuntimeError: CUDA error: unspecified launch failure")
WRONG_KERNEL = "RuntimeError: CUDA error: an illegal memory access was encountered"
TIMEOUT = Failed("timeout", "its time was over after 1 s")
MISSING = Failed("invalid_environment", "ModuleNotFoundError: No module named 'numpy'")


def claim_of(number: int, spec: dict[str, Any]) -> Claim:
    return Claim(number, 1, str(number), number, "w", "benchmark", None, spec, None, "cpu", 1, False)


class Launcher:
    """Starts nothing."""

    end_leftovers = staticmethod(list)

    def end_orphans(self) -> None: ...

    def close(self) -> None: ...


class Lab:
    """One worker and its queue. `outcomes` is what jobs come to, by id; the others succeed."""

    def __init__(self, folder: Path, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
        self.database, self.folder, self.clock = database, folder, Clock()
        self.queue, self.reading = Queue(database), Reading(database)
        self.outcomes: dict[int, Outcome] = {}
        self.agents: list[Agent] = []
        monkeypatch.setattr(JobRun, "_run_units", lambda run: self.outcomes.get(run.claim.job_id, Succeeded()))
        self.agent = self.start(HOST)

    def start(self, host: Host) -> Agent:
        agent = Agent(
            Settings(data_dir=self.folder / "data"),
            self.database,
            host=host,
            locks=DeviceLocks(host, self.folder / f"locks-{len(self.agents)}"),
            launcher=Launcher(),  # type: ignore[arg-type]
            clock=self.clock,
        )
        agent.register()
        self.agents.append(agent)
        return agent

    def submit(self, outcome: Outcome | None = None, *, seed: int | None = None, **options: Any) -> int:
        """Submit a job that is different from all others, unless it has a seed of its own."""
        number = len(self.outcomes) + 1 if seed is None else seed
        spec = {"kind": "benchmark", "device": "cpu", "model": {"size": "tiny"}, "seed": number}
        job_id = int(self.queue.submit(NewJob(spec_adapter.validate_python(spec), **options)).response["id"])
        self.outcomes[job_id] = outcome or Succeeded()
        return job_id

    def serve(self) -> None:
        """Turn the loop until nothing more happens at this time."""
        for _ in range(30):
            self.agent.serve_queue()
            for run in list(self.agent.runs.values()):
                assert run.wait(20)
            examination = self.agent._examination
            if examination is not None:
                examination._thread.join(20)
                assert examination.is_done

    def pass_time(self, seconds: float) -> None:
        self.clock.sleep(seconds)
        self.serve()

    @property
    def states(self) -> list[str]:
        return [job["state"] for job in sorted(self.reading.jobs(limit=50)[0], key=lambda job: job["id"])]

    @property
    def unfit(self) -> dict[str, Any] | None:
        """What the public worker says."""
        self.agent._next_beat = 0.0
        self.agent.serve_queue()
        (worker,) = [one for one in self.reading.workers() if one["id"] == self.agent.id]
        assert (worker["state"] == "unfit") == (worker["unfit"] is not None)
        return worker["unfit"]


@pytest.fixture
def lab(tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    lab = Lab(tmp_path, database, monkeypatch)
    yield lab
    for agent in lab.agents:
        agent.close()


class TestSameFailures:
    @pytest.mark.parametrize("failure", [CRASH, CUDA, MISSING], ids=lambda failure: failure.code)
    def test_three_different_jobs_mean_the_host(self, lab: Lab, failure: Failed) -> None:
        jobs = [lab.submit(failure, max_attempts=1) for _ in range(5)]
        lab.serve()
        assert lab.states == ["queued"] * 5, "the two that had failed, too"
        unfit = lab.unfit
        assert unfit["code"] == "same_failures"
        assert failure.detail in unfit["reason"]
        assert unfit["next_try_at"] > unfit["since"]
        claims = sum(len(lab.reading.attempts(job_id)) for job_id in jobs)
        lab.pass_time(MIN_BACKOFF_S)
        tries = sum(len(lab.reading.attempts(job_id)) for job_id in jobs) - claims
        assert (tries, lab.states) == (1, ["queued"] * 5), "one job tells whether it is fit"
        lab.outcomes.clear()
        lab.pass_time(MAX_BACKOFF_S)
        assert lab.states == ["succeeded"] * 5
        assert lab.unfit is None

    @pytest.mark.parametrize(
        "outcomes",
        [
            [Failed("failed", "ValueError: no such thing")] * 4,
            [Failed("unsupported", "no such device")] * 4,
            [TIMEOUT] * 4,
            [Failed("crashed", f"killed by {signal}") for signal in ("SIGSEGV", "SIGBUS")] * 3,
            [CRASH, CRASH, Succeeded(), CRASH, CRASH],
        ],
        ids=["of their code", "unsupported", "timeouts", "different crashes", "a success between them"],
    )
    def test_a_jobs_own_fault_does_not(self, lab: Lab, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            lab.submit(outcome)
        lab.serve()
        assert lab.unfit is None
        assert lab.states == ["succeeded" if one == Succeeded() else "failed" for one in outcomes]

    @pytest.mark.parametrize("origin", ["one job, again and again", "equal specs", "a sweep"])
    def test_jobs_of_one_origin_count_once(self, lab: Lab, origin: str) -> None:
        if origin == "one job, again and again":
            job_id = lab.submit(CRASH)
            for _ in range(3):
                lab.serve()
                lab.queue.retry(job_id)
        elif origin == "equal specs":
            for _ in range(4):
                lab.submit(CRASH, seed=1)
        else:
            spec = {"kind": "benchmark", "device": "cpu", "model": {"size": "tiny"}}
            made = [spec_adapter.validate_python({**spec, "seed": seed}) for seed in range(5)]
            jobs = [NewJob(one, point={"seed": seed}) for seed, one in enumerate(made)]
            lab.queue.submit_sweep("s", {}, spec, {"seed": list(range(5))}, [], jobs)
            lab.outcomes.update(dict.fromkeys(range(1, 6), CRASH))
        lab.serve()
        assert (set(lab.states), lab.unfit) == ({"failed"}, None)

    def test_neighbours_that_succeed_do_not_excuse_a_job_for_ever(self, lab: Lab) -> None:
        """On a host with several GPUs, others run well between the failures."""
        for _ in range(SAME):
            lab.submit(CRASH)
        for _ in range(int(BLAMED_S / MAX_BACKOFF_S) + 10):
            lab.pass_time(MAX_BACKOFF_S)
            lab.agent.fitness.ran_well()
        assert lab.states == ["failed"] * SAME

    @pytest.mark.parametrize(
        ("words", "may_be_the_hosts"),
        [
            (WRONG_KERNEL, False),
            ("RuntimeError: CUDA error: too many resources requested for launch", False),
            ("ImportError: cannot import name 'step' from 'model'", True),
            ("RuntimeError: CUDA driver initialization failed, you might not have a CUDA gpu.", True),
        ],
    )
    @pytest.mark.parametrize("is_uploaded", [True, False], ids=["versions of a step", "control: other jobs"])
    def test_versions_of_uploaded_code_are_one_job(self, lab, words, may_be_the_hosts, is_uploaded: bool) -> None:
        fit, failure = fitness.Fitness(lab.clock), Failed("failed", words)
        blamed = []
        for number in range(2 * SAME):
            spec: dict[str, Any] = {"step": {"sha256": f"{number:064}", "function": "step"}} if is_uploaded else {}
            blamed.append(fit.blame(claim_of(number, {"kind": "benchmark", "seed": number, **spec}), failure))
        assert any(blamed) == (may_be_the_hosts and not is_uploaded)

    def test_many_wrong_jobs_blame_the_host_no_longer_than_one(self, lab: Lab) -> None:
        fit, failure = fitness.Fitness(lab.clock), Failed("failed", "ImportError: cannot import name 'step'")
        blamed = []
        for number in range(3 * SAME):
            blamed.append(fit.blame(claim_of(number, {"kind": "benchmark", "seed": number}), failure) is not None)
            lab.clock.sleep(BLAMED_S * (number == SAME) + 1)
        assert blamed == [SAME - 1 <= number <= SAME for number in range(3 * SAME)]

    @pytest.mark.parametrize("users", [1, 2])
    def test_one_user_of_several_does_not_stop_the_worker(self, lab: Lab, users: int) -> None:
        """Where there are tokens of several users; the lab's other tests are the control: there is one user."""
        for name in ("ada", "bob"):
            Tokens(lab.database).create(name, "submit", None)
        for number in range(2 * SAME):
            lab.submit(CRASH, max_attempts=1, submitted_by=("ada", "bob")[number % users])
        lab.serve()
        assert (lab.unfit is None, lab.states) == (
            (True, ["failed"] * 2 * SAME) if users == 1 else (False, ["queued"] * 2 * SAME)
        )

    def test_excused_jobs_are_queued_again_once_the_store_can_be_written(self, lab, monkeypatch) -> None:
        retry, is_busy = lab.agent._queue.retry, [True]

        def retry_later(job_id: int) -> dict[str, Any]:
            if is_busy:
                raise DatabaseBusy("Others write.")
            return retry(job_id)

        monkeypatch.setattr(lab.agent._queue, "retry", retry_later)
        for _ in range(SAME):
            lab.submit(CRASH, max_attempts=1)
        with pytest.raises(DatabaseBusy):
            lab.serve()
        assert lab.states == ["failed", "failed", "queued"]
        is_busy.clear()
        lab.serve()
        assert lab.states == ["queued"] * SAME


def full_disk(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    statvfs, disk = host_check.os.statvfs, {"f_frsize": 1 << 10, "f_blocks": 1 << 30}
    monkeypatch.setattr(host_check.os, "statvfs", lambda _: SimpleNamespace(**disk, f_bavail=1 << 10))
    return lambda: monkeypatch.setattr(host_check.os, "statvfs", statvfs)


def no_package(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    monkeypatch.setattr(host_check.missing_packages, "__defaults__", (("torch", "a_package_that_was_removed"),))
    return lambda: monkeypatch.setattr(host_check.missing_packages, "__defaults__", (("torch",),))


def lost_gpu(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    read = {"devices": [{"type": "cuda", "uuid": GPU.uuid, "lost": True}]}
    lab.agent._loads._latest = read
    return lambda: read["devices"][0].pop("lost") and None


def silent_driver(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    answers = threading.Event()
    clock = Clock()
    loads = lab.agent._loads
    loads.__init__(HOST, 0.01, lambda _host: answers.wait(20) and {"devices": []}, clock)  # type: ignore[misc]
    loads.start()
    wait_until(lambda: loads._reading_since is not None, what="a reading")
    clock.sleep(SILENT_S + 1)

    def answer() -> None:
        answers.set()
        wait_until(lambda: loads.trouble() is None, what="the driver's answer")

    return answer


CAUSES = {
    "disk_full": full_disk,
    "package_missing": no_package,
    "device_lost": lost_gpu,
    "driver_silent": silent_driver,
}


@pytest.mark.parametrize("code", CAUSES)
class TestCauses:
    def test_it_claims_nothing_until_that_is_over(self, lab: Lab, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
        mend = CAUSES[code](lab, monkeypatch)
        job_id = lab.submit()
        lab.serve()
        unfit = lab.unfit
        assert (unfit["code"], lab.states) == (code, ["queued"])
        assert "every worker that could run it is unfit now" in str(lab.reading.job(job_id)[0]["waiting"])
        lab.pass_time(MIN_BACKOFF_S)
        assert (lab.states, lab.reading.attempts(job_id)) == (["queued"], []), "an examination costs no job a claim"
        mend()
        lab.pass_time(MAX_BACKOFF_S)
        assert (lab.states, lab.unfit) == (["succeeded"], None)

    def test_a_job_that_fails_meanwhile_goes_back(self, lab, code, monkeypatch) -> None:
        """It fails because of that, since the worker was fit when it claimed the job."""
        mend: list[Callable[[], None]] = []

        def fail(_run: JobRun) -> Outcome:
            mend.append(CAUSES[code](lab, monkeypatch))
            return TIMEOUT if code == "driver_silent" else CRASH

        monkeypatch.setattr(JobRun, "_run_units", fail)
        job_id = lab.submit(max_attempts=1)
        lab.serve()
        assert [one["state"] for one in lab.reading.attempts(job_id)] == ["given_back"]
        job = lab.reading.job(job_id)[0]
        assert (job["state"], job["attempt"]) == ("queued", 0)
        mend[0]()

    def test_control_without_it_the_job_fails(self, lab, code, monkeypatch) -> None:
        CAUSES[code](lab, monkeypatch)()
        lab.submit(CRASH, max_attempts=1)
        lab.serve()
        assert (lab.states, lab.unfit) == (["failed"], None)


def test_a_store_that_is_away_keeps_results_and_takes_no_jobs(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    away, waits = [True], threading.Event()

    def store(run: JobRun) -> Outcome:
        def action() -> None:
            if away:
                raise StoreUnreachable("It does not answer.")

        monkeypatch.setattr(run, "_sleep", lambda _: waits.set() or threading.Event().wait(0.01))
        run._patiently(action, lambda _: None)
        return Succeeded()

    monkeypatch.setattr(JobRun, "_run_units", store)
    monkeypatch.setattr(lab.agent._artifacts, "probe", lambda: None)
    lab.submit()
    lab.submit()
    lab.agent.serve_queue()
    assert waits.wait(20)
    lab.agent.serve_queue()
    unfit = lab.unfit
    assert unfit["code"] == "store_unreachable"
    assert sorted(lab.states) == ["queued", "running"]
    away.clear()
    lab.serve()  # the result that could be stored tells that the worker is fit
    assert (lab.states, lab.unfit) == (["succeeded"] * 2, None)


def test_tries_become_rarer_until_a_job_has_succeeded(lab: Lab) -> None:
    fit, waits = lab.agent.fitness, []
    for number in range(9):
        if number == 8:
            fit.ran_well()
        fit.lose(Unfit("disk_full", "it is full"))
        waits.append(fit._next_try - lab.clock())
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, MIN_BACKOFF_S]


def test_what_the_driver_says_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        NVMLError = pynvml.NVMLError
        NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED = 15, 16

        def __init__(self, code: int | None) -> None:
            self.code = code

        def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802 - NVML's name
            return uuid

        def nvmlDeviceGetMemoryInfo(self, _handle: str) -> None:  # noqa: N802 - NVML's name
            if self.code is not None:
                raise pynvml.NVMLError(self.code)

    said = {code: nvml.is_lost(GPU.uuid, lambda code=code: Library(code)) for code in (None, 3, 15, 16)}
    assert said == {None: False, 3: False, 15: True, 16: True}
    for lost in (True, False):
        _, device = readings.read(Host((GPU,), 1, 1), lambda _: None, lambda _, lost=lost: lost)["devices"]
        assert bool(device.get("lost")) == lost


class TestVersions:
    """A worker whose specs are not the server's."""

    def newer_server(self, lab: Lab, *, number: int = SCHEMA, print_: str = "other") -> None:
        with lab.database.write() as connection:
            newest = {"version": "9.9", "schema_number": number, "fingerprint": print_}
            service_settings.put(connection, service_settings.SERVER, newest)

    def unreadable(self, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> int:
        """A job whose spec this worker cannot read."""
        monkeypatch.undo()
        job_id = lab.submit(max_attempts=1)
        with lab.database.write() as connection:
            connection.exec_driver_sql("""UPDATE job SET spec = '{"kind": "benchmark", "new_field": 1}'""")
        return job_id

    @pytest.mark.parametrize(("number", "code"), [(SCHEMA, "too_old"), (SCHEMA - 1, "too_new")])
    def test_a_job_that_it_cannot_read_goes_back(self, lab, monkeypatch, number, code) -> None:
        self.newer_server(lab, number=number)
        job_id = self.unreadable(lab, monkeypatch)
        lab.serve()
        lab.pass_time(10 * MAX_BACKOFF_S)
        assert [one["state"] for one in lab.reading.attempts(job_id)] == ["given_back"], "once"
        unfit = lab.unfit
        assert (unfit["code"], unfit["next_try_at"]) == (code, None)
        assert "9.9" in unfit["reason"]

    def test_control_a_damaged_spec_is_the_jobs_fault(self, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
        announce_server(lab.database)
        job_id = self.unreadable(lab, monkeypatch)
        lab.serve()
        error = lab.reading.job(job_id)[0]["error"]
        assert error["code"] == "unreadable"
        assert "new_field" in error["detail"]
        assert len(error["detail"]) < 200
        assert lab.unfit is None

    def test_it_hears_of_a_newer_server_and_claims_nothing(self, lab: Lab) -> None:
        self.newer_server(lab, number=SCHEMA + 1)
        lab.agent._next_beat = 0.0
        lab.submit()
        lab.serve()
        unfit = lab.unfit
        assert (unfit["code"], lab.states) == ("too_old", ["queued"])
        findings = [one.found for one in examine(Settings(data_dir=lab.folder / "data")) if one.name == "workers"]
        assert any("is unfit" in found and "9.9" in found for found in findings)

    def test_no_old_worker_claims_what_waits_in_a_clusters_queue(self, lab: Lab) -> None:
        """Workers of release 0.1.0 know no waiting there, and pass over a job that needs several nodes."""
        lab.submit()
        with lab.database.write() as connection:
            connection.exec_driver_sql("UPDATE job SET requirements = '[]'")
        assert lab.queue.claim("slurm", lab.agent._offer(lab.agent._locks.take_free()), "it is pending")
        with lab.database.read() as connection:
            job = connection.execute(select(tables.job)).one()
        assert (job.state, job.requirements) == ("queued", [name_of(SCHEMA)])

    def test_only_a_worker_that_reads_a_jobs_schema_claims_it(self, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
        job_id = lab.submit()
        with lab.database.write() as connection:
            newer = f'["{name_of(SCHEMA + 1)}"]'
            connection.exec_driver_sql(f"UPDATE job SET requirements = '{newer}'")
        lab.serve()
        assert lab.states == ["queued"]
        assert "as new as the server" in str(lab.reading.job(job_id)[0]["waiting"])
        with lab.database.write() as connection:  # a server of release 0.1.0 named no schema
            connection.exec_driver_sql("UPDATE job SET requirements = '[]'")
        lab.serve()
        assert lab.states == ["succeeded"]

    def test_a_worker_that_does_not_know_is_shown_as_too_old(self, lab: Lab) -> None:
        Registration(lab.database).register_worker("old", "host", 1, [], [], [], {"flopwatch": "0.1.0"})
        with lab.database.write() as connection:
            connection.exec_driver_sql("UPDATE worker SET schema_number = NULL WHERE id = 'old'")
        (old,) = [one for one in lab.reading.workers() if one["id"] == "old"]
        assert (old["state"], old["unfit"]["code"]) == ("unfit", "too_old")

    def test_another_schema_has_another_number(self) -> None:
        """Raise SCHEMA when this fails: workers of the last release cannot read these specs. A release adds its own
        number and fingerprint to RELEASED."""
        assert (max(RELEASED) < SCHEMA) == (fingerprint() not in RELEASED.values())
        assert name_of(1).startswith("nodes:"), "for workers of release 0.1.0"
