"""What becomes of a job whose allocation ends before the job began, however it ends. The queue is real, and Slurm's
commands are played."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.errors import LeaseLost
from app.specs.benchmark import BenchmarkSpec
from app.store.database.engine import Database
from app.store.queue.transitions import Queue
from app.store.reading.queries import Reading
from app.store.records import HandedOver, NewJob, Offer
from tests.clock import Clock
from workers.agent.agent import capabilities
from workers.agent.fitness import BLAMED_S
from workers.outcome import GivenBack
from workers.slurm import allocations
from workers.slurm.allocations import PAUSE_S, TRIES, Allocation, Allocations
from workers.slurm.client import CommandFailed, NoAnswer, SlurmClient
from workers.slurm.handover import HandOverFolder
from workers.slurm.settings import SlurmSettings

OFFER = Offer(frozenset({"benchmark"}), capabilities(allow_code=False), 0, 0, True)
WORDS = "Traceback\nCannotRunHere: the database does not accept connections"
SMALLEST = ["sbatch", "--test-only"]
"""The question whether Slurm takes any job."""


class PlayedSlurm(SlurmClient):
    """Keeps allocations, and refuses what a test says."""

    def __init__(self) -> None:
        super().__init__(10)
        self.rows: dict[str, list[str]] = {}
        self.refusals: list[CommandFailed] = []
        """What each sbatch says from now on for the job, `--test-only` or not, one after the other."""
        self.submitted = 0

    def _run(self, command: list[str], stdin: str = "") -> str:
        if command[0] == "squeue":
            return "\n".join("|".join(row) for row in self.rows.values())
        if command[0] == "scancel":
            for one in command[1:]:
                self.rows[one][1] = "CANCELLED"
        elif command != SMALLEST:
            if self.refusals:
                raise self.refusals.pop(0)
            if "--test-only" not in command:
                named = dict(argument[2:].split("=", 1) for argument in command if "=" in argument)
                self.submitted += 1
                row = [str(self.submitted), "PENDING", "Resources", named["job-name"], named["comment"]]
                self.rows[row[0]] = row
                return row[0]
        return ""


class Site:
    """One claimed job, and the thread's turns, one at a time."""

    def __init__(self, folder: Path, queue: Queue, reading: Reading, clock: Clock) -> None:
        self.queue, self.reading, self.clock = queue, reading, clock
        self.slurm = PlayedSlurm()
        self.folder = HandOverFolder(folder)
        self.watching = Allocations(
            SlurmSettings(folder=folder), self.folder, queue, client=self.slurm, on_end=lambda: None
        )
        self.job_id = int(queue.submit(NewJob(BenchmarkSpec())).response["id"])
        claim = queue.claim("login", OFFER, "it is being submitted")
        self.claim = claim
        self.allocation: Allocation = self.watching.add(claim)

    def turn(self) -> None:
        self.watching._turn()

    def end(self, state: str | None, words: str = "") -> None:
        """Submit an allocation, let it end in a state (None: Slurm knows nothing of it any more), and look."""
        before = self.slurm.submitted
        self.turn()
        assert self.slurm.submitted == before + 1, "it was submitted"
        if state is None:
            del self.slurm.rows[str(self.slurm.submitted)]
        else:
            self.slurm.rows[str(self.slurm.submitted)][1] = state
        self.folder.output_of(self.allocation.mark).write_text(words)
        self.turn()

    def take_over(self) -> None:
        """Do what the agent does: the job begins."""
        self.queue.take_over(HandedOver(self.job_id, 1, self.claim.token), "new", "agent")
        self.folder.file_of(self.allocation.mark).unlink()

    @property
    def job(self) -> dict[str, Any]:
        return self.reading.job(self.job_id)[0]

    @property
    def attempts(self) -> list[str]:
        return [one["state"] for one in self.reading.attempts(self.job_id)]


@pytest.fixture
def site(tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    clock = Clock()
    monkeypatch.setattr(allocations, "time", SimpleNamespace(monotonic=clock))
    site = Site(tmp_path / "handover", Queue(database), Reading(database), clock)
    yield site
    site.folder.close()


@pytest.mark.parametrize(("state", "words"), [("FAILED", WORDS), ("PREEMPTED", ""), (None, WORDS), (None, "")])
def test_whatever_ended_it_the_job_is_submitted_again_and_no_attempt_counts(site, state, words) -> None:
    for number in range(1, TRIES):
        site.end(state, words)
        assert (site.job["state"], site.job["attempt"], site.allocation.ended) == ("queued", 1, False)
        assert f"Slurm job {number} ended before it began" in site.job["waiting"]
        assert "it said nothing" in site.job["waiting"] if not words else words.split("\n")[1] in site.job["waiting"]
        pause_s = PAUSE_S * 2 ** (number - 1)
        site.clock.sleep(pause_s - 0.01)
        site.turn()
        assert site.slurm.submitted == number, "before its pause is over"
        site.clock.sleep(0.01)
    site.end(state, words)
    assert site.allocation.ended
    assert site.allocation.unfit.code == "allocation_failed"
    assert (site.job["state"], site.job["attempt"], site.attempts) == ("queued", 0, ["given_back"])


def test_a_job_that_no_allocation_can_begin_with_costs_an_attempt_in_the_end(site: Site) -> None:
    for number in range(1, TRIES):
        site.end("FAILED", WORDS)
        site.clock.sleep(BLAMED_S if number == 1 else PAUSE_S * 2 ** (number - 1))
    site.clock.sleep(1)
    site.end("FAILED", WORDS)
    assert site.allocation.unfit is not None
    assert (site.job["state"], site.job["attempt"], site.attempts) == ("queued", 1, ["lost"])


def test_the_job_begins_in_the_next_allocation(site: Site) -> None:
    site.end("FAILED", "connection refused")
    site.clock.sleep(PAUSE_S)
    site.turn()
    site.take_over()
    site.slurm.rows["2"][1] = "RUNNING"
    site.turn()
    assert (site.allocation.ended, site.allocation.succeeded, site.allocation.unfit) == (True, True, None)
    assert (site.job["state"], site.job["attempt"]) == ("running", 1)


@pytest.mark.parametrize("earlier", [0, TRIES - 1])
def test_control_a_job_that_has_begun_gets_no_other_allocation(site: Site, earlier: int) -> None:
    """It may have ended, and its allocation with it, between two looks."""
    for _ in range(earlier):
        site.end("FAILED", "connection refused")
        site.clock.sleep(60)
    site.turn()
    site.take_over()
    site.slurm.rows[str(site.slurm.submitted)][1] = "COMPLETED"
    site.turn()
    site.clock.sleep(60)
    site.turn()
    assert (site.slurm.submitted, site.job["state"]) == (earlier + 1, "running")
    assert (site.allocation.ended, site.allocation.unfit) == (True, None)


REFUSED = CommandFailed("sbatch ended with exit code 1: Requested node configuration is not available")
SILENT = NoAnswer("sbatch did not answer within 10 s")


@pytest.mark.parametrize(
    ("refusals", "state"),
    [
        ([REFUSED], "queued"),
        ([REFUSED, SILENT], "queued"),
        ([SILENT], "queued"),
        ([REFUSED, REFUSED], "failed"),  # the job's own request
    ],
    ids=["once", "once, then silent", "silent", "twice"],
)
def test_only_what_slurm_refuses_twice_fails(site: Site, refusals: list[CommandFailed], state: str) -> None:
    site.slurm.refusals += refusals
    site.turn()
    assert site.job["state"] == state
    if state == "failed":
        assert site.job["error"]["code"] == "unsupported"
        return
    site.clock.sleep(PAUSE_S)
    site.turn()
    assert (site.slurm.submitted, site.job["waiting"]) == (1, "Slurm job 1 is pending: Resources")


@pytest.mark.parametrize("error", [None, "the worker ended by an error"])
def test_a_worker_that_ends_costs_no_attempt(site: Site, error: str | None) -> None:
    if error is not None:
        site.end("FAILED")
    else:
        site.turn()
    site.allocation.set(GivenBack(error))
    site.turn()
    assert (site.job["state"], site.job["attempt"], site.attempts) == ("queued", 0, ["given_back"])
    with pytest.raises(LeaseLost):  # its allocation, should it begin
        site.take_over()


def test_a_job_that_was_lost_twice_gets_its_nodes_alone(site: Site) -> None:
    for alone in (False, True):
        allocation = Allocation(replace(site.claim, exclusive_host=alone), lambda: None)
        spec = BenchmarkSpec.model_validate({"device": "cuda"})
        settings = SlurmSettings(folder=site.folder.path, gpus_per_node=8)
        watching = Allocations(settings, site.folder, site.queue, client=site.slurm, on_end=lambda: None)
        assert ("--exclusive" in watching._arguments(allocation, spec)) is alone
