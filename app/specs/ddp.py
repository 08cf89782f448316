"""`ddp`: a data-parallel training step of several ranks, and the cost of their communication."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from app.specs._base import Resources, SpecBase, check_nodes, field_error
from app.specs._identity import Scalar
from app.specs._training import IN_BF16, TrainingSpec

DEVICE_OF_BACKEND = {"gloo": "cpu", "nccl": "cuda"}
"""The type of device whose memory each backend moves."""
FULLY_SHARDED = ("fsdp", "torch_fsdp")
WITH_BUCKETS = ("bucketed", "torch_ddp")


class DdpSpec(TrainingSpec):
    """Time data-parallel training on several GPUs or, over gloo, in several processes of a CPU. Each rank is a process
    with `batch_size` sequences of its own. Two other steps take turns with it: the same over a group that moves
    nothing, which shows the exposed communication, and that of one process alone, which shows the net cost."""

    kind: Literal["ddp"] = "ddp"
    strategy: Literal["none", "naive", "flat", "overlapped", "bucketed", "fsdp", "torch_ddp", "torch_fsdp"] = "bucketed"
    """The strategy by which ranks average gradients. `none`: not at all, each rank computes alone, or a step of your
    own averages them. `naive`: after the backward pass, one all-reduce for each parameter. `flat`: after it, one
    for all. `overlapped`: during it, one for each parameter. `bucketed`: during it, one for each bucket. `fsdp`:
    parameters, gradients and optimizer state are sharded. `torch_ddp` and `torch_fsdp` (FSDP2) are torch's own."""
    world_size: int = Field(default=2, ge=1, le=64)
    """Ranks: GPUs with nccl, processes with gloo, which may be more than the host has cores."""
    nodes: int = Field(default=1, ge=1, le=64)
    """Nodes of a cluster on which the ranks run, as many on each. Several need a worker with `--executor slurm`."""
    backend: Literal["gloo", "nccl"] = "gloo"
    """`nccl` runs on GPUs, `gloo` on a CPU."""
    bucket_size_mb: float | None = Field(default=25.0, gt=0, le=1e6)
    """`bucketed` and `torch_ddp` only: largest size of a bucket in MB of 2²⁰ bytes; null: one bucket."""
    sharded_optimizer: bool = False
    """Each rank keeps and updates only a part of the optimizer's state. With `torch_ddp`, torch's
    ZeroRedundancyOptimizer does so."""
    cast_before_communication: bool | None = None
    """`fsdp` and `torch_fsdp` only: cast parameters to bf16 before they are gathered, and compute in bf16 without
    autocast; gradients are reduced in bf16, too. Null: yes with precision bf16 or fp8. If false, autocast keeps
    bf16 copies of all weights from the forward to the backward pass."""
    reshard_after_forward: bool = True
    """`fsdp` and `torch_fsdp` only: free gathered parameters between the forward and the backward pass. If false, they
    stay, and are gathered once: each rank sends as much as without sharding, and divides gradients and optimizer state
    only (ZeRO stage 2)."""
    prefetch: int = Field(default=1, ge=0, le=64)
    """`fsdp` only: blocks whose parameters are gathered ahead of the one that computes. 0: each is gathered when it is
    needed, and computing waits for it."""
    mode: Literal["forward_backward", "train_step"] = "train_step"
    """`forward_backward` computes and shares gradients; `train_step` adds the optimizer. Other modes have no gradients
    to share."""
    accumulation_steps: int = Field(default=1, ge=1, le=65_536)
    """Micro-batches of `batch_size` sequences per step and rank, whose gradients are added up. Ranks share the sum,
    after the last one; `fsdp` and `torch_fsdp` share those of each, since no rank has memory for whole gradients."""
    cuda_graph: bool = False
    """`nccl` only: capture the whole step with its communication in one CUDA graph, so that the host launches once for
    each step. The same strategy is measured without it, too."""
    new_tokens: int = Field(default=32, ge=2, le=1_048_576)
    """Without effect: nothing is generated."""
    batch_size: int = Field(default=2, ge=1, le=65_536)
    """Sequences per micro-batch and rank; a step has one micro-batch unless `accumulation_steps` says otherwise."""
    measure_steps: int | None = Field(default=None, ge=1, le=100_000)
    """Steps measured with the strategy, as many over a group that moves nothing, and as many of one process alone, in
    up to six turns of each; null: 10, and on a CPU as many as take about three seconds, 10 to 1000."""
    trace: bool = False
    """Keep a Chrome trace of some steps of each rank."""
    trace_max_mib: int = Field(default=50, ge=1, le=1024)
    """Largest compressed trace that is kept of a rank, in MiB; the log names a larger one."""
    snapshot: bool = False
    """Keep a memory snapshot of a step of each rank; `nccl` only."""
    step_timeout_s: float = Field(default=120.0, gt=0, le=3600)
    """A rank that makes no step for this many seconds ends the job. Its first step may take 5 minutes, and with
    `compile` every step may."""

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        **TrainingSpec.presets,
        "8b": {
            "model": {"size": "8b"},
            "batch_size": 1,
            "strategy": "fsdp",
            "backend": "nccl",
            "precision": "bf16",
            "parameter_dtype": "bf16",
            "context_length": 32_768,
            "attention": "triton",
            "compile": True,
            "activation_checkpointing": True,
            "checkpoint_scope": "selective",
            "checkpoint_layers": 0,
            "fused": ["rope"],
            "fused_linear_cross_entropy": True,
            "optimizer": "triton_adamw",
        },
    }
    unmeasured: ClassVar[frozenset[str]] = SpecBase.unmeasured | {
        *("trace", "trace_max_mib", "snapshot", "step_timeout_s", "new_tokens")
    }
    gone: ClassVar[Mapping[str, Scalar]] = {"first_bucket_size_mb": None, "gradients_as_views": True}
    added: ClassVar[Mapping[str, Scalar]] = {
        **TrainingSpec.added,
        "reshard_after_forward": True,
        "prefetch": 1,
        "nodes": 1,
    }
    implied: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "strategy": ("reshard_after_forward", "prefetch", "gradients_as_views")
    }
    metric_notes: ClassVar[Mapping[frozenset[str], str]] = {
        frozenset({"buckets"}): "buckets: a single one travels after the backward pass, which then hides nothing.",
        frozenset({"predicted_exposed_ms"}): "predicted_exposed_ms: of strategy bucketed with backend nccl; on a CPU "
        "messages take the cores that compute, which no line through their times predicts.",
    }
    first_columns: ClassVar[dict[str, tuple[str, ...]]] = {
        "kernels": ("rank", "name", "class", "total_ms", "share_percent", "calls", "median_us"),
    }
    finding: ClassVar[str] = "stragglers"
    table_rows: ClassVar[tuple[str, ...]] = ("model", "strategy", "bucket_size_mb", "sharded_optimizer", "precision")
    table_columns: ClassVar[tuple[str, ...]] = (
        "buckets", "step_ms", "eager_step_ms", "computation_step_ms", "exposed_communication_ms",
        "eager_exposed_communication_ms", "host_us", "eager_host_us", "predicted_exposed_ms", "net_cost_ms",
        "communication_ms", "communication_mib", "tokens_per_s", "mfu", "peak_memory_mib", "optimizer_state_mib",
        "gradient_error",
    )  # fmt: skip

    @model_validator(mode="before")
    @classmethod
    def _own_step_has_no_strategy(cls, fields: Any) -> Any:
        if isinstance(fields, Mapping) and fields.get("step_code") is not None and "strategy" not in fields:
            return {**fields, "strategy": "none"}
        return fields

    @model_validator(mode="after")
    def _ranks_can_do_it(self) -> Self:
        self._check_device()
        check_nodes(self.nodes, self.world_size)
        if self.nodes > 1 and self.step_code is not None:
            raise field_error("step_code", "is for one node: the others do not have its files; leave it out, or nodes")
        if self.step_code is not None and self.strategy != "none":
            raise field_error("strategy", "step_code does its own parallelism: choose none, or leave strategy out")
        if self.sharded_optimizer:
            self._check_sharded_optimizer()
        if self.strategy in FULLY_SHARDED:
            self._check_fully_sharded()
        elif self.cast_before_communication:
            raise field_error(
                "cast_before_communication", f"strategy {self.strategy} shares float32 gradients: choose fsdp"
            )
        elif not self.reshard_after_forward:
            raise field_error(
                "reshard_after_forward", f"{self.strategy} keeps parameters whole: choose fsdp, or leave it out"
            )
        if self.prefetch != 1 and self.strategy != "fsdp":
            raise field_error("prefetch", f"{self.strategy} has no such setting: choose fsdp, or leave it out")
        return self

    def _check_device(self) -> None:
        needed = DEVICE_OF_BACKEND[self.backend]
        if self.device not in ("auto", needed):
            other = "gloo" if self.backend == "nccl" else "nccl"
            raise field_error(
                "backend", f"{self.backend} runs on device {needed}: choose backend {other}, or leave device out"
            )
        if self.backend == "gloo" and self.cuda_graph:
            raise field_error("cuda_graph", "a CPU has no CUDA graphs: choose backend nccl, or leave it out")
        if self.snapshot and self.cuda_graph:
            raise field_error("snapshot", "a replayed graph allocates nothing: leave it out, or cuda_graph")
        if self.backend == "gloo" and self.snapshot:
            raise field_error("snapshot", "is of a GPU's memory: choose backend nccl, or leave it out")
        if self.backend == "gloo" and self.fused and self.step_code is None:
            raise field_error("fused", "Triton has no kernels for a CPU: choose backend nccl, or leave it out")
        if self.backend == "gloo" and self.updates_by_triton and self.step_code is None:
            raise field_error("optimizer", "Triton has no kernels for a CPU: choose adamw, or backend nccl")
        if self.backend == "gloo" and self.precision == "tf32":
            raise field_error("precision", "tf32 is a GPU format: choose fp32 or bf16, or backend nccl")

    def _check_sharded_optimizer(self) -> None:
        if self.strategy in FULLY_SHARDED:
            raise field_error(
                "sharded_optimizer",
                f"{self.strategy} shards the optimizer's state already: leave sharded_optimizer out",
            )
        if self.strategy == "none":
            raise field_error(
                "sharded_optimizer",
                "strategy none does not communicate, and ranks would have to fetch parameters: choose another strategy",
            )

    def _check_fully_sharded(self) -> None:
        if self.precision == "fp16" and self.strategy == "torch_fsdp":
            raise field_error(
                "precision", "with torch_fsdp, each rank sees only its part of the overflows: choose bf16 or fsdp"
            )
        if self.casts and self.precision not in IN_BF16:
            raise field_error(
                "cast_before_communication", "casts to bf16: choose precision bf16 or fp8, or leave it out"
            )
        if self.compile and self.compile_scope == "model":
            raise field_error("compile_scope", f"{self.strategy} gathers block by block: choose compile_scope blocks")

    @property
    def casts(self) -> bool:
        """True if parameters are cast to bf16 before they are gathered."""
        if self.cast_before_communication is None:
            return self.strategy in FULLY_SHARDED and self.precision in IN_BF16
        return self.cast_before_communication

    def resources(self) -> Resources:
        device_type: Literal["cuda", "cpu"] = "cuda" if self.backend == "nccl" else "cpu"
        return Resources(device_type=device_type, devices=self.world_size // self.nodes, nodes=self.nodes)

    def without_effect(self) -> list[str]:
        return [*super().without_effect(), *self.changed("new_tokens", *([] if self.trace else ["trace_max_mib"]))]

    def normalised(self, identity: dict[str, Scalar]) -> tuple[dict[str, Scalar], dict[str, Scalar]]:
        """Normalise as other training kinds do, and set fields that the strategy or the mode does not use to null."""
        identity, labels = super().normalised(identity)
        identity.pop("new_tokens", None)
        if self.strategy not in WITH_BUCKETS:
            identity["bucket_size_mb"] = None
        if self.strategy == "bucketed":
            # In release 0.1.0, which could also do without, it was part of the key.
            identity["gradients_as_views"] = True
        if self.strategy not in FULLY_SHARDED:
            identity["reshard_after_forward"] = None
        if self.strategy != "fsdp":
            identity["prefetch"] = None
        if self.strategy not in FULLY_SHARDED or self.precision not in IN_BF16:
            identity["cast_before_communication"] = None
        else:
            identity["cast_before_communication"] = self.casts
        if self.mode != "train_step" or self.step_code is not None:
            identity["sharded_optimizer"] = None
        # A step of one's own has none of our strategies; keys have it since release 0.1.0.
        return identity, labels if self.step_code is None else {**labels, "strategy": None}
