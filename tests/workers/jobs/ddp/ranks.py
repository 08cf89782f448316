"""What the ranks of test_ddp.py do. Ranks import it by name."""

import contextlib
import functools
import gc
import json
import math
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel import BucketedDataParallel, ShardedOptimizer
from parallel.process_group import Rank
from workers.jobs._base import parse_spec
from workers.jobs._training import building
from workers.jobs.ddp import overlap as overlap_module
from workers.jobs.ddp import parity as parity_module
from workers.jobs.ddp import rank as rank_module
from workers.jobs.ddp import strategies
from workers.jobs.ddp.memory import state_bytes
from workers.jobs.ddp.rank import Extent, measure_rank
from workers.jobs.ddp.replicas import samples
from workers.measure.memory import OutOfMemory
from workers.measure.own_step import OwnStep
from workers.measure.ranges import Ranges
from workers.model.steps import BackwardStep

SLOWER_MS = 120.0
"""How much longer a step of "sends slowly" takes in its communication."""
FORGOTTEN = "layers.1.ln1.weight"
"""The parameter whose gradient "forgets one" does not share: the smallest of the model, 5 % of all."""
BEGINS_LATE_S = 0.1
"""How much later than rank 0 rank 1 of "begins late" begins each profiled step."""
PROFILED = (
    *("bucketed", "fsdp, compiled", "torch_fsdp", "a look, fsdp"),
    *("bucketed, graph", "fsdp, graph"),
)
"""Specs whose steps run under the profiler, too, which takes longer than all else."""

EXTENTS: dict[str, Extent] = {"only times": "times", "a look": "look"}
"""What is measured, by the first part of a spec's name; all of others."""


class WithNorms(nn.Module):
    """Blocks that begin with a LayerNorm, whose gradients in 8 bits differ most if something is rounded otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 8)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4)
        )
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 61)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.norm(x))


class WithState(WithNorms):
    """A model that draws what it drops, also from a generator of its own, and computes with what it has seen, in
    buffers of which it makes one later, and a number of passes; it has a complex parameter, and one without use."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(3))
        self.phases = nn.Parameter(torch.ones(61, dtype=torch.complex64))
        self.passes, self.drawn = 1, torch.Generator().manual_seed(1)
        self.head = nn.Sequential(nn.Dropout(0.5), self.head)
        self.register_buffer("seen", torch.zeros(61))
        self.register_buffer("table", None)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = super().forward(tokens)
        with torch.no_grad():
            self.seen.lerp_(logits.mean((0, 1)), 0.5)
        self.table = torch.ones(61) if self.table is None else self.table
        self.passes += 1
        drawn = torch.rand(61, generator=self.drawn)
        return logits * (self.table + self.seen + drawn * self.passes) * (self.phases + 1j).abs()


class Kept:
    """In place of a rank's connection to the process that launched it: keeps what the rank reports."""

    def __init__(self) -> None:
        self.reports: list[Any] = []

    def send_bytes(self, message: bytes) -> None:
        kind, _, content = json.loads(message)
        if kind == "report":
            self.reports.append(content)


def run_one(
    name: str, spec: dict[str, Any], folder: str, variables: dict[str, str]
) -> tuple[dict[str, Any], list[Any]]:
    """Measure one spec in a process group that exists; return the result as a launch would, and what was reported."""
    kept: Any = Kept()
    rank = Rank(dist.get_rank(), dist.get_world_size(), "gloo", torch.device("cpu"), kept)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("default")  # torch's compiler warns of itself
        for variable, value in variables.items():
            patch.setenv(variable, value)
        return json.loads(json.dumps(run_all(rank, {name: spec}, folder)[name])), kept.reports


def dtypes_in_blocks(spec: dict[str, Any]) -> list[list[str]]:
    """Train a step in a process group that exists; return the dtypes of the blocks' inputs by their position."""
    parsed, seen = parse_spec(spec), [set[str]() for _ in range(3)]
    device = torch.device("cpu")
    batches = strategies.rank_batches(parsed, dist.get_rank(), device)
    trained = strategies.build(parsed, parsed.strategy, device, batches)
    for block in trained.model.layers:

        def forward(*inputs: Tensor, forward: Any = block.forward) -> Tensor:
            for dtypes, one in zip(seen, inputs, strict=True):
                dtypes.add(str(one.dtype))
            return forward(*inputs)

        block.forward = forward
    trained.step.prepare()
    for work in trained.step.phases.values():
        work()
    return [sorted(dtypes) for dtypes in seen]


def run_all(rank: Rank, specs: dict[str, Any], folder: str) -> dict[str, Any]:
    """Measure one spec after the other; the first part of a name may say what to break."""
    found: dict[str, Any] = {}
    # Measuring collects garbage: it need not look through all that was imported.
    gc.freeze()
    for name, spec in specs.items():
        with pytest.MonkeyPatch.context() as patch:
            # Dynamo alone: the rest of the compiler takes too long for every run of the tests.
            patch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
            if (how := name.split(", ")[0]) in BREAKS:
                BREAKS[how](patch, rank)
            if spec["step_code"] is None:
                patch.setattr(overlap_module, "MANY", overlap_module.PROFILED_STEPS)
            patch.setattr(overlap_module, "SHORT_MS", math.inf)  # a busy host's steps may be longer
            if name not in PROFILED and spec["step_code"] is None:
                patch.setattr(rank_module, "record_step_overlap", lambda *others: {"why_not": "it is not profiled"})
            optimizers = record_optimizers(patch)
            extent = EXTENTS.get(name.split(", ")[0], "all")
            found[name] = {**measure_rank(rank, spec, folder, extent=extent), "optimizers": optimizers}
    return found


def record_optimizers(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return what will have the optimizer of each side: its class, its parameters' shapes and its state's bytes."""
    recorded: dict[str, Any] = {}
    measure_steps = rank_module.measure_steps

    def measure(context: Any, trained: Any, *others: Any, **options: Any) -> Any:
        turn = measure_steps(context, trained, *others, **options)
        if (optimizer := trained.optimizer) is not None:
            shapes = [tuple(one.shape) for group in optimizer.param_groups for one in group["params"]]
            recorded[trained.strategy] = (type(optimizer).__name__, shapes, state_bytes([optimizer]))
        return turn

    patch.setattr(rank_module, "measure_steps", measure)
    return recorded


def begin_late(patch: pytest.MonkeyPatch, rank: Rank) -> None:
    begin = Ranges.step_begins

    def begins(ranges: Ranges) -> None:
        time.sleep(BEGINS_LATE_S)
        begin(ranges)

    if rank.index == 1:
        patch.setattr(Ranges, "step_begins", begins)


def send_nothing(patch: pytest.MonkeyPatch, rank: Rank) -> None:
    patch.setattr(strategies, "wrap", lambda spec, strategy, module, *group: (module, None))


def send_less(patch: pytest.MonkeyPatch, rank: Rank) -> None:
    """Of the batch's mean, which is half of both, leave 1/64 out."""
    wrap = strategies.wrap

    def send(spec: Any, strategy: str, module: Any, group: Any = None) -> Any:
        for parameter in module.parameters():
            parameter.register_hook(lambda gradient: gradient * (1 - 2 / 64))
        return wrap(spec, strategy, module, group)

    if rank.index == 1:
        patch.setattr(strategies, "wrap", send)


def send_slowly(patch: pytest.MonkeyPatch, rank: Rank) -> None:
    around_synchronization(patch, lambda module, finish: (lambda: time.sleep(1e-3 * SLOWER_MS), finish))


def forget_one(patch: pytest.MonkeyPatch, rank: Rank) -> None:
    def around(module: Any, finish: Callable[[], None]) -> tuple[Callable[[], None], ...]:
        forgotten = next(one for name, one in module.named_parameters() if name.endswith(FORGOTTEN))
        own: list[Tensor] = []
        return lambda: own.append(forgotten.grad.clone()), finish, lambda: forgotten.grad.copy_(own.pop())

    around_synchronization(patch, around)


def around_synchronization(patch, around) -> None:
    """Let the strategy, among all ranks, finish by these calls in place of its own."""
    wrap = strategies.wrap

    def wrapped(spec: Any, strategy: str, module: Any, group: Any = None) -> Any:
        found, finish = wrap(spec, strategy, module, group)
        if finish is None or group is not None:
            return found, finish
        calls = around(module, finish)
        return found, lambda: [call() for call in calls]

    patch.setattr(strategies, "wrap", wrapped)


def keep_state(patch: pytest.MonkeyPatch, rank: Rank) -> None:
    patch.setattr(building, "choose_model", lambda spec, device: WithState)


def build_too_much(patch: pytest.MonkeyPatch, rank: Rank, *, on: int = 1, times: float = math.inf) -> None:
    """One rank's memory does not hold the model of one process alone, so many times."""
    build, failed = strategies.build, []

    def built(spec: Any, strategy: str, *others: Any, **more: Any) -> Any:
        if strategy == strategies.NO_COMMUNICATION and len(failed) < times:
            failed.append(1)
            raise OutOfMemory("out of memory in making the model: too much")
        return build(spec, strategy, *others, **more)

    if rank.index == on:
        patch.setattr(strategies, "build", built)


def run_out(patch: pytest.MonkeyPatch, rank: Rank) -> None:
    forward = BackwardStep.forward

    def run(step: Any) -> None:
        if type(step.module).__name__ == "TransformerLM":  # no wrapper is around it
            raise RuntimeError("CUDA out of memory. Tried to allocate 1 GiB")
        forward(step)

    if rank.index == 1:
        patch.setattr(BackwardStep, "forward", run)


def without_host_memory(patch: pytest.MonkeyPatch, rank: Rank) -> None:
    if rank.index == 0:
        patch.setattr(parity_module, "host_memory", lambda name: 0)


BREAKS: dict[str, Callable[[pytest.MonkeyPatch, Rank], None]] = {
    "sends nothing": send_nothing,
    "lacks a rank of 64": send_less,
    "sends slowly": send_slowly,
    "begins late": begin_late,
    "forgets one": forget_one,
    "has state": keep_state,
    "does not fit": build_too_much,
    "does not fit later": run_out,
    "one process does not fit": functools.partial(build_too_much, on=0, times=1),
    "no host memory": without_host_memory,
}
"""What may be broken in a rank's process, by the first part of a spec's name."""


def replicas(how: str) -> Any:
    """Train a model of the user's own, wrapped as `how` says, and return `samples`; ranks list it and a twin, which is
    not trained, in another order."""
    ours, rank = how.startswith("ours"), dist.get_rank()

    def wrapped(module: nn.Module) -> Any:
        return BucketedDataParallel(module) if ours else nn.parallel.DistributedDataParallel(module)

    def make() -> Callable[[], None]:
        torch.manual_seed(0)
        module, other = (nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4), nn.BatchNorm1d(4)) for _ in range(2))
        if how == "frozen":
            module[1].requires_grad_(False).weight.fill_(rank)
        if how == "ignored":
            nn.init.constant_(module[0].weight, rank)
            module._ddp_params_and_buffers_to_ignore = ["0.weight"]
        model, twin = wrapped(module), wrapped(other)
        kind = functools.partial(torch.optim.AdamW, lr=1e-4 * (1 + rank * how.endswith("rate")))
        parameters = model.parameters()
        optimizer: Any = ShardedOptimizer(parameters, kind) if how.endswith("sharded") else kind(parameters)

        def step() -> None:
            assert twin is not None
            with model.no_sync() if how == "local" else contextlib.nullcontext():
                model(torch.randn(4, 8) + rank).square().mean().backward()
            if ours:
                model.finish_gradient_synchronization()
            if not (how == "steps alone" and rank):
                optimizer.step()
            optimizer.zero_grad()

        return step

    own = OwnStep()
    own.make(make)
    for _ in range(3):
        own.prepare()
        own.phases(())
    return samples(own.roots[:: 1 if rank else -1])
