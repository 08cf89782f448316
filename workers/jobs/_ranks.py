"""Ranks that run beside a runner: they report while the runner processes complete results."""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from parallel.nodes import Nodes
from parallel.process_group import RanksFailed, RanksTimedOut, launch, log_file
from workers import uploaded
from workers.outcome import Crashed, InvalidEnvironment, RunnerError, Unsupported
from workers.reporter import Reporter

if TYPE_CHECKING:
    import torch

    from app.specs.collective import CollectiveSpec
    from app.specs.ddp import DdpSpec

LOG_BYTES = 16 << 10
"""Bytes of a rank's log, from its end, that go into the job's log."""
LOGS = "rank-{}.log"
VARIABLE = "PARALLEL_NODES"
"""The variable with the nodes of the job, as parallel.nodes has them."""


class RankReports:
    """Ranks that a thread has launched and waits for.

    Args:
        function: The function that each rank calls, as `parallel.process_group.launch` takes it.
        arguments: Its further arguments, plain data.
        folder: A new folder for the ranks' logs.
        step_timeout_s: Seconds that a rank may take from one `step_done` to the next.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        *,
        world_size: int,
        backend: str,
        folder: Path,
        step_timeout_s: float,
        nodes: int = 1,
    ) -> None:
        self._nodes = nodes_of_this_job(nodes)
        self.other_nodes: list[dict[str, Any]] = []
        """The environments of the other nodes, once the ranks have begun."""
        self._world_size, self._backend, self._folder = world_size, backend, folder
        self._reports: queue.SimpleQueue[tuple[int, Any] | Exception | None] = queue.SimpleQueue()
        self._end: Exception | None = None
        self._ended = False
        self.reported = False
        """True once a rank has reported anything."""
        folder.mkdir(parents=True)
        self._thread = threading.Thread(
            target=self._run, args=(function, arguments, step_timeout_s), name="ranks", daemon=True
        )
        self._thread.start()

    def _run(self, function: Callable[..., Any], arguments: Sequence[Any], step_timeout_s: float) -> None:
        try:
            launch(
                function,
                *arguments,
                world_size=self._world_size,
                backend=self._backend,
                folder=self._folder,
                step_timeout_s=step_timeout_s,
                reported=lambda rank, message: self._reports.put((rank, message)),
                nodes=self._nodes,
                met=self.other_nodes.extend,
            )
        except Exception as error:  # noqa: BLE001 - handed to the thread that takes the reports
            self._reports.put(error)
        else:
            self._reports.put(None)

    def next(self, timeout_s: float) -> tuple[int, Any] | None:
        """Return the next report, with its rank; None if there is none within the timeout. Raises EOFError: all ranks
        have returned; RanksFailed: a rank has failed, and all were ended; every later call raises it again."""
        if not self._ended:
            try:
                report = self._reports.get(timeout=timeout_s)
            except queue.Empty:
                return None
            if isinstance(report, tuple):
                self.reported = True
                return report
            self._ended, self._end = True, report
        if self._end is not None:
            raise self._end
        raise EOFError("all ranks have returned")

    def join(self) -> None:
        """Wait until no rank is left: until they have returned or failed, or until their timeout."""
        self._thread.join()

    def report_nodes(self, report: Reporter) -> None:
        """Add the environments of the other nodes to that of the unit."""
        if self.other_nodes:
            report.environment({"other_nodes": self.other_nodes})

    def report_logs(
        self,
        report: Reporter,
        failure: RunnerError | None = None,
        blamed: int | None = None,
        of: Collection[int] | None = None,
    ) -> None:
        """Copy the end of each rank's output, or of these ranks', to the job's log. After a failure, keep the blamed
        rank's log, or all."""
        for rank in range(self._world_size) if of is None else sorted(of):
            file = log_file(self._folder, rank)
            if not (shown := _shown(rank, file)):
                continue
            sys.stderr.write(shown)
            if failure is not None and blamed in (rank, None):
                report.artifact(file, name=LOGS.format(rank), kind="log", media_type="text/plain")
        if failure is not None:
            sys.stderr.write(f"{failure}\n")
        sys.stderr.flush()


def _shown(rank: int, file: Path) -> str:
    """Return the end of a rank's log as the job's log shows it; "" if it has written nothing."""
    try:
        with file.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(0, size - LOG_BYTES))
            text = log.read().decode(errors="replace").rstrip()
    except OSError:
        return ""
    cut = "" if size <= LOG_BYTES else f" (its last {LOG_BYTES} bytes)"
    return f"--- output of rank {rank}{cut} ---\n{text}\n" if text else ""


def logs_in(scratch: Path) -> dict[int, str]:
    """Return, by rank, the end of each log of a unit's newest ranks that has anything, as the job's log shows it."""
    folders = sorted(scratch.glob("ranks*"), key=lambda folder: folder.stat().st_mtime)
    files = {int(file.stem.removeprefix("rank-")): file for of in folders[-1:] for file in of.glob("rank-*.log")}
    return {rank: shown for rank in sorted(files) if (shown := _shown(rank, files[rank]))}


def devices_of_ranks(spec: CollectiveSpec | DdpSpec) -> list[torch.device]:
    """Return a GPU of this host for each of its ranks of nccl, or the CPU that ranks of gloo share. Raises Unsupported:
    this process sees too few GPUs."""
    import torch

    if spec.backend == "gloo":
        return [torch.device("cpu")]
    seen, needed = torch.cuda.device_count(), spec.resources().devices
    if seen < needed:
        raise Unsupported(f"world_size {spec.world_size} needs {needed} GPUs here; this worker's process sees {seen}")
    return [torch.device("cuda", index) for index in range(needed)]


def nodes_of_this_job(number: int) -> Nodes | None:
    """Return the nodes on which this unit's ranks run; None for this host alone. Raises Unsupported: the job is for
    several nodes, and this worker runs jobs on its own host."""
    if number == 1:
        return None
    if VARIABLE not in os.environ:
        raise Unsupported(f"nodes {number}: only `flopwatch worker --executor slurm` runs jobs on several nodes")
    return Nodes.from_json(os.environ[VARIABLE])


def serve_node(index: int, scratch: Path) -> NoReturn:
    """Run the ranks of node `index` of a job whose units run on node 0, until this process is ended."""
    import torch

    from parallel.node_ranks import serve_node as serve
    from workers.measure import environment

    nodes = Nodes.from_json(os.environ[VARIABLE])
    gpus = [torch.device("cuda", number) for number in range(torch.cuda.device_count())] or [torch.device("cpu")]
    serve(nodes, index, folder=scratch, facts=environment.fingerprint(gpus[0], *gpus[1:]))


def job_failure(error: Exception, *, started: bool) -> RunnerError:
    """Return the failure of a job whose ranks have failed. `error`: what `RankReports.next` raised. `started`: whether
    the ranks had begun with their work."""
    if not isinstance(error, RanksFailed):
        return InvalidEnvironment(f"the ranks could not be launched: {error}")
    who = "the ranks" if error.rank is None else f"rank {error.rank}"
    log = uploaded.places_in(_logs_of(error))
    if error.rank is not None:
        log += f"; see {LOGS.format(error.rank)}" if error.log else "; it wrote nothing to its log"
    detail = f"{who} {error.reason}{log}"
    if not started and (error.trace or isinstance(error, RanksTimedOut)):
        return InvalidEnvironment(f"the ranks did not start: {detail}")
    return Crashed(detail) if not error.trace else RunnerError(detail)


def _logs_of(error: RanksFailed) -> list[tuple[str, str]]:
    """Return the logs with stacks: of the rank at fault, or of all where they wait for each other."""
    if error.rank is not None or error.log_file is None:
        return [("", error.log)]
    return [(f"rank {rank}: ", log) for rank, log in logs_in(error.log_file.parents[1]).items()]
