"""The strategies of `ddp`: wraps a model, makes its training step, and knows what a step communicates."""

import functools
import inspect
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

import parallel
from app.specs.ddp import FULLY_SHARDED, DdpSpec
from parallel.accounting import Traffic, step_traffic, traffic_factor
from parallel.data_parallel import DataParallel
from workers.jobs import _own_step
from workers.jobs._training import building, fp8
from workers.jobs.ddp.values import SYNCHRONIZATION
from workers.measure.memory import MIB, translate_oom
from workers.measure.own_step import OwnStep
from workers.measure.warmup import min_calls
from workers.model.batches import Batches, RandomBatches
from workers.model.compiled import BLOCKS
from workers.model.float8 import LinearLayer
from workers.model.graphed import WARMUP_STEPS, GraphedStep
from workers.model.optimizer import class_and_arguments
from workers.model.precision import PRECISIONS, set_parameter_dtype
from workers.model.steps import ACCUMULATION, MAX_LEARNING_RATE, BackwardStep, TrainStep
from workers.outcome import RunnerError
from workers.torch_host import seed_everything

NO_COMMUNICATION = "none"
"""The strategy of one process alone."""
SILENT = "silent"
"""Label of the turns in which the spec's own strategy runs over a group that moves nothing."""
EAGER, EAGER_SILENT = "eager", "eager silent"
"""Labels of a step that is captured in a CUDA graph elsewhere: its strategy, and that over a silent group, launched
kernel by kernel. Each takes one turn, of all measured steps."""
DDP_WARMUP = 11
"""Steps that torch's DistributedDataParallel needs before a capture: in the first ten it times itself by events that
the host asks for."""


@dataclass(frozen=True)
class Size:
    """The size of a parameter before anything was sharded."""

    numel: int
    item_bytes: int
    dimensions: int
    is_in_block: bool = True
    """False for what belongs to no block of the model: embedding, last norm and output layer."""
    is_trained: bool = True


@dataclass
class Trained:
    """A model in its wrapper, and the step that trains it."""

    strategy: str
    """The spec's, or another side's label."""
    model: nn.Module
    wrapped: nn.Module
    """The module that the step calls: the model, or the wrapper around it."""
    step: BackwardStep
    sizes: list[Size]
    """Of the trainable parameters."""
    frozen: list[Size] = field(default_factory=list)
    """Of the others."""

    own: OwnStep | None = None
    graphed: GraphedStep | None = None
    linear_layers: Sequence[LinearLayer] = ()
    """With precision fp8, those of the model."""

    @property
    def repeated(self) -> BackwardStep | GraphedStep:
        return self.graphed or self.step

    @property
    def returned(self) -> object:
        """What the last step has returned, or our own step's loss."""
        return {"loss": getattr(self.step, "loss", None)} if self.own is None else self.own.returned

    @property
    def optimizer(self) -> Optimizer | None:
        return self.step.optimizer if isinstance(self.step, TrainStep) else None

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """Ours, or all of a step of the user's own."""
        return self.own.optimizers if self.own is not None else [self.optimizer] if self.optimizer is not None else []

    @property
    def parameters(self) -> list[torch.Tensor]:
        return [*self.wrapped.parameters()] if self.own is None else self.own.parameters


def build(
    spec: DdpSpec,
    strategy: str,
    device: torch.device,
    batches: Batches,
    group: dist.ProcessGroup | None = None,
    *,
    warmed: bool = False,
) -> Trained:
    """Build the model, wrap it as the strategy does, and make its step. Raises OutOfMemory: it does not fit;
    Unsupported: the model does not exist here, or does not support the spec's options.

    Args:
        strategy: The spec's; NO_COMMUNICATION; SILENT for the spec's over a silent group; or EAGER or EAGER_SILENT for
            the same without a CUDA graph.
        group: The ranks that communicate; None: all of them.
        warmed: This process has trained the same model before, and has compiled its kernels: a step before the capture
            of a CUDA graph suffices, which makes the optimizer's state and shows hooks the order of the parameters.
    """
    if strategy in (EAGER, EAGER_SILENT):
        spec = spec.model_copy(update={"cuda_graph": False})
    stream = capture_stream(device) if spec.cuda_graph else None
    with translate_oom("making the model"), torch.cuda.stream(stream):
        seed_everything(spec.seed)
        if spec.step_code is not None:
            return of_own_step(_own_step.maker(spec.step_code, device, spec.arguments)())
        with device:
            model = building.choose_model(spec, device)()
        set_parameter_dtype(model, spec.parameter_dtype)
        layers = fp8.to_float8(spec, device, model)
        every = [
            Size(one.numel(), one.element_size(), one.dim(), name.startswith(f"{BLOCKS}."), one.requires_grad)
            for name, one in model.named_parameters()
        ]
        call = building.compiled(spec, model, inside_hooks=spec.strategy == "fsdp")
        name = NO_COMMUNICATION if strategy == NO_COMMUNICATION else spec.strategy
        wrapped, finish = wrap(spec, name, call, group)
        step = make_step(spec, name, wrapped, batches, finish, group)
    sizes, frozen = ([size for size in every if size.is_trained == kind] for kind in (True, False))
    trained = Trained(strategy, model, wrapped, step, sizes, frozen, linear_layers=layers)
    if stream is not None:
        torch.cuda.current_stream().wait_stream(stream)
        warmup = DDP_WARMUP if name == "torch_ddp" else 1 if warmed else WARMUP_STEPS
        trained.graphed = GraphedStep(step, stream, warmup)
    return trained


@functools.cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of all captures on a device: cuBLAS keeps memory for each stream in which it works."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def of_own_step(own: OwnStep) -> Trained:
    """Return a step of the user's own, which does its own parallelism."""
    sizes = [Size(one.numel(), one.element_size(), one.dim()) for one in own.trained]
    return Trained(NO_COMMUNICATION, own.model, own.model, cast("BackwardStep", own), sizes, own=own)


def wrap(
    spec: DdpSpec, strategy: str, module: nn.Module, group: dist.ProcessGroup | None = None
) -> tuple[nn.Module, Callable[[], None] | None]:
    """Return the module wrapped over a group (None: all ranks), and the function that finishes its communication; None
    if there is nothing to finish."""
    cast = torch.bfloat16 if spec.casts else None
    wrapped: DataParallel | parallel.FullyShardedDataParallel
    match strategy:
        case "naive":
            wrapped = parallel.NaiveDataParallel(module, group)
        case "flat":
            wrapped = parallel.FlatDataParallel(module, group)
        case "overlapped":
            wrapped = parallel.OverlappedDataParallel(module, group)
        case "bucketed":
            wrapped = parallel.BucketedDataParallel(module, spec.bucket_size_mb, process_group=group)
        case "fsdp":
            wrapped = parallel.FullyShardedDataParallel(
                module,
                cast,
                process_group=group,
                reshard_after_forward=spec.reshard_after_forward,
                prefetch=spec.prefetch,
            )
        case "torch_ddp":
            return torch_ddp(module, spec.bucket_size_mb, group), None
        case "torch_fsdp":
            return torch_fsdp(module, cast, group, reshard_after_forward=spec.reshard_after_forward), None
        case _:
            return module, None
    return wrapped, wrapped.finish_gradient_synchronization


class _TorchDdp(nn.parallel.DistributedDataParallel):
    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Raise RunnerError where a parameter had no gradient: torch's error advises on arguments of its own."""
        try:
            return super().forward(*inputs, **named)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            lacking = re.search(r"did not receive grad for rank \d+: (\d+)", str(error))
            if lacking is None:
                raise
            names = [name for name, parameter in self.module.named_parameters() if parameter.requires_grad]
            raise RunnerError(
                f"torch_ddp needs a gradient of each trainable parameter, and {names[int(lacking[1])]} got none: "
                "use it, set its requires_grad to False, or choose another strategy, such as bucketed"
            ) from error


def torch_ddp(module: nn.Module, bucket_size_mb: float | None, group: dist.ProcessGroup | None = None) -> nn.Module:
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
        "process_group": group,
    }
    return _TorchDdp(module, **options)


def torch_fsdp(
    module: nn.Module,
    dtype: torch.dtype | None,
    group: dist.ProcessGroup | None = None,
    *,
    reshard_after_forward: bool = True,
) -> nn.Module:
    """Shard the module by torch's FSDP2, each block by itself, in place."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    device = next(module.parameters()).device.type
    mesh = DeviceMesh.from_group(group, device) if group else init_device_mesh(device, (dist.get_world_size(),))
    # Rotary angles stay float32. torch 2.11 would cast them in the forward pass, and not when a checkpoint repeats it.
    policy = MixedPrecisionPolicy(param_dtype=dtype, cast_forward_inputs=False)
    for block in getattr(module, BLOCKS, ()):
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    return module


def make_step(
    spec: DdpSpec,
    strategy: str,
    wrapped: nn.Module,
    batches: Batches,
    finish: Callable[[], None] | None,
    group: dist.ProcessGroup | None = None,
) -> BackwardStep:
    """Make the repeated step: that of other training kinds, with the communication between its phases."""
    casts = spec.casts and strategy in FULLY_SHARDED
    precision = PRECISIONS["fp32" if casts else spec.precision]
    step: BackwardStep
    options: dict[str, Any] = {"model_has_loss": spec.model_has_loss, "micro_batches": spec.accumulation_steps}
    if spec.mode == "train_step":
        total = min_calls(spec.warmup_steps) + (spec.measure_steps or building.STEPS)
        optimizer = make_optimizer(spec, strategy, wrapped, group)
        clip = spec.gradient_clip_norm
        step = TrainStep(wrapped, batches, precision, wrapped, optimizer, total, clip, **options)
    else:
        step = BackwardStep(wrapped, batches, precision, wrapped, **options)
    if spec.accumulation_steps > 1 and isinstance(wrapped, DataParallel | nn.parallel.DistributedDataParallel):
        step.phases[ACCUMULATION] = wrapped.no_sync()(step.accumulate)
    if finish is not None:
        last = step.phases.pop("optimizer", None)
        step.phases[SYNCHRONIZATION] = finish
        if last is not None:
            step.phases["optimizer"] = last
    return step


def make_optimizer(
    spec: DdpSpec, strategy: str, wrapped: nn.Module, group: dist.ProcessGroup | None = None
) -> Optimizer:
    """Make the optimizer, sharded over the group if the spec asks for it and the strategy communicates."""
    optimizer_class, options = class_and_arguments(spec.optimizer, master_weights=spec.master_weights)
    parameters = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
    arguments: dict[str, Any] = {"lr": MAX_LEARNING_RATE, **options}
    if spec.cuda_graph:
        arguments |= {"lr": torch.tensor(MAX_LEARNING_RATE, device=parameters[0].device), "capturable": True}
    if not spec.sharded_optimizer or strategy == NO_COMMUNICATION:
        return optimizer_class(parameters, **arguments)
    if strategy == "torch_ddp":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        made: Optimizer = ZeroRedundancyOptimizer(
            parameters, optimizer_class=optimizer_class, process_group=group, **arguments
        )
        return made
    return parallel.ShardedOptimizer(parameters, optimizer_class, process_group=group, **arguments)


def rank_batches(spec: DdpSpec, rank: int, device: torch.device) -> RandomBatches:
    seed = (spec.seed + rank) % 2**63
    sequences = spec.accumulation_steps * spec.batch_size
    return RandomBatches(spec.model.vocab_size, sequences, spec.context_length, device, seed)


def number_of_buckets(wrapped: nn.Module) -> int:
    """Return into how many buckets a wrapper divides gradients; torch's does so in the second step."""
    if not isinstance(wrapped, nn.parallel.DistributedDataParallel):
        return len(getattr(wrapped, "buckets", ()))
    logged = wrapped._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    return len(str(logged.get("rebuilt_bucket_sizes") or logged["bucket_sizes"]).split(","))


def communication(spec: DdpSpec, trained: Trained, operations: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Return the communication of a step: (operation, bytes of the full tensors, bytes that a rank sends).

    With `fsdp` that of the recorded `operations`, if there are any: what is gathered depends on how a model calls its
    units. Otherwise formulas, which parallel.accounting has with their sources, without the few bytes with which ranks
    report which gradients they have. torch's ZeroRedundancyOptimizer broadcasts what ours gathers: as many bytes.
    """
    moved = Counter[str]()
    if spec.strategy == "fsdp":
        for operation, size, *_ in operations:
            moved[operation] += size
    return [
        [operation, size, round(size * traffic_factor(operation, spec.world_size))]
        for operation, size in (moved or vars(_traffic(spec, trained))).items()
        if size
    ]


def _traffic(spec: DdpSpec, trained: Trained) -> Traffic:
    # fsdp shards parameters with two axes or more, torch_fsdp all of them; the others shard none.
    least = {"fsdp": 2, "torch_fsdp": 0}.get(spec.strategy)
    sharded = kept = once = frozen = 0
    for size in (*trained.sizes, *trained.frozen):
        if least is not None and size.dimensions >= least:
            travelling = size.numel * (2 if spec.casts else size.item_bytes)
            sharded += travelling * size.is_trained
            frozen += travelling * (not size.is_trained)
            stays = spec.strategy == "torch_fsdp" and not size.is_in_block
            once += travelling * (stays or not spec.reshard_after_forward)
        else:
            kept += size.numel * size.item_bytes * size.is_trained
    return step_traffic(
        spec.strategy,
        gradient_bytes=sharded + kept,
        parameter_bytes=sharded + kept,
        sharded_bytes=sharded,
        gathered_once_bytes=once,
        frozen_bytes=frozen,
        sharded_optimizer=spec.sharded_optimizer and spec.mode == "train_step",
        micro_batches=spec.accumulation_steps,
    )
