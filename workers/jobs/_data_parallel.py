"""The ranks of a `ddp` job. Each rank is a process that the job's process has started; it imports this module.

A rank checks parity first. Then it times the strategy and the same step without communication in turns, each with a
newly built model, so that neither's memory affects the other. Last, it runs some steps under the profiler.

Over a separate gloo group, ranks agree on everything that decides what they do next: when a warm-up is over, and
whether a step without communication fits into every rank's memory.
"""

from __future__ import annotations

import gc
import inspect
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import parallel
from app.specs.ddp import FULLY_SHARDED, DdpSpec
from parallel.accounting import step_traffic, traffic_factor
from parallel.collectives import recorded
from parallel.process_group import Rank
from workers.jobs import _training
from workers.jobs._base import parse_spec
from workers.measure.compilation import compilation
from workers.measure.host_memory import host_memory
from workers.measure.memory import (
    MIB,
    CudaMemory,
    OutOfMemory,
    gist,
    is_out_of_memory,
    memory_meter,
    memory_needed_for,
)
from workers.measure.profiling.overlap import Recorded, at_most, record_overlap, total_ms
from workers.measure.ranges import Ranges, named_layers
from workers.measure.timing import Observer, Where, make_clock, memory_needed_in, run_step
from workers.measure.warmup import LEAST_CALLS, WarmUp
from workers.model.batches import RandomBatches
from workers.model.compiled import BLOCKS
from workers.model.optimizer import OPTIMIZERS
from workers.model.precision import PRECISIONS, set_parameter_dtype
from workers.model.steps import MAX_LEARNING_RATE, BackwardStep, TrainStep
from workers.outcome import RunnerError
from workers.torch_host import set_precision

ALONE = "none"
"""The strategy that does not communicate."""
PARITY_STEPS = 3
PROFILED_STEPS = 2
ROUNDS = 2
"""Turns of the strategy, and of the step without communication."""
SPANS_PER_STEP = 300
"""Largest number of spans of one step, rank and stream in the timeline."""
REPORT_INTERVAL_S = 0.5
KEPT_SHARE = 0.85
"""The share of a GPU's memory up to which compared tensors stay there; the rest is for fragmentation."""
SYNCHRONIZATION = "synchronization"
"""The phase between backward and optimizer in which our wrappers finish their communication."""


class DoesNotFit(Exception):
    """The step without communication does not fit into some rank's memory."""


def run_rank(rank: Rank, spec: dict[str, Any], folder: str) -> None:
    """Measure one rank, and report {"found": the result of `RankRun.run`}. See `measure_rank`."""
    rank.report({"started": True})
    rank.report({"found": measure_rank(rank, spec, folder)})


def measure_rank(rank: Rank, spec: dict[str, Any], folder: str) -> dict[str, Any]:
    """Measure one rank.

    Args:
        rank: This rank.
        spec: A DdpSpec, as JSON.
        folder: The folder in which rank 0 leaves the profiler's trace.

    Returns:
        The result of `RankRun.run`. An error whose meaning is known is reported as {"failed": code, "detail": …} before
        it ends this rank.
    """
    parsed = parse_spec(spec)
    assert isinstance(parsed, DdpSpec)
    with told(rank):
        return RankRun(rank, parsed, Path(folder)).run()


@contextmanager
def told(rank: Rank) -> Iterator[None]:
    """Report an error whose meaning is known before it ends this rank."""
    try:
        with _training.known_errors():
            yield
    except RunnerError as error:
        rank.report({"failed": error.code, "detail": str(error)})
        raise
    except (OutOfMemory, RuntimeError, MemoryError) as error:
        if isinstance(error, OutOfMemory) or is_out_of_memory(error):
            rank.report({"failed": "oom", "detail": gist(error)})
        raise


@dataclass(frozen=True)
class Size:
    """The size of a trainable parameter before anything was sharded."""

    numel: int
    item_bytes: int
    dimensions: int


@dataclass
class Trained:
    """A model in its wrapper, and the step that trains it."""

    strategy: str
    model: nn.Module
    wrapped: nn.Module
    """The module that the step calls: the model, or the wrapper around it."""
    step: BackwardStep
    sizes: list[Size]
    """The sizes of the model's parameters."""

    @property
    def optimizer(self) -> Optimizer | None:
        return self.step.optimizer if isinstance(self.step, TrainStep) else None


def build(spec: DdpSpec, strategy: str, device: torch.device, batches: RandomBatches) -> Trained:
    """Build the model, wrap it as the strategy does, and make its step.

    Raises:
        OutOfMemory: it does not fit.
        Unsupported: the model does not exist here, or does not support the spec's options.
    """
    with memory_needed_for("making the model"):
        torch.manual_seed(spec.seed)
        with device:
            model = _training.choose_model(spec, device)()
        set_parameter_dtype(model, spec.parameter_dtype)
        sizes = [Size(p.numel(), p.element_size(), p.dim()) for p in model.parameters() if p.requires_grad]
        call = _training.compiled(spec, model, inside_hooks=spec.strategy == "fsdp")
        wrapped, finish = wrap(spec, strategy, call)
        return Trained(strategy, model, wrapped, make_step(spec, strategy, wrapped, batches, finish), sizes)


def wrap(spec: DdpSpec, strategy: str, module: nn.Module) -> tuple[nn.Module, Callable[[], None] | None]:
    """Return the wrapped module, and the function that finishes its communication; None if there is nothing to
    finish."""
    cast = torch.bfloat16 if spec.cast_before_communication else None
    wrapped: parallel.data_parallel.DataParallel | parallel.FullyShardedDataParallel
    match strategy:
        case "naive":
            wrapped = parallel.NaiveDataParallel(module)
        case "flat":
            wrapped = parallel.FlatDataParallel(module)
        case "overlapped":
            wrapped = parallel.OverlappedDataParallel(module)
        case "bucketed":
            wrapped = parallel.BucketedDataParallel(
                module,
                spec.bucket_size_mb,
                first_bucket_size_mb=spec.first_bucket_size_mb,
                gradients_as_views=spec.gradients_as_views,
            )
        case "fsdp":
            wrapped = parallel.FullyShardedDataParallel(module, cast)
        case "torch_ddp":
            return torch_ddp(module, spec.bucket_size_mb), None
        case "torch_fsdp":
            return torch_fsdp(module, cast), None
        case _:
            return module, None
    return wrapped, wrapped.finish_gradient_synchronization


def torch_ddp(module: nn.Module, bucket_size_mb: float | None) -> nn.Module:
    """Return torch's DistributedDataParallel around the module, with gradients as views of its buckets."""
    device = next(module.parameters()).device
    everything = sum(parameter.nbytes for parameter in module.parameters()) / MIB + 1
    # Ours send buffers once, too. torch 2.13 renamed the argument, and warns about the old name.
    known = inspect.signature(nn.parallel.DistributedDataParallel).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    options: dict[str, Any] = {
        "device_ids": [device.index] if device.type == "cuda" else None,
        "bucket_cap_mb": everything if bucket_size_mb is None else bucket_size_mb,
        "gradient_as_bucket_view": True,
        buffers: False,
    }
    return nn.parallel.DistributedDataParallel(module, **options)


def torch_fsdp(module: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Shard the module by torch's FSDP2, each block by itself, in place."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(next(module.parameters()).device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    for block in getattr(module, BLOCKS, ()):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    return module


def make_step(
    spec: DdpSpec, strategy: str, wrapped: nn.Module, batches: RandomBatches, finish: Callable[[], None] | None
) -> BackwardStep:
    """Make the repeated step: that of other training kinds, with the communication between its phases."""
    casts = spec.cast_before_communication and strategy in FULLY_SHARDED
    precision = PRECISIONS["fp32" if casts else spec.precision]
    fused = spec.fused_linear_cross_entropy
    step: BackwardStep
    if spec.mode == "train_step":
        total = (LEAST_CALLS if spec.warmup_steps is None else spec.warmup_steps) + spec.measure_steps
        optimizer = make_optimizer(spec, strategy, wrapped)
        clip = spec.gradient_clip_norm
        step = TrainStep(wrapped, batches, precision, wrapped, optimizer, total, clip, model_has_loss=fused)
    else:
        step = BackwardStep(wrapped, batches, precision, wrapped, model_has_loss=fused)
    if finish is not None:
        last = step.phases.pop("optimizer", None)
        step.phases[SYNCHRONIZATION] = finish
        if last is not None:
            step.phases["optimizer"] = last
    return step


def make_optimizer(spec: DdpSpec, strategy: str, wrapped: nn.Module) -> Optimizer:
    """Make the optimizer, sharded if the spec asks for it and the strategy communicates."""
    optimizer_class, options = OPTIMIZERS[spec.optimizer]
    parameters = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
    arguments: dict[str, Any] = {"lr": MAX_LEARNING_RATE, **options}
    if not spec.sharded_optimizer or strategy == ALONE:
        return optimizer_class(parameters, **arguments)
    if strategy == "torch_ddp":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        made: Optimizer = ZeroRedundancyOptimizer(parameters, optimizer_class=optimizer_class, **arguments)
        return made
    return parallel.ShardedOptimizer(parameters, optimizer_class, **arguments)


def rank_batches(spec: DdpSpec, rank: int, device: torch.device) -> RandomBatches:
    """Return the batches of a rank; each rank has its own."""
    seed = (spec.seed + rank) % 2**63
    return RandomBatches(spec.model.vocab_size, spec.batch_size, spec.context_length, device, seed)


def communication(spec: DdpSpec, sizes: Sequence[Size]) -> list[list[Any]]:
    """Return the communication of a step: (operation, bytes of the full tensors, bytes that a rank sends).

    The formulas and their sources are in parallel.accounting. It leaves out the few bytes with which ranks report which
    gradients they have, and the possibility that the last sharded unit is gathered only once. torch's
    ZeroRedundancyOptimizer broadcasts what ours gathers: as many bytes.
    """
    # fsdp shards parameters with two axes or more, torch_fsdp all of them; the others shard none.
    least = {"fsdp": 2, "torch_fsdp": 0}.get(spec.strategy)
    sharded = kept = 0
    for size in sizes:
        if least is not None and size.dimensions >= least:
            sharded += size.numel * (2 if spec.cast_before_communication else size.item_bytes)
        else:
            kept += size.numel * size.item_bytes
    traffic = step_traffic(
        spec.strategy,
        gradient_bytes=sharded + kept,
        parameter_bytes=sharded + kept,
        sharded_bytes=sharded,
        sharded_optimizer=spec.sharded_optimizer and spec.mode == "train_step",
    )
    return [
        [operation, size, round(size * traffic_factor(operation, spec.world_size))]
        for operation, size in vars(traffic).items()
        if size
    ]


def full_gradients(trained: Trained) -> dict[str, Tensor]:
    """Return the full gradients of all parameters, by the names of the model's parameters. Every rank must call it."""
    if isinstance(trained.wrapped, parallel.FullyShardedDataParallel):
        # They are gathered like parameters: a gradient takes the parameter's place meanwhile.
        places = [(parameter, parameter.data) for parameter in trained.wrapped.parameters()]
        for parameter, _ in places:
            parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        try:
            return full_parameters(trained)
        finally:
            for parameter, data in places:
                parameter.data = data
    return {name: whole(p.grad) for name, p in trained.model.named_parameters() if p.grad is not None}


def full_parameters(trained: Trained) -> dict[str, Tensor]:
    """Return the full parameters, by the names of the model's parameters. Every rank must call it."""
    if isinstance(trained.wrapped, parallel.FullyShardedDataParallel):
        return trained.wrapped.full_state_dict()
    return {name: whole(parameter.detach()) for name, parameter in trained.model.named_parameters()}


def whole(tensor: Tensor) -> Tensor:
    """Return the full tensor, gathered from all ranks if it is one of torch's distributed tensors."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def local_bytes(tensor: Any) -> int:
    """Return the bytes that a tensor takes on this rank; 0 for other values."""
    local = getattr(tensor, "to_local", None)
    if local is not None:
        tensor = local()
    return int(tensor.nbytes) if isinstance(tensor, Tensor) else 0


@dataclass
class Memory:
    """Memory of one rank in MiB at three moments, and its parts; None if the device does not report it."""

    after_init_mib: float | None = None
    after_init_peak_mib: float | None = None
    before_optimizer_mib: float | None = None
    before_optimizer_peak_mib: float | None = None
    after_optimizer_mib: float | None = None
    after_optimizer_peak_mib: float | None = None
    parameters_mib: float | None = None
    gradients_mib: float | None = None
    optimizer_state_mib: float | None = None


class MemoryMarks:
    """An observer that records the memory just before the optimizer's phase and at the step's end."""

    def __init__(self, trained: Trained, memory: Memory, *, on_gpu: bool) -> None:
        self._trained, self._memory, self._on_gpu = trained, memory, on_gpu

    def step_begins(self) -> None:
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()

    def phase_begins(self, name: str) -> None:
        if name == "optimizer":
            self._before()

    def phase_ends(self, name: str) -> None:
        """Do nothing: memory is read before the optimizer's phase and at the end."""

    def step_ends(self) -> None:
        if self._trained.optimizer is None:
            self._before()
            return
        self._memory.optimizer_state_mib = state_bytes(self._trained.optimizer) / MIB
        self._memory.after_optimizer_mib, self._memory.after_optimizer_peak_mib = self._now()

    def _before(self) -> None:
        parameters = list(self._trained.wrapped.parameters())
        self._memory.parameters_mib = sum(map(local_bytes, parameters)) / MIB
        self._memory.gradients_mib = sum(local_bytes(parameter.grad) for parameter in parameters) / MIB
        self._memory.before_optimizer_mib, self._memory.before_optimizer_peak_mib = self._now()

    def _now(self) -> tuple[float | None, float | None]:
        """Return the allocated memory, and the peak since the last call."""
        if not self._on_gpu:
            return None, None
        found = torch.cuda.memory_allocated() / MIB, torch.cuda.max_memory_allocated() / MIB
        torch.cuda.reset_peak_memory_stats()
        return found


class OperationsRecorder:
    """An observer that records when the operations of our own strategies ran in a step; it does not see torch's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open = ExitStack()
        self.rows: list[list[Any]] = []
        """(operation, bytes, start in ms since the step's beginning, end)."""

    def step_begins(self) -> None:
        self._timeline = self._open.enter_context(recorded(self._device))

    def phase_begins(self, name: str) -> None:
        """Do nothing: operations tell their times themselves."""

    def phase_ends(self, name: str) -> None:
        """Do nothing: operations tell their times themselves."""

    def step_ends(self) -> None:
        self._open.close()
        self.rows = [[one.operation, one.size_bytes, one.start_ms, one.end_ms] for one in self._timeline.intervals()]


def state_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of an optimizer's state on this rank."""
    state = getattr(optimizer, "optim", optimizer).state  # ZeroRedundancyOptimizer has this rank's optimizer inside
    return sum(local_bytes(value) for values in state.values() for value in values.values())


@dataclass
class Turn:
    """The measured steps of one turn on this rank."""

    strategy: str
    first_step_ms: float
    step_ms: list[float] = field(default_factory=list)
    phases_ms: dict[str, list[float]] = field(default_factory=dict)
    host_us: list[float] = field(default_factory=list)
    warmup: int = 0
    steady: bool | None = None
    too_slow: bool = False
    peak_mib: float | None = None
    peak_how: str = ""
    reserved_mib: float | None = None
    graphs_before: dict[str, Any] = field(default_factory=dict)
    graphs_after: dict[str, Any] = field(default_factory=dict)


@dataclass
class RankRun:
    """One rank's part of a job."""

    rank: Rank
    spec: DdpSpec
    folder: Path
    control: dist.ProcessGroup = field(init=False)
    """The group over which ranks agree. It works beside the measured communication, and never during a step."""

    def __post_init__(self) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self.control = dist.new_group(backend="gloo")
        self.device = self.rank.device
        self.on_gpu = self.device.type == "cuda"
        self.host_meter = None if self.on_gpu else memory_meter(self.device)
        self.memory = Memory()
        self.keeper = torch.device("cpu")
        """The device on which rank 0 keeps gradients and parameters until it compares them."""
        self.too_large: str | None = None
        """The reason why a single process surely does not fit into rank 0's memory; None if it may. Other ranks have
        other texts."""
        self._told_at = 0.0
        self._measured = 0
        set_precision(self.spec.precision)

    def run(self) -> dict[str, Any]:
        """Run the rank's part of the job.

        Returns:
            JSON-ready: "turns" (as Turn), "memory" (as Memory), "alone" (why the step without communication was not
            measured, or None), "parity", "overlap" and facts about the model. Some are None on ranks other than 0.
        """
        found: dict[str, Any] = {"alone": None, "parity": None, "overlap": None, "operations": []}
        if self.spec.strategy != ALONE:
            found["parity"] = self.check_parity()
            if self.too_large is not None:
                found["alone"] = f"without communication it does not fit: {self.too_large}"
        # Present objects will stay alive: the collector need not scan them again, least of all in the middle of a step.
        gc.collect()
        gc.freeze()
        turns: list[Turn] = []
        for number in range(min(ROUNDS, self.spec.measure_steps)):
            steps = self.spec.measure_steps // ROUNDS + (number < self.spec.measure_steps % ROUNDS)
            turns.append(self.take_turn(self.spec.strategy, steps, found if number == 0 else None))
            if self.spec.strategy == ALONE or found["alone"] is not None:
                continue
            try:
                turns.append(self.take_turn(ALONE, steps, None))
            except DoesNotFit as error:
                found["alone"] = str(error)
            self._clean()  # the error's frames held the model
        found |= {"device": str(self.device), "threads": torch.get_num_threads()}
        return {**found, "turns": [asdict(turn) for turn in turns], "memory": asdict(self.memory)}

    # Agreement

    def exchange(self, value: float) -> list[float]:
        """Return every rank's value."""
        mine = torch.tensor([value], dtype=torch.float64)
        parts = [torch.empty_like(mine) for _ in range(self.rank.world_size)]
        dist.all_gather(parts, mine, group=self.control)
        return [float(part) for part in parts]

    def tell(self, message: str) -> None:
        """Report progress, in measured steps of all turns; from one rank and not too often."""
        now = time.monotonic()
        total = self.spec.measure_steps * (1 if self.spec.strategy == ALONE else 2)
        if self.rank.index == 0 and (self._measured == total or now - self._told_at >= REPORT_INTERVAL_S):
            self._told_at = now
            self.rank.report({"done": self._measured, "total": total, "message": message})

    # Turns

    def take_turn(self, strategy: str, steps: int, found: dict[str, Any] | None) -> Turn:
        """Build the strategy's model, warm up, and measure.

        Args:
            strategy: The spec's, or "none".
            steps: Number of steps measured.
            found: Takes the results of the strategy's first turn beside times; None in other turns.

        Raises:
            DoesNotFit: the memory of some rank does not hold the step without communication.
        """
        try:
            with self._alone(strategy):
                trained = self._build(strategy)
            turn = self._measure(trained, steps)
            if found is not None:
                found.update(self._facts(trained))
                self._look_at_memory(trained)
                found["operations"] = self._record_operations(trained)
                found["overlap"] = self._record_overlap(trained)
        finally:
            # Remaining objects are in reference cycles, of hooks and of errors' frames.
            trained = None  # type: ignore[assignment]
            self._clean()
        return turn

    def _build(self, strategy: str) -> Trained:
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        trained = build(self.spec, strategy, self.device, rank_batches(self.spec, self.rank.index, self.device))
        if self.on_gpu and self.memory.after_init_mib is None:
            self.memory.after_init_mib = torch.cuda.memory_allocated() / MIB
            self.memory.after_init_peak_mib = torch.cuda.max_memory_allocated() / MIB
        return trained

    def _clean(self) -> None:
        # Objects that the first pass frees may have held, from C++, objects that the second one finds.
        gc.collect()
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()

    @contextmanager
    def _alone(self, strategy: str) -> Iterator[None]:
        """Let all ranks continue only if the work inside fits into every rank's memory; for work without communication.

        A rank of another strategy raises at once: the others may wait for it in a collective operation.

        Raises:
            DoesNotFit: the memory of some rank did not suffice.
        """
        if strategy != ALONE or self.spec.strategy == ALONE:
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
            told = f": {failure}" if failure is not None else ""
            raise DoesNotFit(f"without communication it does not fit into the memory of rank {short[0]}{told}")

    def _measure(self, trained: Trained, steps: int) -> Turn:
        """Warm up until times are steady or as often as asked, then measure."""
        elapsed_s = 0.0
        warming = WarmUp(
            self.spec.warmup_steps,
            window_s=_training.WINDOW_S[self.device.type],
            clock=lambda: elapsed_s,  # the same on every rank
        )
        timing = Timing(self, trained)
        what = "without communication" if trained.strategy != self.spec.strategy else trained.strategy
        first = math.nan
        while not warming.over:
            slowest_ms = max(timing.step())
            first = slowest_ms if math.isnan(first) else first
            elapsed_s += 1e-3 * slowest_ms
            warming.add(slowest_ms)
            self.tell(f"{what}: warming up")
        gc.collect()
        turn = Turn(trained.strategy, first, warmup=warming.calls, steady=warming.steady, too_slow=warming.too_slow)
        meter = self.host_meter or CudaMemory()
        meter.reset()
        turn.graphs_before = asdict(compilation())
        if self.rank.index == 0:
            self.rank.report({"measuring": turn.warmup > 0})
        for _ in range(steps):
            slowest_ms = max(timing.step(turn))
            turn.first_step_ms = slowest_ms if math.isnan(turn.first_step_ms) else turn.first_step_ms
            self._measured += 1
            self.tell(f"{what}: measuring")
        turn.graphs_after = asdict(compilation())
        turn.peak_mib, turn.peak_how = meter.peak_mib()
        turn.reserved_mib = meter.reserved_mib()
        return turn

    def _facts(self, trained: Trained) -> dict[str, Any]:
        """Return facts about the model: its size, the FLOPs of a rank's step, and the bytes that are communicated."""
        return {
            "parameters": sum(size.numel for size in trained.sizes),
            "flops": _training.step_flops(self.spec, trained.model),
            "communication": communication(self.spec, trained.sizes),
        }

    def _look_at_memory(self, trained: Trained) -> None:
        """Record the memory of one more step."""
        Timing(self, trained, [MemoryMarks(trained, self.memory, on_gpu=self.on_gpu)]).step()

    def _record_operations(self, trained: Trained) -> list[list[Any]]:
        """Record when the operations of one more step ran, by events on a GPU; without a profiler."""
        recorder = OperationsRecorder(self.device)
        Timing(self, trained, [recorder]).step()
        return recorder.rows

    def _record_overlap(self, trained: Trained) -> dict[str, Any]:
        """Run some steps under the profiler.

        Returns:
            {"why_not": …}, or for each step its "step_ms", "communication_ms", "exposed_ms" and "spans" by stream; on
            rank 0 also the "trace", a file.
        """
        why_not = self._why_no_profiler()
        if why_not is not None:
            return {"why_not": why_not}
        names = [f"step_{number + 1}" for number in range(PROFILED_STEPS)]
        ranges = Ranges()
        timing = Timing(self, trained, [ranges])

        def run() -> None:
            for number in range(1 + PROFILED_STEPS):
                ranges.counting = number > 0  # the first one includes the profiler's start-up
                timing.step()

        compiled_whole = self.spec.compile and self.spec.compile_scope == "model"
        try:
            with named_layers(trained.model, compiled=compiled_whole):
                seen = record_overlap(run, names, on_gpu=self.on_gpu)
        except RuntimeError as error:
            return {"why_not": f"the profiler failed: {gist(error)}"}
        if not any(step.compute for step in seen.steps):
            return {"why_not": "the profiler saw no kernel: another profiler may hold CUPTI"}
        return {"why_not": None, "steps": [self._seen(step) for step in seen.steps], "trace": self._save(seen)}

    def _why_no_profiler(self) -> str | None:
        """Return why some rank has no profiler; None if all have one. If it failed in the middle, the others would wait
        for that rank."""
        try:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
                failure = None
        except RuntimeError as error:
            failure = gist(error)
        failed = [rank for rank, flag in enumerate(self.exchange(failure is not None)) if flag]
        if not failed:
            return None
        return f"the profiler of rank {failed[0]} failed" + ("" if failure is None else f": {failure}")

    def _seen(self, step: Any) -> dict[str, Any]:
        return {
            "step_ms": 1e-6 * step.length_ns,
            "communication_ms": total_ms(step.communication),
            "exposed_ms": total_ms(step.exposed),
            "spans": {name: at_most(spans, SPANS_PER_STEP) for name, spans in step.streams().items()},
        }

    def _save(self, seen: Recorded) -> str | None:
        if self.rank.index != 0 or not self.spec.trace:
            return None
        path = self.folder / "trace.json"
        seen.save(path)
        return str(path)

    # Parity

    def check_parity(self) -> dict[str, Any] | None:
        """Train some steps with the strategy and, on rank 0, in a single process on the whole batch; compare the
        results.

        The single process runs the ranks' batches one after the other and adds up their gradients, as the batch's mean
        loss does. Ranks run the same kernels, so only the communication differs.

        Returns:
            On rank 0 {"gradient_error", "parameter_error", "why_not"}, JSON-ready: the largest relative error of any
            gradient of the last step, and of any parameter's change since the beginning; and the names of these.
        """
        self.tell("checking parity")
        shared = self._trained_by_strategy()
        self._clean()
        if isinstance(shared, str):
            return {"gradient_error": None, "parameter_error": None, "why_not": shared}
        found = self._compared_to_one_process(shared)
        self._clean()
        return found if self.rank.index == 0 else None

    def _trained_by_strategy(self) -> dict[str, dict[str, Tensor]] | str:
        """Train with the strategy; return gradients and parameters, kept by rank 0, or the reason why they do not
        fit."""
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        trained = build(
            self.spec, self.spec.strategy, self.device, rank_batches(self.spec, self.rank.index, self.device)
        )
        gradients: dict[str, Tensor] = {}
        for number in range(PARITY_STEPS):
            trained.step.prepare()
            for name, work in trained.step.phases.items():
                if name == "optimizer" and number == PARITY_STEPS - 1:
                    gradients = self._kept(full_gradients(trained))
                work()
            self.rank.step_done()
            if number == 0 and self.on_gpu:
                # From the second step on, the optimizer's state always exists.
                torch.cuda.reset_peak_memory_stats()
            if number == 1 and (reason := self._why_not_compared(trained)):
                return reason
        if trained.optimizer is None:
            gradients = self._kept(full_gradients(trained))
        return {"gradients": gradients, "parameters": self._kept(full_parameters(trained))}

    def _why_not_compared(self, trained: Trained) -> str | None:
        """Return why the comparison does not fit into rank 0's memory, which is known after two steps; the same on all
        ranks.

        If it fits, choose the device on which rank 0 keeps the compared tensors.
        """
        no_process = no_room = None
        if self.rank.index == 0:
            no_process = self._why_one_process_is_too_large(trained)
            if no_process is None:
                no_room = self._choose_keeper(sum(size.numel * size.item_bytes for size in trained.sizes))
        elsewhere = "rank 0's memory does not suffice"
        if self.exchange(float(no_process is not None))[0]:
            self.too_large = no_process or elsewhere
        elif self.exchange(float(no_room is not None))[0]:
            return no_room or elsewhere
        return self.too_large

    def _why_one_process_is_too_large(self, trained: Trained) -> str | None:
        """Return why a single process surely does not fit into this rank's GPU, so that it need not be tried; None if
        it may fit.

        It takes this rank's peak, minus the units that are gathered at a time (at most two of parameters and two of
        gradients), plus the other ranks' parts of parameters and state. Gradients appear while activations are freed.
        """
        if not (self.on_gpu and isinstance(trained.wrapped, parallel.FullyShardedDataParallel)):
            return None
        mine = sum(map(local_bytes, trained.wrapped.parameters()))
        mine += 0 if trained.optimizer is None else state_bytes(trained.optimizer)
        units = [sum(one.memory.numel() * one.memory.itemsize for one in unit.held) for unit in trained.wrapped.units]
        whole = max(units, default=0)
        least = torch.cuda.max_memory_allocated() - 4 * whole + (self.rank.world_size - 1) * mine
        available = torch.cuda.mem_get_info()[1]
        if least <= available:
            return None
        return f"one process takes {least / MIB:.0f} MiB at least, and rank 0's GPU has {available / MIB:.0f} MiB"

    def _choose_keeper(self, model_bytes: int) -> str | None:
        """Choose the device on which rank 0 keeps the compared tensors: its GPU if all fit there, since copying takes
        many seconds.

        The single process takes no more than this rank's peak; a sharded strategy's peak lacks the other ranks'
        parameters, gradients and two optimizer states, of at most 4 bytes per element where parameters have 2.

        Returns:
            Why neither the GPU nor the host has room; None if one has.
        """
        # Both results, and the parameters as they were in the beginning.
        kept = 3 * model_bytes
        if self.on_gpu:
            missing = 4 * model_bytes * (2 if self.spec.parameter_dtype == "bf16" else 1)
            needed = torch.cuda.max_memory_allocated() + missing + kept
            # Memory of other processes is not available.
            available = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
            if needed < KEPT_SHARE * available:
                self.keeper = self.device
                return None
        self.keeper = torch.device("cpu")
        free = host_memory("MemAvailable")
        if free is not None and kept > free:
            return f"comparing takes {kept / MIB:.0f} MiB of the host's memory, and less is free"
        return None

    def _kept(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self.rank.index != 0:
            return {}
        return {name: tensor.detach().to(self.keeper, copy=True) for name, tensor in tensors.items()}

    def _compared_to_one_process(self, shared: dict[str, dict[str, Tensor]]) -> dict[str, Any]:
        """Train on rank 0 alone. The other ranks follow step by step, so that they do not count as hanging."""
        found: dict[str, Any] = {"gradient_error": None, "parameter_error": None, "why_not": None}
        work = one_process(self, shared, found) if self.rank.index == 0 else None
        going = True
        while going:
            if work is not None:
                try:
                    going = next(work, None) is not None
                except (OutOfMemory, RuntimeError, MemoryError) as error:
                    if not (isinstance(error, OutOfMemory) or is_out_of_memory(error)):
                        raise
                    found["why_not"] = f"one process does not fit into rank 0's memory: {gist(error)}"
                    going = False
            going = bool(self.exchange(float(going))[0])
            self.rank.step_done()
        return found


def one_process(run: RankRun, shared: dict[str, dict[str, Tensor]], found: dict[str, Any]) -> Iterator[bool]:
    """Train a single process on the batches of all ranks, and set the errors; yields after each batch."""
    spec, world_size = run.spec, run.rank.world_size
    batches = [rank_batches(spec, index, run.device) for index in range(world_size)]
    trained = build(spec, ALONE, run.device, batches[0])
    step = trained.step
    start = {name: parameter.detach().to(run.keeper, copy=True) for name, parameter in trained.model.named_parameters()}
    for number in range(PARITY_STEPS):
        for index in range(world_size):
            if index == 0:
                step.prepare()
            else:
                step.inputs, step.targets = batches[index].next()
            step.forward()
            step.loss = step.loss / world_size
            step.backward()
            yield True
        if number == PARITY_STEPS - 1:
            gradients = full_gradients(trained)
            errors = {name: relative_error(shared["gradients"].get(name), one) for name, one in gradients.items()}
            found["gradient_error"], found["gradient"] = worst(errors)
            del gradients
        if isinstance(step, TrainStep):
            step.optimize()
    if trained.optimizer is not None:
        errors = {
            name: relative_error(shared["parameters"].get(name), one, start[name])
            for name, one in full_parameters(trained).items()
        }
        found["parameter_error"], found["parameter"] = worst(errors)


def worst(errors: Mapping[str, float]) -> tuple[float, str]:
    """Return the largest error and its parameter; nan if the single process has a value that is not finite."""
    name = max(errors, key=lambda name: (math.isnan(errors[name]), errors[name]))
    return errors[name], name


def relative_error(shared: Tensor | None, alone: Tensor, start: Tensor | None = None) -> float:
    """Return |shared - alone| / |alone - start| in the L2 norm.

    Infinite if `shared` is missing or not finite, nan if `alone` is not finite.
    """
    expected = alone.detach().double()
    if shared is None:
        return math.inf
    difference = float(torch.linalg.vector_norm(shared.to(alone.device).double() - expected))
    if start is not None:
        expected = expected - start.to(alone.device).double()
    size = float(torch.linalg.vector_norm(expected))
    if not math.isfinite(size):
        return math.nan
    if not math.isfinite(difference):
        return math.inf
    if size == 0.0:
        return 0.0 if difference == 0.0 else math.inf
    return difference / size


class Timing:
    """Runs steps that begin on all ranks together."""

    def __init__(self, run: RankRun, trained: Trained, observers: Sequence[Observer] = ()) -> None:
        self._run, self._trained = run, trained
        self._clock = make_clock(run.device)
        self._where = Where()
        self._observers: list[Observer] = [self._where, *observers, self._clock]

    def step(self, turn: Turn | None = None) -> list[float]:
        """Run a step, and keep its times in `turn`; return every rank's wall time in ms.

        Raises:
            OutOfMemory: the memory did not suffice. DoesNotFit: nor did it for the step without communication.
        """
        step, run = self._trained.step, self._run
        self._where.prepares()
        with run._alone(self._trained.strategy), memory_needed_in(self._where):
            step.prepare()
        if run.on_gpu:
            torch.cuda.synchronize()
        run.exchange(0.0)
        with run._alone(self._trained.strategy), memory_needed_in(self._where):
            run_step(step.phases, self._observers)
        last = self._clock.last
        if turn is not None:
            turn.step_ms.append(last.wall_ms)
            if last.host_us is not None:
                turn.host_us.append(last.host_us)
            for name, time_ms in last.phases_ms.items():
                turn.phases_ms.setdefault(name, []).append(time_ms)
        walls = run.exchange(last.wall_ms)
        run.rank.step_done()
        return walls
