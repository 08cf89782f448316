"""Does a training step fit? Peaks on each device by strategy, the fewest devices, and what would make it fit.

A peak is that of `workers.model.step_memory`, which plays the step once for each question. Tensor parallelism divides
every tensor but the libraries' workspaces (Korthikanti et al., 2022, equation 4).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

from app.specs.estimate import EstimateSpec, MeshSpec
from flopwatch.text.numbers import number
from workers.measure.table import Column, Scalar
from workers.model.accounting import Attention, Shape, StepMemory
from workers.model.step_memory import PARTS, Choices, Moment, Sharing, bytes_of, moments
from workers.reporter import Reporter

GIB, MIB = 2**30, 2**20
MOST_DEVICES = 2**20
"""As many devices as `mesh.fsdp` allows."""
MOST_TENSOR = 2**16
"""As many as `mesh.tensor` allows."""
SHARDED = ("fully_sharded", "sharded_activations", "mesh")
"""Strategies that shard parameters, gradients and optimizer state."""
OTHERWISE = "another strategy, or a smaller model"
"""What helps where no field does."""
OR = " or "
"""Between changes of which each alone makes it fit."""
SPLIT_BY_TENSOR = ("tensor", "mesh")
"""Strategies that split the model's heads and d_ff."""


@dataclass(frozen=True)
class Question:
    """A step on devices of one size."""

    shape: Shape
    step: StepMemory
    choices: Choices
    fsdp: int
    tensor: int
    share: Fraction
    """The part of the activations that `sharded_activations` shards."""
    in_16_bits: bool
    """Whether sharded weights travel in 16 bits."""
    limit: int
    """Bytes of a device."""

    def devices(self, strategy: str) -> int:
        """Return the number of devices that a strategy uses."""
        return {"none": 1, "tensor": self.tensor, "mesh": self.fsdp * self.tensor}.get(strategy, self.fsdp)

    def parts(self, strategy: str) -> tuple[Moment, dict[str, int]]:
        """Return the moment of the peak on a device, and its bytes by part."""
        moment = max(self.moments(strategy), key=lambda moment: moment.total)
        split = self.tensor if strategy in SPLIT_BY_TENSOR else 1
        return moment, {part: -(-moment.part(part) // (1 if part == "workspaces" else split)) for part in PARTS}

    def moments(self, strategy: str) -> Sequence[Moment]:
        """Return the highest uses of each part of the step on a device, before tensor parallelism divides them."""
        shards = self.fsdp
        sharing = Sharing(gathered_in_16_bits=self.in_16_bits)
        if strategy in SHARDED:
            sharing = replace(sharing, parameters=shards)
        if strategy == "sharded_optimizer":
            sharing = replace(sharing, optimizer=shards)
        if strategy == "sharded_activations":
            sharing = replace(sharing, activations=1 - self.share + self.share / shards)
        return _moments(self.shape, self.step, self.choices, sharing)

    def peak(self, strategy: str) -> int:
        """Return the bytes on each device at the peak."""
        return sum(self.parts(strategy)[1].values())

    def fits(self, strategy: str) -> bool:
        return self.peak(strategy) <= self.limit

    def fewest_shards(self, strategy: str) -> int | None:
        """Return the fewest devices along the fsdp axis with which it fits; None if no number of them suffices."""
        return smallest(lambda fsdp: replace(self, fsdp=fsdp).fits(strategy))

    def fewest(self, strategy: str, splits: Sequence[int]) -> Mesh | None:
        """Return the mesh of the fewest devices with which it fits, as `fewest_devices` does."""
        return fewest_devices(
            strategy, splits, lambda fsdp, tensor: replace(self, fsdp=fsdp, tensor=tensor).fits(strategy)
        )

    def fewer(self, fits: Sequence[Fit], splits: Sequence[int]) -> str | None:
        """Say which one change needs the fewest devices, several but fewer than the step as it is; None if none
        does."""
        least = min((fit.fewest.devices for fit in fits if fit.fewest is not None), default=MOST_DEVICES)
        best: str | None = None
        for name, other in self.savers():
            for fit in fits:
                mesh = other.fewest(fit.strategy, splits)
                if mesh is not None and mesh.devices < least:
                    least, best = mesh.devices, f"{mesh.devices} suffice with {name}, {mesh.text(fit.strategy)}"
        return best if least > 1 else None  # with one device, it is in `helps`

    def helps(self, strategy: str) -> str | None:
        """Say what would make it fit; None if it fits."""
        if self.fits(strategy):
            return None
        found = [f"{name} ({gib(other.peak(strategy))})" for name, other in self.savers() if other.fits(strategy)]
        if (batch := self.smaller_batch(strategy)) is not None:
            found.append(f"batch_size={batch}")
        if strategy not in ("none", "data", "tensor") and (fewest := self.fewest_shards(strategy)) is not None:
            found.append(f"mesh.fsdp={fewest}")
        if found:
            return OR.join(found)
        together, changes = self, []
        while change := next(together.savers(), None):
            changes.append(change[0])
            together = change[1]
        names = " with ".join(changes)
        if names and together.fits(strategy):
            return f"{names} ({gib(together.peak(strategy))})"
        if names and (batch := together.smaller_batch(strategy)) is not None:
            return f"{names} with batch_size={batch}"
        if strategy not in SHARDED:
            return self._in_16_bits(strategy) or OTHERWISE
        fewest = together.fewest_shards(strategy)
        return "a smaller model" if fewest is None else f"{names or 'nothing else'} with mesh.fsdp={fewest}"

    def _in_16_bits(self, strategy: str) -> str | None:
        """Say what makes it fit with parameters in bf16, which comes last, since it changes what is trained."""
        if self.step.precision != "bf16" or self.step.parameter_dtype == "bf16":
            return None
        narrow = replace(self, step=replace(self.step, parameter_dtype="bf16"))
        more = narrow.helps(strategy)
        if more is None:
            return f"parameter_dtype=bf16 ({gib(narrow.peak(strategy))})"
        if more == OTHERWISE:
            return None
        return OR.join(f"parameter_dtype=bf16 with {change}" for change in more.split(OR))

    def savers(self) -> Iterator[tuple[str, Question]]:
        """Yield the step with each change of it that saves memory, and the field that makes the change."""
        step, training = self.step, self.choices.mode != "forward"
        if step.attention == "eager":
            fused: Attention = "triton" if step.on_gpu else "sdpa_flash"  # not "fused", which jobs that measure refuse
            yield f"attention={fused}", replace(self, step=replace(step, attention=fused))
        if training and not step.activation_checkpointing:
            yield "activation_checkpointing=true", replace(self, step=replace(step, activation_checkpointing=True))
        if not self.choices.fused_linear_cross_entropy:
            choices = replace(self.choices, fused_linear_cross_entropy=True)
            yield "fused_linear_cross_entropy=true", replace(self, choices=choices)

    def smaller_batch(self, strategy: str) -> int | None:
        """Return the largest smaller batch with which it fits, among the halves of this one; None if none does."""
        batch = self.step.batch_size
        while (batch := batch // 2) > 0:
            if replace(self, step=replace(self.step, batch_size=batch)).fits(strategy):
                return batch
        return None


@functools.lru_cache(maxsize=512)
def _moments(shape: Shape, step: StepMemory, choices: Choices, sharing: Sharing) -> Sequence[Moment]:
    return moments(shape, step, choices, sharing)


def smallest(suffices: Callable[[int], bool]) -> int | None:
    """Return the smallest number of devices that suffices, as all larger ones do; None if MOST_DEVICES do not."""
    if not suffices(MOST_DEVICES):
        return None
    high = 1
    while not suffices(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high


class Mesh(NamedTuple):
    """Devices along both axes."""

    fsdp: int
    tensor: int

    @property
    def devices(self) -> int:
        return self.fsdp * self.tensor

    def text(self, strategy: str) -> str:
        axes = (f"mesh.{axis}={length}" for axis, length in self._asdict().items() if length > 1)
        return f"with {strategy} ({' '.join(axes)})"


def fewest_devices(strategy: str, splits: Sequence[int], suffices: Callable[[int, int], bool]) -> Mesh | None:
    """Return the mesh of the fewest devices that suffices for a strategy; None if none does. `splits`: the lengths that
    the tensor axis may have, ascending, from 1 on. `suffices`: tells whether so many devices along the fsdp and the
    tensor axis do; then more along the fsdp axis do."""
    best: Mesh | None = None
    for tensor in splits if strategy in SPLIT_BY_TENSOR else (1,):
        if best is not None and tensor >= best.devices:
            break
        if strategy in ("none", "data", "tensor"):
            fsdp = 1 if suffices(1, tensor) else None
        else:
            fsdp = smallest(lambda fsdp, tensor=tensor: suffices(fsdp, tensor))  # type: ignore[misc]
        if fsdp is not None and (best is None or fsdp * tensor < best.devices):
            best = Mesh(fsdp, tensor)
    return best


def split_sizes(spec: EstimateSpec) -> dict[str, int]:
    """Return the sizes that the devices along the tensor axis divide, by their fields."""
    if spec.architecture != "transformer":
        return {"stack.d_ff": spec.stack.d_ff}
    split = {f"model.{name}": spec.model.shape()[name] for name in ("num_heads", "d_ff")}
    return {**split, "model.num_kv_heads": spec.model.num_kv_heads or split["model.num_heads"]}


def splits_of(spec: EstimateSpec) -> list[int]:
    """Return the lengths of the tensor axis that divide the model evenly."""
    common = math.gcd(*split_sizes(spec).values())
    return [split for split in range(1, min(common, MOST_TENSOR) + 1) if common % split == 0]


CLOSE = 0.1
"""The relative error up to which estimates were compared with measured peaks."""


def close(size: int, limit: int) -> str | None:
    """Say that a peak is so near to the device's memory that only a measurement can tell; None if it is not."""
    if abs(size - limit) > CLOSE * limit:
        return None
    return "within 10 % of the device's memory, which is as exact as an estimate is: measure it with kind memory"


def gib(size: float) -> str:
    """Write bytes for people."""
    return f"{number(size / GIB)} GiB"


def question_of(spec: EstimateSpec, shape: Shape, step: StepMemory) -> Question:
    return Question(
        shape,
        step,
        Choices(spec.mode, spec.optimizer, spec.master_weights and spec.mode == "train_step",
                spec.fused_linear_cross_entropy),
        spec.mesh.fsdp,
        spec.mesh.tensor,
        Fraction(repr(spec.sharded_activation_fraction)),
        in_16_bits=spec.communication_dtype == "bf16",
        limit=int(Fraction(repr(spec.device_gb)) * 10**9),
    )  # fmt: skip


@dataclass(frozen=True)
class Fit:
    """Whether a step fits with one strategy."""

    strategy: str
    devices: int
    peak: float | None
    """Bytes on each device; None: it cannot be divided so."""
    fits: bool | None
    helps: str | None
    fewest: Mesh | None
    """The mesh of the fewest devices with which it fits."""
    note: str | None = None

    def row(self) -> list[Scalar]:
        """Return the row of the table `fits`."""
        size = None if self.peak is None else self.peak / GIB
        fewest = None if self.fewest is None else self.fewest.devices
        return [self.strategy, self.devices, size, self.fits, self.helps, fewest, self.note]


def columns() -> list[Any]:
    """Return the columns of the table `fits`."""
    return Column.parse(
        "strategy, devices: integer, device_gib: number GiB, fits: boolean, what_helps, fewest_devices: integer, note"
    )


def asked(spec: EstimateSpec, fits: Sequence[Fit]) -> Fit:
    """Return the strategy that the spec asks about: that of its mesh; a transformer with the default mesh: one device
    alone."""
    default = MeshSpec()
    sharded, split = spec.mesh.fsdp != default.fsdp, spec.mesh.tensor != default.tensor
    strategy = "mesh" if sharded and split else "fully_sharded" if sharded else "tensor" if split else "none"
    if spec.architecture == "feed_forward_stack":  # its question is that of CS336, about the mesh
        strategy = "mesh"
    return next(fit for fit in fits if fit.strategy == strategy)


def size_text(spec: EstimateSpec, *, on_gpu: bool) -> str:
    """Write the memory of a device, and whether nobody has chosen it, though a host has its own."""
    is_default = spec.device_gb == EstimateSpec.model_fields["device_gb"].default
    default = ", the default" if is_default and not on_gpu and spec.architecture != "feed_forward_stack" else ""
    return f"{spec.device_gb:g} GB ({spec.device_gb * 1e9 / GIB:.4g} GiB{default})"


def step_text(spec: EstimateSpec) -> str:
    """Write which step is asked about: "train_step in bf16 with fp32 parameters, by adamw"."""
    text = f"{spec.mode} in {spec.precision}"
    if spec.precision in ("bf16", "fp16"):
        text += f" with {spec.parameter_dtype} parameters"
    if spec.mode != "train_step":
        return text
    return f"{text}, by {spec.optimizer if spec.architecture == 'transformer' else 'adamw'}"


def answer(spec: EstimateSpec, fits: Sequence[Fit], fewer: str | None, *, on_gpu: bool) -> list[str]:
    """Return sentences that answer: does it fit, how many devices does it take (`fewer`: `Question.fewer`), and what
    would make it fit?"""
    known = [fit for fit in fits if fit.fits is not None]
    what = f"{spec.label()}, {spec.batch_size} × {spec.context_length} tokens, {step_text(spec)}"
    size = size_text(spec, on_gpu=on_gpu)
    verdict, noun = asked(spec, fits), "device"
    if spec.architecture == "transformer" and (on_gpu or spec.device == "cpu"):
        noun = "GPU" if on_gpu else "CPU"
    where = f"on one {noun} of {size}"
    if verdict.strategy != "none":
        where = f"with {verdict.strategy} on {verdict.devices} {noun}{'s' * (verdict.devices != 1)} of {size}"
    if spec.architecture == "transformer" and noun == "device":
        where += ", as on a CPU (for a GPU, say device=cuda)"
    each = "; ".join(f"{fit.strategy} {'yes' if fit.fits else 'no'}, {gib(fit.peak or 0)}" for fit in known)
    is_alone = verdict.strategy == "none"  # then the mesh is one that nobody has asked about
    does = "cannot be divided" if verdict.fits is None else "fits" if verdict.fits else "does not fit"
    mesh_text = f"mesh.fsdp={spec.mesh.fsdp} mesh.tensor={spec.mesh.tensor}"
    parts = f": {gib(verdict.peak or 0)}" if is_alone else f". By strategy, with {mesh_text}: {each}"
    first = [f"{what}, {does} {where}{parts}."]
    lines = []
    able = [(fit.fewest, fit.strategy) for fit in fits if fit.fewest is not None]
    if able:
        mesh, strategy = min(able, key=lambda one: one[0].devices)
        enough = f"Fewest devices: {mesh.devices}, {mesh.text(strategy)}{f'; {fewer}' if fewer else ''}."
        lines.append("One device suffices." if mesh.devices == 1 else enough)
    else:
        lines.append(f"As it is, no number of devices suffices{f'; {fewer}' if fewer else ''}.")
    if is_alone and verdict.helps == OTHERWISE:
        return [
            *first,
            f"No field makes it fit on one {noun} at this length{'' if able else ': take a smaller model'}.",
            *lines,
        ]
    if is_alone:
        return [*first, *([f"To fit on one {noun}: {verdict.helps}."] if verdict.helps else []), *lines]
    helped = dict.fromkeys(fit.helps for fit in known if fit.helps)
    return [*first, *lines] + [
        f"To fit with {' or '.join(fit.strategy for fit in known if fit.helps == helps)}: {helps}." for helps in helped
    ]


def report_moments(moments: Iterable[Moment], report: Reporter) -> None:
    """Report the table `moments`: the highest use of memory within each part of the step, and what it is used for."""
    rows: list[list[Scalar]] = [
        [
            moment.name,
            part,
            what,
            count,
            bytes_of(size, moment.symbols) / MIB,
            moment.bytes_of((part, what, size)) / MIB,
        ]
        for moment in moments
        for (part, what, size), count in sorted(moment.held.items(), key=lambda item: -moment.bytes_of(item[0]))
    ]
    columns = Column.parse("moment, part, what, tensors: integer, each_mib: number MiB, mib: number MiB")
    report.table("moments", columns, rows)
