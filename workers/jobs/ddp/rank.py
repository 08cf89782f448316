"""One rank of a `ddp` job, in a process that the job's process has started; it imports this module.

A rank checks parity first (parity.py). Then three sides take turns (timing.py), each with a newly built model, so that
no one's memory affects another: the strategy; the same wrapper and optimizer over a group that moves nothing, which
shows the exposed communication; and one process alone, which shows what the strategy costs in all. In its first turn
the strategy also runs some steps under the profiler (overlap.py).
"""

import gc
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed import distributed_c10d

from app.specs.ddp import DdpSpec
from parallel.process_group import Rank
from parallel.silent_group import silent_group
from workers import uploaded
from workers.jobs import _own_step, _reference
from workers.jobs._base import parse_spec
from workers.jobs._training import building, metrics
from workers.jobs._training.building import STEPS
from workers.jobs.ddp import strategies
from workers.jobs.ddp.buckets import predicts, time_all_reduces
from workers.jobs.ddp.context import DoesNotFit, RankContext
from workers.jobs.ddp.memory import Memory, MemoryMarks, memory_now
from workers.jobs.ddp.overlap import record_operations, record_snapshot, record_step_overlap, why_no_profiler
from workers.jobs.ddp.parity import ParityCheck
from workers.jobs.ddp.replicas import samples
from workers.jobs.ddp.strategies import NO_COMMUNICATION, Trained
from workers.jobs.ddp.timing import StepTimer, Turn, measure_steps
from workers.jobs.ddp.values import LEFT_OUT
from workers.measure.busy import measure_busy
from workers.measure.judging import WrongResult
from workers.measure.memory import OutOfMemory, is_out_of_memory, memory_meter, short_message
from workers.measure.own_step import KINDS
from workers.measure.product_precision import precision_of_products
from workers.measure.timing import run_step
from workers.outcome import RunnerError, failure_code
from workers.torch_host import set_precision

ROUNDS = 6
"""Turns of each side."""


def rounds_of(sides: Sequence[str], number: int, seed: int) -> list[list[str]]:
    """Draw the order of the sides in each round; all ranks, which have the same seed, draw the same.

    Each round is drawn by itself, so that no load keeps time with one side, whatever its period. Only the first is as
    given: the strategy begins, and its memory is that of a fresh process.
    """
    draw = random.Random(seed)
    return [list(sides), *(draw.sample(sides, len(sides)) for _ in range(number - 1))]


Extent = Literal["all", "look", "times"]
"""What ranks measure. "look": all but parity and one process alone, which say nothing of where a step's time goes.
"times": the strategy's steps in one turn, and nothing else."""


def run_rank(rank: Rank, specs: Sequence[dict[str, Any]], folder: str, extent: Extent) -> None:
    """Measure one rank by each spec, and report {"found": the results of `measure_rank`}."""
    rank.report({"started": True})
    rank.report({"found": [measure_rank(rank, spec, folder, extent=extent) for spec in specs]})


def measure_rank(rank: Rank, spec: dict[str, Any], folder: str, *, extent: Extent = "all") -> dict[str, Any]:
    """Measure one rank.

    Args:
        spec: A DdpSpec, as JSON.
        folder: The folder in which ranks leave traces and snapshots.

    Returns:
        The result of `RankRun.run`, or of times alone its "turns"; and "parts": the checks of the model's parts, by
        rank 0. An error whose meaning is known is reported as {"failed": code, "detail": …} before it ends this rank.
    """
    parsed = parse_spec(spec)
    assert isinstance(parsed, DdpSpec)
    with report_known_errors(rank):
        context = RankContext(rank, parsed)
        set_precision(parsed.precision)
        _own_step.hear_ranges()
        parts = _reference.check_parts(parsed, context.device) if rank.index == 0 else []
        run = RankRun(context, Path(folder))
        if extent == "times":
            context.sides = context.sides[:1]
            return {"turns": [asdict(run.take_turn(parsed.strategy, None))]}
        return {**run.run(extent), "parts": [asdict(check) for check in parts]}


@contextmanager
def report_known_errors(rank: Rank) -> Iterator[None]:
    """Report an error whose meaning is known before it ends this rank."""
    try:
        with building.known_errors():
            yield
    except RunnerError as error:
        rank.report({"failed": error.code, "detail": str(error)})
        raise
    except WrongResult as error:
        rank.report({"failed": error.outcome, "detail": str(error)})
        raise
    except Exception as error:
        if isinstance(error, OutOfMemory) or is_out_of_memory(error):
            rank.report({"failed": OutOfMemory.outcome, "detail": short_message(error)})
        elif uploaded.place_of(error) or uploaded.lacking_file(error):
            rank.report({"failed": failure_code(error), "detail": uploaded.describe(error)})
        raise


@dataclass
class RankRun:
    """One rank's part of a job."""

    context: RankContext
    folder: Path

    def __post_init__(self) -> None:
        self.meter = memory_meter(self.context.device)
        self.memory = Memory()
        self.built = False
        self.silent = silent_group()
        self.groups = len(distributed_c10d._world.pg_map)
        set_precision(self.context.spec.precision)

    def run(self, extent: Extent) -> dict[str, Any]:
        """Run the rank's part of the job.

        Returns:
            JSON-ready: "turns" (as Turn), "memory" (as Memory), "alone" (why the step of one process alone was not
            measured, or None), "busy" (the GPU's work in a step without communication, as Busy, or why it is unknown),
            "parity", "overlap", "all_reduce" (its times by bytes, where there are buckets), "precision" (of the
            products of a step of the user's own, and why it is unknown), "model_precision" (that of a model's),
            "without_gradient" (the parameters that got none in one process; absent where it was not measured) and facts
            about the model. Some are None on ranks other than 0.
        """
        found: dict[str, Any] = {"alone": None, "parity": None, "overlap": None, "busy": None}
        found |= {"operations": [], "snapshot": None, "all_reduce": None}
        if self.context.spec.strategy != NO_COMMUNICATION and extent == "look":
            found["alone"] = LEFT_OUT
            del self.context.sides[2:]
        elif self.context.spec.strategy != NO_COMMUNICATION:
            check = ParityCheck(self.context)
            found["parity"] = check.run()
            if check.too_large is not None:
                found["alone"] = f"one process alone does not fit: {check.too_large}"
        # Present objects will stay alive: the collector need not scan them again, least of all in the middle of a step.
        gc.collect()
        gc.freeze()
        turns: list[Turn] = []
        # A step of the user's own is the only side, and its code is imported once.
        rounds = ROUNDS if self.context.spec.step_code is None else 1
        drawn = rounds_of(self.context.sides, min(rounds, self.context.steps or STEPS), self.context.spec.seed)
        for number, sides in enumerate(drawn):
            for side in sides:
                first, eager = number == 0, side in (strategies.EAGER, strategies.EAGER_SILENT)
                if (side == NO_COMMUNICATION and found["alone"] is not None) or (eager and not first):
                    continue
                try:
                    of = 1 if eager else len(drawn)  # a side without a graph takes one turn, of all measured steps
                    turns.append(self.take_turn(side, found if first else None, number=number, rounds=of))
                except DoesNotFit as error:
                    found["alone"] = str(error)
                else:
                    continue
                self.context.free_memory()  # the error's frames held the model
        if predicts(self.context.spec):
            found["all_reduce"] = time_all_reduces(self.context, found["communication"][0][1])
        found |= {"device": str(self.context.device), "threads": torch.get_num_threads()}
        return {**found, "turns": [asdict(turn) for turn in turns], "memory": asdict(self.memory)}

    def take_turn(self, strategy: str, found: dict[str, Any] | None, *, number: int = 0, rounds: int = 1) -> Turn:
        """Build the strategy's model, warm up, and measure. Raises DoesNotFit: the memory of some rank does not hold
        one process alone. `strategy`: one of the context's sides. `found`: takes the results beside times, which are
        those of first turns; None in other turns. `number`, `rounds`: as in `measure_steps`."""
        try:
            with self.context.agree_on_memory(strategy):
                trained = self._build(strategy, warmed=number > 0)
            turn = measure_steps(self.context, trained, self.meter, number=number, rounds=rounds)
            if found is not None and strategy == self.context.silent_side:
                found["busy"] = self._busy(trained)
            if found is not None and strategy == NO_COMMUNICATION and trained.own is None:
                # Wrappers give every parameter a gradient, of zeros if need be.
                found["without_gradient"] = trained.step.without_gradient
            if found is not None and strategy == self.context.spec.strategy:
                found.update(self._facts(trained))
                self._record_memory(trained)
                found["operations"] = operations = record_operations(self.context, trained)
                found["communication"] = strategies.communication(self.context.spec, trained, operations)
                found["overlap"] = record_step_overlap(
                    self.context, trained, statistics.median(turn.step_ms), self.folder
                )
                found["snapshot"] = record_snapshot(self.context, trained, self.folder)
                found["precision"] = self._precision(trained)
                found["model_precision"] = self._precision_of_own_model(trained)
        finally:
            # Remaining objects are in reference cycles, of hooks and of errors' frames.
            trained = None  # type: ignore[assignment]
            self.context.free_memory()
        return turn

    def _build(self, strategy: str, *, warmed: bool = False) -> Trained:
        self.meter.reset()
        trained = strategies.build(
            self.context.spec,
            strategy,
            self.context.device,
            strategies.rank_batches(self.context.spec, self.context.rank.index, self.context.device),
            self.silent if strategy in (strategies.SILENT, strategies.EAGER_SILENT) else None,
            warmed=warmed,
        )
        if not self.built:
            self.built = True
            self.memory.after_init_mib, self.memory.after_init_peak_mib = memory_now(self.meter)
        return trained

    def _busy(self, trained: Trained) -> dict[str, Any] | str | None:
        """Measure a GPU's work in one more step of a side that does not communicate."""
        if not self.context.on_gpu or trained.own is not None:
            return None
        busy = measure_busy(lambda: run_step(trained.repeated.phases, ()), trained.repeated.prepare)
        return busy if isinstance(busy, str) else asdict(busy)

    def _precision(self, trained: Trained) -> tuple[Mapping[str, float], str]:
        """Return the share of each precision in the matrix products, or why it is unknown; of a step of the user's own
        in one more step."""
        if trained.own is None:
            spec = self.context.spec
            flops = metrics.step_flops(spec, trained.model)
            return ({}, "") if flops is None else metrics.precisions_of(spec, trained.linear_layers, flops)
        if (why_not := why_no_profiler(self.context)) is not None:
            return {}, why_not
        return metrics.precisions_of_own(StepTimer(self.context, trained).step, self.context.device)

    def _precision_of_own_model(self, trained: Trained) -> dict[str, float]:
        """Return the share of each precision in the products of one more step of a model of the user's own; none where
        it is not known."""
        spec = self.context.spec
        if spec.code is None or trained.graphed is not None or spec.precision == "fp8" or why_no_profiler(self.context):
            return {}
        shares, _ = precision_of_products(StepTimer(self.context, trained).step, self.context.device)
        return shares

    def _record_memory(self, trained: Trained) -> None:
        StepTimer(self.context, trained, [MemoryMarks(trained, self.memory, self.meter)]).step()
        if trained.graphed is not None and trained.optimizer is not None:
            # Its gradients come and go inside the graph.
            self.memory.gradients_mib = self.memory.before_optimizer_mib = None
            self.memory.before_optimizer_peak_mib = None

    def _facts(self, trained: Trained) -> dict[str, Any]:
        """Return facts about the model: its size, the FLOPs of a rank's step, of the measured ones the mean, and the
        bytes that are communicated."""
        spec, own = self.context.spec, trained.own
        return {
            "parameters": sum(size.numel for size in trained.sizes) if own is None else own.trainable,
            "flops": metrics.step_flops(spec, trained.model) if own is None else own.mean_work("flops"),
            "work": None if own is None else {kind: own.mean_work(kind) for kind in KINDS},
            "varies": own is not None and any(map(own.varies, KINDS)),
            "phases": None if own is None else own.phase_names,
            "may_train": own is not None and own.may_train,
            "replicas": [] if own is None else samples(own.roots),
            "groups": 0 if own is None else len(distributed_c10d._world.pg_map) - self.groups,
            "gradient_bytes": [size.numel * size.item_bytes for size in trained.sizes],
            "buckets": strategies.number_of_buckets(trained.wrapped),
        }
