"""Records a model's steps with their allocations, and saves the snapshots."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.nn import Parameter

from app.specs.memory import DEFAULT_WARMUP_STEPS, MemorySpec
from workers.jobs import _reference
from workers.jobs._training import building, metrics
from workers.jobs._training.building import Training
from workers.measure.allocations import make_recording, snapshot
from workers.measure.allocations.categories import Owners, add, owners_of
from workers.measure.allocations.growth import AfterSteps
from workers.measure.allocations.recording import PREPARATION, PhaseMarks, RecordedStretch
from workers.measure.allocations.residual import ResidualStream
from workers.measure.check import Check
from workers.measure.judging import WrongResult
from workers.measure.memory import OutOfMemory, translate_oom
from workers.measure.own_step import REST
from workers.measure.saved import SavedTensor
from workers.measure.timing import StepPosition, run_step
from workers.measure.validity import check_lost_gradients, check_updates
from workers.model.steps import BackwardStep
from workers.reporter import Reporter

if TYPE_CHECKING:
    from workers.measure.allocations.recording import Recording

INITIALISATION = "initialisation"
"""The phase in which the model is made."""
OOM = "oom"
"""Name of the snapshot and of the tables of a case that ran out of memory."""
WORK = {"forward": "inference", "forward_backward": "forward and backward pass", "train_step": "full step"}
"""The work that the snapshots of a mode's phases show."""
KEPT = "made before the first step"
"""Name of the tensors that a step of the user's own keeps from its beginning."""


@dataclass
class Session:
    """The recording of a case."""

    spec: MemorySpec
    initialisation: RecordedStretch | None = None
    steps: list[list[RecordedStretch]] = field(default_factory=list)
    """The stretches of each recorded step: its preparation and its phases."""
    peaks: list[float] = field(default_factory=list)
    """In bytes, of each step so far, those of the warm-up too."""
    parts: list[Check] = field(default_factory=list)
    """The checks of what the model takes in place of plain PyTorch."""
    wrong: WrongResult | None = None
    """Why nothing was recorded: one of these is wrong."""
    lacked: RecordedStretch | None = None
    """The stretch in which memory ran out; None if it did not."""
    reason: str = ""
    """The reason why there are no values: memory ran out."""
    without_gradient: list[str] | None = None
    """Trainable parameters that got none; None: unknown."""
    parameters: int | None = None
    """Number of trainable parameters."""
    streams: list[int] | None = None
    """Bytes of each block's output, as found among the allocations; None if it could not be observed."""
    saved: list[SavedTensor] = field(default_factory=list)
    """What autograd saves in a forward pass of our step."""
    moments: dict[str, RecordedStretch] = field(default_factory=dict)
    """What followed each of `snapshot_steps`, by the name of its snapshot."""
    after_steps: AfterSteps | None = None
    """What was alive after each step from the first to the last of `snapshot_steps`."""
    files: dict[str, int] = field(default_factory=dict)
    """Bytes of each snapshot, by its phase."""

    def phases(self) -> list[RecordedStretch]:
        """Return the phases of the last step, without its preparation. Of a phase that comes several times in a step of
        the user's own, it is the time with the highest peak."""
        highest: dict[str, RecordedStretch] = {}
        for recorded in self.steps[-1] if self.steps else []:
            name = recorded.stretch.phase
            if name != PREPARATION and (name not in highest or height(recorded) > height(highest[name])):
                highest[name] = recorded
        return [*highest.values()]


def record(spec: MemorySpec, device: torch.device, build_model: building.Maker, report: Reporter) -> Session:
    session = Session(spec)
    try:
        session.parts = _reference.check_parts(spec, device)
    except WrongResult as error:
        session.wrong = error
        return session
    recording, where = make_recording(device, spec.history_entries), StepPosition()
    where.phase = INITIALISATION
    owners: Callable[[], Owners] = dict
    gc.collect()  # else what only waits for the collector is memory of unknown use
    recording.begin({})
    report.progress(0, warmup_steps(spec) + spec.measure_steps, "making the model")
    try:
        training = building.build(spec, device, build_model)
        owners = owners_in(training)
        gc.collect()
        recording.mark(INITIALISATION, owners(), keep=True)
        (session.initialisation,) = recording.end()
        save_snapshot(session, INITIALISATION, session.initialisation, report)
        record_steps(session, training, recording, owners, where, report)
    except OutOfMemory as error:
        session.reason = str(error)
        # The error still holds the tensors of the step, so the snapshot shows them.
        recording.mark(where.phase, owners(), keep=True, failed=True)
        session.lacked = recording.end()[-1]
        save_snapshot(session, OOM, session.lacked, report)
    except BaseException:
        recording.abandon()  # Python would crash when it ends under the profiler of a CPU
        raise
    return session


def warmup_steps(spec: MemorySpec) -> int:
    steps = DEFAULT_WARMUP_STEPS if spec.warmup_steps is None else spec.warmup_steps
    return max(steps, *spec.snapshot_steps or (0,))


def owners_in(training: Training) -> Callable[[], Owners]:
    """Return a function that returns the present owners of storages.

    Tensors that a step of the user's own has now, before it runs, and that nothing else owns are its input or, if they
    require gradients, parameters.
    """

    step: Any = training.step
    made = [] if training.own is None else [one for one in gc.get_objects() if type(one) in (torch.Tensor, Parameter)]
    found = [one for one in made if one.layout is torch.strided]
    kept = [weakref.ref(one) for one in found if not one.requires_grad]
    bare = [weakref.ref(one) for one in found if one.requires_grad and one.is_leaf]
    states = [] if training.own is None else training.own.plain_optimizers()
    del made, found

    def owners() -> Owners:
        present = [getattr(step, name, None) for name in ("inputs", "targets", "loss")]
        inputs, losses = present[:2], present[2:]
        known = owners_of(
            training.device,
            training.modules,
            [one for one in (getattr(step, "optimizer", None),) if one is not None] or getattr(step, "optimizers", ()),
            getattr(step, "scaler", None),
            [tensor for tensor in inputs if tensor is not None],
            [loss for loss in losses if loss is not None],
            [parameter for one in bare if (parameter := one()) is not None],
            states,
        )
        still = ((KEPT, tensor) for one in kept if (tensor := one()) is not None)
        add(known, training.device, "input", still)
        return known

    return owners


def record_steps(
    session: Session,
    training: Training,
    recording: Recording,
    owners: Callable[[], Owners],
    where: StepPosition,
    report: Reporter,
) -> None:
    """Warm up, record the steps, each in a history of its own, and save the snapshots of the last one's phases. The
    warm-up's steps have such histories from the first of `snapshot_steps` on. Raises OutOfMemory: the memory did not
    suffice in some phase. The recording continues."""
    spec, step = session.spec, training.step
    warmup, total = warmup_steps(spec), warmup_steps(spec) + spec.measure_steps
    moments = spec.snapshot_steps or [warmup]
    own, stream = training.own, ResidualStream()
    if own is not None:
        own.takes = f"{warmup} steps to warm up and {spec.measure_steps} recorded ones"
    marks = PhaseMarks(recording, owners, without=() if own is None else [REST])
    # The profiler of a CPU would keep each of the compiler's millions of calls.
    recording.begin(owners(), stacks=not spec.compile)
    recorded: list[list[RecordedStretch]] = []
    noted = nullcontext(list[tuple[bool, ...]]()) if own is None else own.updates()
    with translate_oom(where), noted as updates:
        for number in range(total):
            if number and number >= moments[0]:
                gc.collect()
                recorded.append(recording.end())
                keep_moment(session, number, recorded[-1], report)
                recording.begin(owners())
            if 0 < number == moments[0] - 1:
                recording.measure_workspaces()
            marks.keep = number + 1 == total
            marks.watch = spec.snapshot_steps is not None and moments[0] <= number + 1 <= moments[-1]
            marks.keep_after = number + 1 in moments
            where.preparation_begins()
            step.prepare()
            # A hook on a compiled block would cause a recompilation.
            with nullcontext() if spec.compile or own else stream.of(training.model):
                run_step(step.phases, [where, stream, marks])
            report.progress(number + 1, total, "recording" if number >= warmup else "warming up")
    session.parameters = training.trainable
    session.without_gradient = getattr(step, "without_gradient", None)
    recorded.append(recording.end())
    session.steps = recorded[-spec.measure_steps :]
    for one in (stretch for stretches in recorded for stretch in stretches):
        if one.stretch.phase == PREPARATION:
            session.peaks.append(0)
        session.peaks[-1] = max(session.peaks[-1], height(one))
    for phase in session.phases():
        save_snapshot(session, phase.stretch.phase, phase, report)
        if phase.stretch.phase == "forward" and not spec.compile and stream.storages:
            session.streams = stream.sizes_among(phase.stretch.made)
    if own is None and spec.mode != "forward":
        from workers.measure.saved import saved_tensors

        step.prepare()
        session.saved = saved_tensors(training.model, cast("BackwardStep", step).forward)
    session.parts += metrics.check_precision(training)
    if own is not None:
        session.parts += [*check_lost_gradients(*own.lost_gradients()), *check_updates(own.idle_optimizers(), updates)]


def keep_moment(session: Session, step: int, recorded: Sequence[RecordedStretch], report: Reporter) -> None:
    """Keep what is alive after a step that was watched."""
    last = recorded[-1]
    if last.alive is None:
        return
    session.after_steps = session.after_steps or AfterSteps()
    session.after_steps.add(last.alive)
    if last.snapshot is not None:
        session.moments[f"step-{step}"] = last
        save_snapshot(session, f"step-{step}", last, report)


def save_snapshot(session: Session, name: str, recorded: RecordedStretch, report: Reporter) -> None:
    if recorded.snapshot is None:
        return
    file = f"snapshot-{name}.pickle"
    spec, what = session.spec, recorded.snapshot
    about = {
        **what["flopwatch"],
        "mode": spec.mode if spec.step_code is None else None,
        "of": work_of(session, name),
        "model": spec.model.label() if spec.step_code is None else spec.label(),
        "precision": spec.precision,
    }
    session.files[name] = snapshot.write({**what, "flopwatch": about}, report.scratch / file)
    report.artifact(report.scratch / file, name=file, kind="snapshot", media_type="application/octet-stream")


def work_of(session: Session, name: str) -> str:
    """Return the work that a snapshot shows. If memory ran out while the model was built, there was no step."""
    if name == INITIALISATION or session.initialisation is None:
        return INITIALISATION
    return WORK["train_step" if session.spec.step_code is not None else session.spec.mode]


def peak_seen(recorded: RecordedStretch) -> bool:
    """Return True if the history includes the peak: it is complete, or it reaches the allocator's own peak."""
    counters, stretch = recorded.counters, recorded.stretch
    return not stretch.lost or (counters is not None and stretch.peak.total >= counters.requested_peak)


def height(recorded: RecordedStretch) -> float:
    """Return the peak in bytes by the allocator's counters or, without these, by the history."""
    return recorded.stretch.peak.total if recorded.counters is None else recorded.counters.allocated_peak
