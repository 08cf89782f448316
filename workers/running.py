"""One claimed job while it runs: its units one after the other, what they tell, and how it ends."""

from __future__ import annotations

import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from app.errors import DatabaseBusy, DiskFull, LeaseLost, job_problem
from app.settings import Settings
from app.specs import SpecBase
from app.store.artifacts import ArtifactFiles
from app.store.queue import Queue
from app.store.records import Claim, Finish, NewEvent, StoredArtifact
from workers.devices import Lease
from workers.jobs import runner_for
from workers.jobs._base import Resumable, Runner, Unit, parse_spec
from workers.keeper import Request
from workers.launch import Launcher
from workers.outcome import (
    Abandoned,
    Cancelled,
    Failed,
    GivenBack,
    Outcome,
    RunnerError,
    Succeeded,
    failure_code,
)
from workers.spool import Spool
from workers.unit_run import Listener, StopSignal, Timeout, UnitRun

logger = logging.getLogger(__name__)

RETRY_S = 0.5
EXCERPT_BYTES = 4096
ARTIFACT_NAME = re.compile(r"[\w-][\w.-]{0,199}", re.ASCII)


class JobRun:
    """Runs one claim in a thread of its own; the agent renews the claim meanwhile.

    Only the thread touches the process, the spool and the queue's fenced writes; `stop` is the one call from outside.
    """

    def __init__(
        self,
        claim: Claim,
        lease: Lease,
        *,
        queue: Queue,
        artifacts: ArtifactFiles,
        launcher: Launcher,
        settings: Settings,
        neighbours: list[int],
        on_end: Callable[[], None],
    ) -> None:
        self.claim = claim
        self.stop = StopSignal()
        self._lease = lease
        self._queue = queue
        self._artifacts = artifacts
        self._launcher = launcher
        self._grace_s = settings.grace_s
        self._neighbours = neighbours
        self._on_end = on_end
        self._starts = 0
        self._unit_done: int | None = None
        """Steps that the unit that runs, or ran last, has told of."""
        self._spool = Spool()
        self._events: list[NewEvent] = []
        self._held: list[str] = []
        self._scratch = scratch_root(settings) / f"{os.getpid()}-{claim.job_id}-{claim.attempt}"
        self._timeout = Timeout.after(claim.timeout_s)
        self._thread = threading.Thread(target=self._run, name=f"job-{claim.job_id}")

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether the outcome is recorded (or nothing may be) and the devices are given back."""
        return not self._thread.is_alive()

    def join(self) -> None:
        """Wait for the end and free what is left."""
        self._thread.join()
        self.stop.close()

    def _run(self) -> None:
        try:
            outcome = self._run_units()
            self._spool.log.end()
            self._record(outcome)
        except LeaseLost:
            logger.warning("job %s: the lease was lost; nothing more was recorded", self.claim.job_id)
        except Exception as error:
            logger.exception("job %s: its results cannot be recorded", self.claim.job_id)
            self._record_failure(error)
        finally:
            self._artifacts.release(self._held)
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._lease.release()
            self._on_end()

    def _run_units(self) -> Outcome:
        try:
            runner, spec = runner_for(self.claim.kind), parse_spec(self.claim.spec)
            units = runner.plan(spec)
        except RunnerError as error:
            return Failed(error.code, str(error))
        except Exception as error:
            logger.exception("job %s could not be planned", self.claim.job_id)
            return Failed("failed", f"{type(error).__name__}: {error}")
        for index, planned in enumerate(units):
            unit: Unit | None = planned
            while unit is not None:
                outcome = self.stop.reason or self._run_unit(unit, index, len(units))
                unit = self._rest_of(unit, outcome, runner, spec)
            if not isinstance(outcome, Succeeded):
                return outcome
        return Succeeded()

    def _rest_of(self, unit: Unit, outcome: Outcome, runner: Runner, spec: SpecBase) -> Unit | None:
        """What is left to run of a unit that crashed, where its runner can go on after that."""
        if not (isinstance(outcome, Failed) and outcome.code == "crashed" and isinstance(runner, Resumable)):
            return None
        if self._unit_done is None:
            return None
        logger.info("job %s: going on after a crash in step %s: %s", self.claim.job_id, self._unit_done, outcome.detail)
        return runner.resume(spec, unit, self._unit_done, outcome)

    def _run_unit(self, unit: Unit, index: int, count: int) -> Outcome:
        self._unit_done = None
        self._starts += 1
        scratch = self._scratch / str(self._starts)
        try:
            scratch.mkdir(parents=True)
        except OSError as error:
            return Failed(failure_code(error), f"{self._scratch}: {error.strerror}")
        visible = ",".join(gpu.uuid for gpu in self._lease.gpus)
        request = Request(
            kind=self.claim.kind,
            spec=self.claim.spec,
            unit=asdict(unit),
            scratch=str(scratch),
            environment={"CUDA_VISIBLE_DEVICES": visible, **unit.environment},
        )
        try:
            process = self._launcher.start(request, unit.start, self._lease.descriptors)
        except RunnerError as error:
            return Failed(error.code, str(error))
        listener = Listener(
            message=lambda message: self._take(message, unit, index, count),
            output=self._spool.log.write,
            flush=self._flush,
        )
        try:
            return UnitRun(process, listener, self.stop, timeout=self._timeout, grace_s=self._grace_s).run()
        finally:
            process.close()

    def _take(self, message: dict[str, Any], unit: Unit, index: int, count: int) -> None:
        """Take one message of a unit's (see child.py)."""
        match message["type"]:
            case "started":
                self._progress(index, count, unit.title)
                self._flush()
            case "progress":
                done, total = int(message["done"]), int(message["total"])
                self._progress(index * total + done, count * total, str(message["message"]))
                self._unit_done = done
            case "measurement":
                self._spool.add_measurement(message["measurement"])
            case "artifact":
                self._take_artifact(Path(message["path"]), message["name"], message["kind"], message["media_type"])
            case "environment":
                self._spool.add_environment(message["environment"], self._neighbours)
            case "validity":
                self._spool.add_validity(unit.title, message["validity"])
            case other:
                raise ValueError(f"unknown message type {other!r}")

    def _take_artifact(self, path: Path, name: str, kind: str, media_type: str) -> None:
        """Move a unit's file into the store."""
        if not ARTIFACT_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no artifact's name: letters, digits, '.', '_', '-'")
        # What is moved is gone afterwards, and a pipe or a device would never end.
        if not path.resolve().is_relative_to(self._scratch.resolve()) or not path.is_file():
            raise ValueError(f"{path} is no file in the unit's scratch folder")
        sha256, size = self._artifacts.put(path)
        self._held.append(sha256)
        self._spool.artifacts.append(StoredArtifact(name, str(kind), str(media_type), size, sha256))
        path.unlink()

    def _progress(self, done: int, total: int, message: str) -> None:
        # Only the newest counts: followers want where it is, not where it was.
        self._events = [event for event in self._events if event.type != "progress"]
        self._events.append(NewEvent("progress", {"done": done, "total": total, "message": message}))

    def _flush(self) -> None:
        """Write new events to the queue; when the database is busy or full they wait for the next time."""
        text = self._spool.log.drain()
        if text:
            self._events.append(NewEvent("log", {"text": text}))
        if not self._events:
            return
        try:
            self._queue.report(self.claim, self._events)
        except (DatabaseBusy, DiskFull) as error:
            logger.warning("job %s: events wait: %s", self.claim.job_id, error)
        else:
            self._events.clear()

    def _record(self, outcome: Outcome) -> None:
        """Commit the outcome with all that was measured; tries until it lands or the lease is lost."""
        while not isinstance(outcome, Abandoned) and not isinstance(self.stop.reason, Abandoned):
            try:
                if isinstance(outcome, GivenBack):
                    self._queue.give_back(self.claim)
                else:
                    self._flush()
                    self._queue.finish(self.claim, self._finish(outcome))
            except (DatabaseBusy, DiskFull) as error:
                logger.warning("job %s: its result waits: %s", self.claim.job_id, error)
                time.sleep(RETRY_S)
            else:
                return

    def _record_failure(self, error: Exception) -> None:
        """Fail the job for an error of ours; without results, since they may be what the store did not take.

        When even that is impossible, the lease runs out and the watcher says that the worker was lost.
        """
        self._events.clear()
        self._spool.forget_results()
        try:
            self._record(Failed("failed", f"the worker could not go on with the job: {type(error).__name__}: {error}"))
        except LeaseLost:
            logger.warning("job %s: the lease was lost; nothing more was recorded", self.claim.job_id)
        except Exception:
            logger.exception("job %s: its failure cannot be recorded either", self.claim.job_id)

    def _finish(self, outcome: Outcome) -> Finish:
        spool = self._spool
        state: Literal["succeeded", "failed", "cancelled"] = "succeeded"
        error: dict[str, Any] | None = None
        if isinstance(outcome, Failed):
            excerpts = {"log_head": spool.log.head(EXCERPT_BYTES), "log_tail": spool.log.tail(EXCERPT_BYTES)}
            state, error = "failed", job_problem(outcome.code, outcome.detail, **outcome.extensions, **excerpts)
        elif isinstance(outcome, Cancelled):
            state, error = "cancelled", job_problem("cancelled", "The job was cancelled while it ran.")
        return Finish(
            state=state,
            error=error,
            measurements=spool.measurements,
            artifacts=spool.artifacts,
            environment=spool.environment,
            validity=spool.validity,
            log=spool.log.text(),
        )


def scratch_root(settings: Settings) -> Path:
    """Where units leave files before they are stored; on the store's own disk."""
    return settings.data_dir / "scratch"
