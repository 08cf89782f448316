"""The state of a rank that all parts of its work share, and the agreement among ranks.

Over a separate gloo group, ranks agree on everything that decides what they do next: when a warm-up is over, and
whether one process alone fits into every rank's memory.
"""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from app.specs.ddp import DdpSpec
from kernels.clock import now_s
from parallel.process_group import Rank
from workers.jobs._training.building import STEPS
from workers.jobs.ddp.strategies import EAGER, EAGER_SILENT, NO_COMMUNICATION, SILENT
from workers.measure.memory import OutOfMemory

REPORT_INTERVAL_S = 0.5


class DoesNotFit(Exception):
    """The step of one process alone does not fit into some rank's memory."""


@dataclass
class RankContext:
    """One rank of a job, with its group for agreement."""

    rank: Rank
    spec: DdpSpec
    control: dist.ProcessGroup = field(init=False)
    """The group over which ranks agree. It works beside the measured communication, and never during a step."""

    def __post_init__(self) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self.control = dist.new_group(backend="gloo")
        self.device = self.rank.device
        self.on_gpu = self.device.type == "cuda"
        self.steps = self.spec.measure_steps
        """Steps to measure of each side; None until the first warm-up has shown how long one takes."""
        self.measured_steps = 0
        """Number of measured steps of all turns so far."""
        alone = self.spec.strategy == NO_COMMUNICATION
        self.sides = [NO_COMMUNICATION] if alone else [self.spec.strategy, SILENT, NO_COMMUNICATION]
        """The sides that take turns."""
        if self.spec.cuda_graph:
            self.sides += [EAGER] if alone else [EAGER, EAGER_SILENT]
        self.silent_side = NO_COMMUNICATION if alone else SILENT
        """The side that launches what the strategy launches, and does not communicate."""
        self._reported_at = 0.0

    def exchange(self, value: float) -> list[float]:
        mine = torch.tensor([value], dtype=torch.float64)
        parts = [torch.empty_like(mine) for _ in range(self.rank.world_size)]
        dist.all_gather(parts, mine, group=self.control)
        return [float(part) for part in parts]

    def report_progress(self, message: str) -> None:
        """Report progress, in measured steps of all turns; from one rank and not too often."""
        now = now_s()
        total = (self.steps or STEPS) * len(self.sides)
        if self.rank.index == 0 and (self.measured_steps == total or now - self._reported_at >= REPORT_INTERVAL_S):
            self._reported_at = now
            self.rank.report({"done": self.measured_steps, "total": total, "message": message})

    def free_memory(self) -> None:
        """Free what earlier work has left, also objects in reference cycles."""
        # Objects that the first pass frees may have held, from C++, objects that the second one finds.
        gc.collect()
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()

    @contextmanager
    def agree_on_memory(self, strategy: str) -> Iterator[None]:
        """Let all ranks continue only if the work inside fits into every rank's memory, if it is of one process alone.

        A rank of another strategy raises at once: the others may wait for it in a collective operation. Raises
        DoesNotFit: the memory of some rank did not suffice.
        """
        if strategy != NO_COMMUNICATION or self.spec.strategy == NO_COMMUNICATION:
            yield
            return
        failure: OutOfMemory | None = None
        try:
            yield
        except OutOfMemory as error:
            failure = error.with_traceback(None)  # its frames hold the model
            failure.__cause__ = failure.__context__ = None
        short = [rank for rank, failed in enumerate(self.exchange(failure is not None)) if failed]
        if short:
            why = f": {failure}" if failure is not None else ""
            raise DoesNotFit(f"one process alone does not fit into the memory of rank {short[0]}{why}")
