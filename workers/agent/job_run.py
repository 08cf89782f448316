"""Runs one claimed job: starts its units one after the other, takes their messages, and records how the job ends."""

import itertools
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from pydantic import ValidationError

from app.errors import STORE_UNAVAILABLE, Damaged, DiskFull, LeaseLost, NotFound, StoreUnreachable, job_problem
from app.logs import note_job
from app.settings import Settings
from app.specs import SpecBase
from app.specs._base import MAX_CELLS
from app.specs._code import ALLOW_IT, codes_of
from app.specs._schema import fingerprint
from app.store.database.locking import patience
from app.store.files.store import FileStore
from app.store.queue.transitions import Queue
from app.store.records import Claim, Finish, NewEvent
from flopwatch.text.times import current_time, duration
from kernels.clock import now_s
from workers import messages, uploaded
from workers.agent.ahead import Ahead, units_at_a_time
from workers.agent.fitness import Judge, Unfit, may_be_the_hosts, of_another_version
from workers.agent.host_check import of_store
from workers.agent.spool import Spool
from workers.agent.unit_run import RECORD_S, Listener, StopSignal, Timeout, UnitRun, Wrapper
from workers.devices.locks import HeldDevices
from workers.jobs import runner_for
from workers.jobs._base import Adaptive, Collecting, Resumable, Runner, SoFar, Unit, Wrapping, parse_spec
from workers.measure.table import TooLarge
from workers.outcome import (
    Abandoned,
    Cancelled,
    Failed,
    GivenBack,
    HostExhausted,
    InvalidEnvironment,
    Outcome,
    RunnerError,
    Succeeded,
    Unsupported,
    describe_error,
    failure_code,
    is_exhausted,
)
from workers.processes import last_words
from workers.processes.keeper import Request
from workers.processes.launch import Launcher, Process
from workers.working_directory import bytes_below, remove

logger = logging.getLogger(__name__)
Stored = TypeVar("Stored")

RETRY_S = 0.5
LEFTOVERS_S = 60.0
"""Seconds that killed processes may take to end, while their driver releases a GPU's memory."""
LEFTOVERS_LOOK_S = 0.05
EXCERPT_BYTES = 4096
LONG_S = 10.0
"""Seconds after which progress says since when the unit is at the same place."""
LOOK_S, LOOKS_PART = 1.0, 0.01
"""Seconds between two looks at a unit's folder, and the largest part of the time that they may take, since the unit is
being measured."""


@dataclass(frozen=True)
class _ReceivedFile:
    """An artifact's file that the unit has handed over and that is not stored yet."""

    path: Path
    public_name: str
    size: int
    """Its size in bytes when it was handed over."""
    kind: str
    media_type: str


@dataclass
class _Process:
    """The work that a unit's process was started for, and its progress."""

    unit: Unit
    index: int
    count: int
    """Number of units in the job."""
    scratch: Path
    task: Literal["run", "collect"] = "run"
    cursor: int | None = None
    """The step that the process works on, if it reports one."""
    told: messages.Progress | None = None
    """The last progress that it has told."""
    told_s: float = 0.0
    """When that was, on the clock."""
    stuck: str = ""
    """What it was doing when it was last said that it takes long."""

    def place(self, done: int, total: int) -> tuple[int, int]:
        """Return how far the job is, after `done` of `total` steps of this unit: of several units, the number that is
        done, since each stage of a unit may count other steps."""
        return (done, total) if self.count == 1 else (self.index, self.count)


CODES_OF_WRAPPERS = {"failed", "crashed", "invalid_environment"}
"""Codes of failures that the command around a unit may have caused."""


class _Interrupted(Exception):
    """The job must end while its artifacts are being stored."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__("the job had to end before it was stored")
        self.outcome = outcome


class JobRun:
    """Runs one claim in a thread of its own; the agent renews the claim meanwhile.

    Only that thread uses the process, the spool and the queue's fenced writes; other threads only set `stop`.
    """

    def __init__(
        self,
        claim: Claim,
        devices: HeldDevices,
        *,
        queue: Queue,
        artifacts: FileStore,
        launcher: Launcher,
        settings: Settings,
        scratch: Path,
        neighbours: list[int],
        on_end: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
        environment: Mapping[str, str] = MappingProxyType({}),
        settle_s: float = 0.0,
        judge: Judge = Judge(),  # noqa: B008 - it is frozen
    ) -> None:
        self.claim = claim
        self._environment = environment
        self._settle_s = settle_s
        self._clock = clock
        self._sleep = sleep
        self.stop = StopSignal(clock)
        self.unfit: Unfit | None = None
        """Why the job went back, or its results wait, if that is the host's fault."""
        self.succeeded = False
        self._judge = judge
        self.devices = devices
        self._queue = queue
        self._artifacts = artifacts
        self._launcher = launcher
        self._grace_s = settings.grace_s
        self._ceilings = settings.ceilings_dir
        self._allow_code = settings.allow_code
        self._code: list[bytes] = []
        """The uploaded files that the spec names."""
        self._on_end = on_end
        self._starts = 0
        self._spool = Spool(neighbours)
        self._max_artifact_bytes = settings.max_artifact_bytes
        self._artifact_bytes = 0
        """Bytes of the job's artifacts; one that is not stored yet counts with its size when it was handed over."""
        self._storing_until = float("inf")
        self._events: list[NewEvent] = []
        self._cells = 0
        self._next_look = 0.0
        """When to look at the unit's folder again, on the clock."""
        self._received: list[_ReceivedFile] = []
        self._held: list[str] = []
        self._scratch = scratch / f"{os.getpid()}-{claim.job_id}-{claim.attempt}"
        self._first_began = self._second_began = 0.0
        """When the first two units began, on the clock."""
        self._left = ""
        """How long the job still takes, in words, as of the beginning of the present unit."""
        self._ahead = Ahead(self._start_process, self.stop.descriptor)
        self._timeout = Timeout.after(None, clock())  # it runs from the first unit on
        self._thread = threading.Thread(target=self._run, name=f"job-{claim.job_id}")

    def start(self) -> None:
        """Start the thread. Raises RuntimeError when the host has no thread left."""
        try:
            self._thread.start()
        except BaseException:
            self.stop.close()
            raise

    @property
    def ended(self) -> bool:
        """Return True if the outcome is recorded (or must not be) and the devices are released."""
        return not self._thread.is_alive()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end; returns False if the timeout is over first."""
        self._thread.join(timeout_s)
        return self.ended

    def join(self) -> None:
        """Wait for the end and free the remaining resources."""
        self._thread.join()
        self.stop.close()

    def _run(self) -> None:
        note_job(self.claim.job_id, self.claim.attempt)
        with ExitStack() as at_end:  # each of these runs, whatever the others raise
            at_end.callback(self._on_end)
            at_end.callback(self.devices.release)
            at_end.callback(remove, self._scratch)
            at_end.callback(self._ahead.close)
            at_end.callback(lambda: self._artifacts.release(self._held))
            try:
                outcome = self._judged(self._settled(self._run_units()))
                self._spool.log.end()
                self._record(outcome)
            except LeaseLost:
                logger.warning("the lease was lost; nothing more was recorded")
            except BaseException as error:  # a SystemExit of somebody's code, too
                logger.exception("the worker cannot go on with it")
                self._record_error(error)

    def _settled(self, outcome: Outcome) -> Outcome:
        """Return the outcome of the units; of units that failed because the worker must end, that of the worker.

        A cluster's scheduler signals all processes of an allocation at once, and units may die before the worker hears
        of it.
        """
        if isinstance(outcome, Failed) and self._settle_s > 0:
            select.select([self.stop.descriptor], [], [], self._settle_s)
            if isinstance(self.stop.reason, GivenBack):
                return self.stop.reason
        return outcome

    def _judged(self, outcome: Outcome) -> Outcome:
        """Return the outcome of the units; of units that failed since this host is unfit, the job's return."""
        if not isinstance(outcome, Failed):
            return outcome
        if may_be_the_hosts(outcome) or outcome.code == "timeout":  # a GPU that computes nothing any more
            remove(self._scratch)  # a disk that was full of it is not
            found = self._judge.check_host(self.devices, self._artifact_bytes)
            if found is not None:
                return self._unfit_for(found, outcome)
        blamed = self._judge.blame(self.claim, outcome)
        return outcome if blamed is None else self._unfit_for(blamed, outcome)

    def _unfit_for(self, unfit: Unfit, failure: Failed | None = None) -> GivenBack:
        """Return how the job ends since this host is unfit."""
        logger.warning("the job goes back: %s%s", unfit.reason, f"; it had failed: {failure.detail}" if failure else "")
        self.unfit = unfit
        return GivenBack(unfit.reason if self._judge.unfit_counts else None)

    def _unreadable(self, error: ValidationError) -> Outcome:
        """Return the outcome of a job whose spec cannot be read: it is damaged, or this worker is of another version
        than the server that has read it."""
        server = self._queue.server()
        if server is not None and server["fingerprint"] != fingerprint():
            return self._unfit_for(of_another_version(server))
        wrong = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, wrong["loc"][1:]))
        return Failed("unreadable", f"its spec cannot be read: {place}: {wrong['msg']}")

    def _run_units(self) -> Outcome:
        try:
            runner, spec = runner_for(self.claim.kind), parse_spec(self.claim.spec)
            self._fetch_code()
            units = runner.plan(spec)
        except RunnerError as error:
            return Failed(error.code, str(error))
        except _Interrupted as error:
            return error.outcome
        except ValidationError as error:
            return self._unreadable(error)
        except BaseException as error:  # a SystemExit of somebody's code, too
            if is_exhausted(error):
                raise
            logger.exception("the job could not be planned")
            return Failed("failed", describe_error(error))
        if (not_clear := self._clear_devices()) is not None:
            return not_clear
        self._timeout = Timeout.after(self.claim.timeout_s, self._clock())
        done: list[Unit] = []
        seconds: list[float] = []
        while units:
            outcome = self._run_planned(units, len(done), seconds, runner, spec)
            if not isinstance(outcome, Succeeded):
                return outcome
            done += units
            so_far = SoFar(done, seconds, self._spool.rows())
            units = runner.further(spec, so_far) if isinstance(runner, Adaptive) else []
        if len(done) > 1:
            self._progress(len(done), len(done), done[-1].title)
            self._flush()
        failure = self._spool.failure()
        return Succeeded() if failure is None else Failed("failed", failure)

    def _run_planned(
        self, units: Sequence[Unit], before: int, seconds: list[float], runner: Runner, spec: SpecBase
    ) -> Outcome:
        """Run units that were planned together, one after the other, until one does not succeed. `before`: the number
        of the job's units before them. `seconds`: takes how long each took."""
        count = before + len(units)
        processes = [_Process(unit, index, count, self._next_scratch()) for index, unit in enumerate(units, before)]
        for number, process in enumerate(processes):
            begun = self._clock()
            with self._timeout_paused():
                # As many as start at a time, of those that need new interpreters.
                needing = itertools.takewhile(
                    lambda one: one.unit.start == "exec" and not one.unit.wrap, processes[number:]
                )
                self._ahead.start(list(itertools.islice(needing, units_at_a_time())))
            if self.stop.reason is not None:
                return self.stop.reason
            self._spool.begin_unit(process.index, process.unit.title, process.unit.side)
            outcome = self._run_unit(process, runner, spec)
            self._spool.end_unit(outcome)
            if isinstance(outcome, Failed) and process.unit.side is not None:
                return replace(outcome, detail=f"the {process.unit.side}: {outcome.detail}")
            if not isinstance(outcome, Succeeded):
                return outcome
            seconds.append(self._clock() - begun)
        return Succeeded()

    def _fetch_code(self) -> None:
        """Read the uploaded files that the spec names, of which each unit gets copies of its own. Raises Unsupported:
        this worker runs no uploaded code; InvalidEnvironment: a file is missing, or cannot be read; _Interrupted: the
        job must end, or goes back since the store cannot be used."""
        wanted = {sha256 for _, sha256 in codes_of(self.claim.spec)}
        if not wanted:
            return
        if not self._allow_code:
            raise Unsupported(f"this worker runs no uploaded code: {ALLOW_IT}")
        try:
            self._code = [self._artifacts.read(sha256) for sha256 in wanted]
        except StoreUnreachable as error:
            raise _Interrupted(self._unfit_for(Unfit("store_unreachable", error.detail))) from error
        except (NotFound, Damaged, OSError, *STORE_UNAVAILABLE) as error:
            raise InvalidEnvironment(f"the uploaded code cannot be read: {error}") from error

    def _clear_devices(self) -> Outcome | None:
        """End the processes that jobs of killed agents have left behind; return the job's outcome if that is
        impossible.

        In that case the job goes back to the queue and the attempt does not count. Such processes mostly wait for their
        driver: this host may run the job when the driver has recovered, another one at once.
        """
        if not self.devices.descriptors:  # it uses no device
            return None
        give_up_at = self._clock() + LEFTOVERS_S
        while pids := self._launcher.end_leftovers():
            if self.stop.reason is not None:
                return self.stop.reason
            if self._clock() >= give_up_at:
                named = ", ".join(map(str, pids))
                return self._unfit_for(Unfit("leftovers", f"processes of a killed worker's job do not end: {named}"))
            self._sleep(LEFTOVERS_LOOK_S)
        return None

    def _run_unit(self, process: _Process, runner: Runner, spec: SpecBase) -> Outcome:
        """Run a unit to its end, in several processes if it resumes after a crash or leaves files to collect."""
        while True:
            outcome = self._run_process(process, runner, spec)
            rest = self._resumed_unit(process, outcome, runner, spec)
            if rest is None:
                break
            remove(process.scratch)
            process = replace(process, unit=rest, scratch=self._next_scratch(), cursor=None)
        if isinstance(outcome, Succeeded) and process.unit.wrap and isinstance(runner, Collecting):
            outcome = self._run_process(replace(process, task="collect", cursor=None), runner, spec)
        remove(process.scratch)
        return outcome

    def _resumed_unit(self, process: _Process, outcome: Outcome, runner: Runner, spec: SpecBase) -> Unit | None:
        """Return the rest of a unit that crashed; None if its runner cannot resume after this outcome."""
        if not (isinstance(outcome, Failed) and outcome.code == "crashed" and isinstance(runner, Resumable)):
            return None
        if process.cursor is None or self.stop.reason is not None:
            return None
        try:
            rest = runner.resume(spec, process.unit, process.cursor, outcome)
        except Exception:
            logger.exception("its runner cannot go on after a crash")
            return None
        if rest is not None:
            logger.info("going on after a crash in step %s", process.cursor)
            self._spool.continue_after_crash(
                f"It went on in a fresh process after a crash in step {process.cursor}: {outcome.detail}"
            )
        return rest

    def _run_process(self, process: _Process, runner: Runner, spec: SpecBase) -> Outcome:
        """Run a unit, or collect its wrapper's files, in a fresh process; then store the files that it handed over."""
        wrap = list(process.unit.wrap) if process.task == "run" else []
        try:
            with self._timeout_paused():
                started = self._ahead.take(process) or self._start_process(process, None)
        except RunnerError as error:
            return Failed(error.code, str(error))
        except (OSError, HostExhausted) as error:
            if is_exhausted(error):
                raise
            return Failed(failure_code(error), f"the unit's process cannot be started: {error}")
        listener = Listener(
            message=lambda message: self._take(message, process),
            output=self._spool.log.write,
            flush=partial(self._tend, process),
        )
        wrapper = Wrapper(wrap[0], self._clock()) if wrap else None
        try:
            running = UnitRun(
                started,
                listener,
                self.stop,
                timeout=self._timeout,
                grace_s=self._grace_s,
                wrapper=wrapper,
                clock=self._clock,
            )
            outcome = running.run()
        finally:
            started.close()
        if not running.told:
            outcome = self._with_last_words(outcome, process)
        if wrapper is not None and isinstance(runner, Wrapping):
            outcome = self._after_wrapper(
                wrapper, outcome, partial(runner.wrapper_error, spec, process.unit, process.scratch)
            )
        return self._store_received(outcome)

    def _with_last_words(self, outcome: Outcome, process: _Process) -> Outcome:
        """Return how a process ended that has not told so itself, with where it was; its stacks go into the log."""
        self._spool.log.write(last_words.stacks_in(process.scratch).encode())
        if not isinstance(outcome, Failed):
            return outcome
        doing, seconds = self._doing(process)
        seconds -= self._clock() - self._timeout.deadline  # it had some more time to end by itself
        lasted = f" for {duration(seconds)}" if outcome.code == "timeout" else ""
        where = f": {doing}{lasted}" if doing else ""
        return replace(outcome, where=where + last_words.place_in(process.scratch))

    def _doing(self, process: _Process) -> tuple[str, float]:
        """Return what a process does, as far as that is known, and for how many seconds it has done it."""
        position = last_words.position_in(process.scratch)
        seconds = now_s() - position.began_s if position.inside else self._clock() - process.told_s
        stage = "" if process.told is None else process.told.message
        return ", ".join(filter(None, (stage, str(position)))), seconds

    @contextmanager
    def _timeout_paused(self) -> Iterator[None]:
        """Stop the timeout's clock: a job does not run yet while its process, or a new warm parent, imports torch."""
        begun = self._clock()
        try:
            yield
        finally:
            self._timeout = self._timeout.later(self._clock() - begun)

    def _start_process(self, process: _Process, gate: socket.socket | None) -> Process:
        unit, scratch, runs = process.unit, process.scratch, process.task == "run"
        if runs:
            scratch.mkdir(parents=True, exist_ok=True)
        code = uploaded.write(scratch / "code", self._code) if self._code and runs else {}
        visible = ",".join(gpu.uuid for gpu in self.devices.gpus)
        request = Request(
            kind=self.claim.kind,
            spec=self.claim.spec,
            unit=asdict(unit),
            scratch=str(scratch),
            environment={"CUDA_VISIBLE_DEVICES": visible, **self._environment, **code, **unit.environment},
            ceilings=str(self._ceilings),
            task=process.task,
            wrap=[word.replace("{scratch}", str(scratch)) for word in unit.wrap] if runs else [],
        )
        return self._launcher.start(request, unit.start if runs else "fork", self.devices.descriptors, gate=gate)

    def _after_wrapper(self, wrapper: Wrapper, outcome: Outcome, ask: Callable[..., str | None]) -> Outcome:
        """Return the failure of a wrapper that reported an error of its own, or the unchanged outcome."""
        failed = isinstance(outcome, Failed) and outcome.code in CODES_OF_WRAPPERS
        if not (failed or isinstance(outcome, Succeeded)):
            return outcome
        try:
            error = ask(wrapper.output.text(), succeeded=isinstance(outcome, Succeeded))
        except Exception as raised:
            logger.exception("the words of its wrapper cannot be read")
            return Failed("failed", describe_error(raised))
        if error is None:
            return outcome
        return Failed("invalid_environment", messages.cut(error))

    def _next_scratch(self) -> Path:
        self._starts += 1
        return self._scratch / str(self._starts)

    def _take(self, message: messages.Message, process: _Process) -> None:
        """Process one message from a unit, except its last one."""
        match message:
            case messages.Started():
                self._begin(process)
            case messages.Progress() if process.task == "run":
                process.told, process.told_s = message, self._clock()
                self._progress(*process.place(message.done, message.total), self._words(process, message.message))
            case messages.Progress():
                self._progress(process.index + 1, process.count, message.message)
            case messages.CellFinished():
                self._cell(process, message)
            case messages.Cursor():
                process.cursor = message.position
            case messages.ArtifactMade():
                self._take_artifact(process, message)
            case messages.Measured() | messages.TableMade() | messages.Environment() | messages.Validity():
                self._spool.add(message)
            case messages.Ended():
                raise ValueError("the last message is not for the job")

    def _begin(self, process: _Process) -> None:
        title = process.unit.title
        if process.index == 0:
            self._first_began = self._clock()
        if process.index == 1:
            self._second_began = self._clock()
        if process.task == "run":
            so_far = self._spool.replicates.so_far()
            self._left = self._time_left(process) + (f"; {so_far}" if so_far else "")
            self._progress(process.index, process.count, title + self._left)
            self._flush()
        else:
            self._progress(process.index + 1, process.count, f"{title}: reading what {process.unit.wrap[0]} wrote")

    def _words(self, process: _Process, message: str) -> str:
        """Return a unit's message; of several units, with its title, the time that the job still takes, and what is
        known so far."""
        return message if process.count == 1 else f"{process.unit.title}: {message}{self._left}"

    def _time_left(self, process: _Process) -> str:
        """Say how long the remaining units will take, once two have been measured: the first one often compiles. Of a
        kind with a budget nobody knows how many units follow."""
        if budget_s := self.claim.spec.get("budget_s"):
            left_s = budget_s - (self._clock() - self._first_began)
            return f"; at most about {duration(left_s)} left" if left_s >= 1 else ""
        trains = self.claim.spec.get("convergence_steps") is not None  # in a last unit, which takes another time
        ahead = process.count - trains - process.index
        if process.index < 2 or ahead == 0:
            return ""
        seconds = (self._clock() - self._second_began) / (process.index - 1) * ahead
        return f"; about {duration(seconds)} left{', then both sides are trained' if trains else ''}"

    def _take_artifact(self, process: _Process, artifact: messages.ArtifactMade) -> None:
        """Move a unit's file to a folder of ours. Storing it, which reads all of it, waits until the unit has ended.

        A unit that still has the file open may write to it until then. That is harmless: the store hashes the content
        when no process of the unit is left, so content and hash agree, and nobody can change the file afterwards.
        """
        file = Path(artifact.path).resolve()
        # Moving removes the file from its old place, and reading a pipe or a device would never end.
        if not file.is_relative_to(process.scratch.resolve()) or not file.is_file():
            raise ValueError(f"{artifact.path} is no file in the unit's scratch folder")
        public_name = self._spool.name_artifact(artifact.name)
        size = file.stat().st_size
        self._check_bytes(f"artifact {public_name!r}", size)
        self._artifact_bytes += size
        folder = self._scratch / "taken"
        folder.mkdir(exist_ok=True)
        moved = file.rename(folder / str(len(self._received)))
        self._received.append(_ReceivedFile(moved, public_name, size, artifact.kind, artifact.media_type))

    def _check_bytes(self, what: str, size: int) -> None:
        """Raise TooLarge if the job may not store `size` further bytes."""
        if self._artifact_bytes + size > self._max_artifact_bytes:
            raise TooLarge(
                f"{what} has {size} bytes or more, beside {self._artifact_bytes} of the job's other artifacts: the "
                f"worker keeps {self._max_artifact_bytes} of a job (FLOPWATCH_MAX_ARTIFACT_BYTES)"
            )

    def _store_received(self, outcome: Outcome) -> Outcome:
        """Store the files of a unit that has ended. Returns its outcome, or another one if storing fails."""
        received, self._received = self._received, []
        if isinstance(outcome, GivenBack | Abandoned):
            return outcome
        try:
            for file in received:
                self._artifact_bytes -= file.size  # it may have grown since
                check = partial(self._check_storing, file.public_name)
                put = partial(self._artifacts.put, file.path, check, self.claim)
                sha256, size = self._patiently(put, check)
                self._artifact_bytes += size
                self._held.append(sha256)
                file.path.unlink(missing_ok=True)
                self._spool.add_artifact(file.public_name, file.kind, file.media_type, size, sha256)
        except (OSError, TooLarge, _Interrupted, *STORE_UNAVAILABLE) as error:
            if isinstance(error, _Interrupted) and isinstance(error.outcome, GivenBack | Abandoned):
                return error.outcome
            if isinstance(outcome, Succeeded):
                return _not_stored(error)
            logger.warning("an artifact could not be stored: %s", error)
        return outcome

    def _patiently(self, action: Callable[[], Stored], check: Callable[[int], None]) -> Stored:
        """Return what `action` does with the store, and repeat it while the store or the database is unavailable. The
        job has its results, so it keeps them; until it has stored them, this worker is unfit, and no timeout runs.

        Raises what `check` and `action` raise; of STORE_UNAVAILABLE only DiskFull, of a disk that the job has filled.
        """
        while True:
            begun = self._clock()
            try:
                if self.unfit is not None:
                    self._artifacts.probe()  # each try of an upload leaves a row
                stored = action()
            except STORE_UNAVAILABLE as error:
                found = of_store(error)
                own = self._artifact_bytes + bytes_below(self._scratch)
                if isinstance(error, DiskFull) and self._judge.check_host(HeldDevices(), own) is None:
                    raise
                if self.unfit is None or found is None:
                    logger.warning("its files wait: %s", error)
                self.unfit = found
            else:
                self.unfit = None
                return stored
            check(0)
            self._sleep(RETRY_S)
            self._timeout = self._timeout.later(self._clock() - begun)

    def _check_storing(self, public_name: str, size: int) -> None:
        """Check whether storing may continue; called for each chunk of an artifact, with the bytes so far.

        A job that is cancelled or has timed out gets its grace period to store its results. A worker that ends has
        waited that long already. Raises _Interrupted: the job must end now; TooLarge: the job's artifacts exceed the
        limit of bytes.
        """
        reason, now = self.stop.reason, self._clock()
        if reason is not None and (self.stop.worker_ends or isinstance(reason, Abandoned)):
            raise _Interrupted(reason)
        if reason is not None or now >= self._timeout.deadline:
            self._storing_until = min(self._storing_until, now + self._grace_s)
            if now >= self._storing_until:
                raise _Interrupted(
                    reason or Failed("timeout", f"{self._timeout.detail}, while it stored {public_name}")
                )
        self._check_bytes(f"artifact {public_name!r}", size)

    def _progress(self, done: int, total: int, message: str) -> None:
        # Only the newest progress counts, since followers want to know the present state. Cells are results.
        self._events = [event for event in self._events if event.type != "progress" or "cell" in event.data]
        content = {"done": done, "total": total, "message": messages.cut(message)}
        self._events.append(NewEvent("progress", content))

    def _cell(self, process: _Process, finished: messages.CellFinished) -> None:
        """Report a finished cell as an event of its own, which a later progress does not replace."""
        self._cells += 1
        if self._cells > MAX_CELLS * process.count:  # this also bounds a unit that resumes after each crash
            raise ValueError(f"more than {MAX_CELLS} cells are finished")
        cell = {name: getattr(finished, name) for name in ("title", "outcome", "headline", "seconds")}
        text = f"{finished.title}: {finished.headline} ({duration(finished.seconds)})"
        self._progress(*process.place(finished.done, finished.total), self._words(process, text))
        self._events[-1] = NewEvent("progress", {**self._events[-1].data, "cell": cell})

    def _tend(self, process: _Process) -> None:
        """Write new events, and from time to time look at the size of the unit's folder. Raises TooLarge."""
        self._tell_since(process)
        self._flush()
        begun = self._clock()
        if begun < self._next_look:
            return
        size = bytes_below(process.scratch)
        now = self._clock()
        self._next_look = now + max(LOOK_S, (now - begun) / LOOKS_PART)
        self._check_bytes("its working directory", size)

    def _tell_since(self, process: _Process) -> None:
        """Say since when a unit does what it does, once that takes long: it may hang."""
        if process.told is None:
            return
        doing, seconds = self._doing(process)
        if seconds < LONG_S or doing == process.stuck:
            return
        process.stuck = doing
        since = current_time() - timedelta(seconds=seconds)
        words = self._words(process, f"{doing} since {since:%H:%M:%S} UTC")
        self._progress(*process.place(process.told.done, process.told.total), words)

    def _flush(self) -> None:
        """Write new events to the queue, without waiting long: meanwhile nobody drains the unit's pipes or ends it.
        Events that cannot be written now are left to the next call. If the lease is lost, the unit ends."""
        try:
            with patience(RETRY_S):
                self._report()
        except STORE_UNAVAILABLE as error:
            logger.warning("events wait: %s", error)
        except LeaseLost:
            self.stop.set(Abandoned())

    def _report(self) -> None:
        text = self._spool.log.drain()
        if text:
            self._events.append(NewEvent("log", {"text": text}))
        if self._events:
            self._queue.report(self.claim, self._events)
            self._events.clear()

    def _record(self, outcome: Outcome) -> None:
        """Commit the outcome with all results. Tries until the commit succeeds, the lease is lost, or the worker must
        end: it waits no longer for a store that may be gone for good."""
        while not isinstance(outcome, Abandoned) and not isinstance(self.stop.reason, Abandoned):
            try:
                with patience(max(RETRY_S, min(RECORD_S, self.stop.record_until - self._clock()))):
                    self._commit(outcome)
            except STORE_UNAVAILABLE as error:
                if self._clock() >= self.stop.record_until:
                    self._end_unrecorded(outcome, error)
                    return
                logger.warning("its result waits: %s", error)
                self._sleep(RETRY_S)
            else:
                self.succeeded = isinstance(outcome, Succeeded)
                return

    def _commit(self, outcome: Outcome) -> None:
        if isinstance(outcome, GivenBack) and outcome.error is not None:
            self._queue.give_up(self.claim, outcome.error)
        elif isinstance(outcome, GivenBack):
            self._queue.give_back(self.claim)
        else:
            self._report()
            self._queue.finish(self.claim, self._finish(outcome))

    def _end_unrecorded(self, outcome: Outcome, error: Exception) -> None:
        """End without the results, since the worker must end. A full disk may still have room for the reason: then the
        job need not wait for the end of its lease, and its attempt says why it ended."""
        reason = f"the worker had to end, and could not store how the job had ended: {describe_error(error)}"
        logger.error("%s", reason)
        if not isinstance(outcome, GivenBack):
            with suppress(*STORE_UNAVAILABLE), patience(RETRY_S):
                self._queue.give_up(self.claim, reason)
                return
        logger.error("it runs again, if it has attempts left, when its lease is over")

    def _record_error(self, error: BaseException) -> None:
        """End the attempt after an error of our own, without results, since the store may have refused these.

        The job fails, since a bug would occur again after hours of measuring. Only if the host lacks a resource does
        the job go back to the queue; the attempt counts.

        If even that is impossible, the lease runs out and the watcher records the worker as lost.
        """
        self._events.clear()
        self._spool.forget_results()
        reason = describe_error(error)
        self.unfit = Unfit("exhausted", f"a resource is used up: {reason}") if is_exhausted(error) else None
        outcome = (
            GivenBack(reason)
            if self.unfit is not None
            else Failed("failed", f"the worker could not go on with the job: {reason}")
        )
        try:
            self._record(outcome)
        except LeaseLost:
            logger.warning("the lease was lost; nothing more was recorded")
        except Exception:
            logger.exception("its failure cannot be recorded either")

    def _finish(self, outcome: Outcome) -> Finish:
        spool = self._spool
        state: Literal["succeeded", "failed", "cancelled"] = "succeeded"
        error: dict[str, Any] | None = None
        if isinstance(outcome, Failed):
            excerpts = {"log_head": spool.log.head(EXCERPT_BYTES), "log_tail": spool.log.tail(EXCERPT_BYTES)}
            detail = messages.cut(outcome.detail + outcome.where)
            state, error = "failed", job_problem(outcome.code, detail, **outcome.extensions, **excerpts)
        elif isinstance(outcome, Cancelled):
            state = "cancelled"  # the queue words the error
        return Finish(
            state=state,
            error=error,
            measurements=spool.measurements,
            tables=spool.tables,
            units=spool.units,
            artifacts=spool.artifacts,
            environment=spool.environment,
            validity=spool.validity,
            log=spool.log.text(),
        )


def _not_stored(error: Exception) -> Outcome:
    """Return the outcome of a unit that succeeded and whose artifacts could not be stored."""
    if isinstance(error, _Interrupted):
        return error.outcome
    if isinstance(error, TooLarge):
        return Failed("too_large", str(error))
    code = "storage_full" if isinstance(error, DiskFull) else "failed"
    return Failed(code, f"an artifact could not be stored: {error}")
