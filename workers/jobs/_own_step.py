"""Makes the step of a user's own script: it loads the uploaded code, and lets `flopwatch.phase` and `flopwatch.work` in
it talk to the job."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from flopwatch import steps
from workers import uploaded
from workers.uploaded import BrokenCode

if TYPE_CHECKING:
    import torch

    from app.specs._code import CodeSpec
    from workers.measure.own_step import OwnStep


def maker(code: CodeSpec, device: torch.device, arguments: Mapping[str, Any]) -> Callable[[], OwnStep]:
    """Return a function that loads the code and makes the step with it, once.

    That function raises:
        BrokenCode: the code cannot be imported, its function does not take these arguments, or it makes no step.
        InvalidEnvironment: this process has no such file.
    """

    from workers.measure.own_step import NoStep, OwnStep

    def make() -> OwnStep:
        step = OwnStep(device, why_not_run=steps.why_not_run)
        steps.listen(Listener(step))
        make_step = uploaded.load(code)
        _check_arguments(make_step, code, device, arguments)
        try:
            step.make(lambda: make_step(device, **arguments))
        except NoStep as error:
            raise BrokenCode(f"{code.label()}: {error}{uploaded.place_of(error)}") from error
        return step

    return make


def _check_arguments(make_step: Any, code: CodeSpec, device: torch.device, arguments: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(make_step)
    except ValueError:  # a function in another language has none
        return
    try:
        signature.bind(device, **arguments)
    except TypeError as error:
        call = ", ".join(["device", *(f"{name}=" for name in arguments)])
        raise BrokenCode(f"{code.label()} is called as {code.function}({call}): {error}") from error


class RangesAlone:
    """Handles, in a kind with our step, `flopwatch.phase` of the user's model or attention: each is a range."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Name the work inside while ranges are recorded."""
        from kernels.ranges import named

        return named(str(name))

    def work(self, *, flops: float | None, tokens: float | None, items: float | None) -> None:
        """Do nothing: the work of our own step is known."""

    def measure(self, step: Callable[[], object], *, warmup_steps: int | None, measure_steps: int | None) -> None:
        """Do nothing: the job measures its own step."""


def hear_ranges() -> None:
    """Let all ranges that code of this process names be known to torch's profiler."""
    from kernels.ranges import follow_nvtx

    follow_nvtx()
    steps.listen(RangesAlone())


class Listener:
    """Handles, for a training kind, `flopwatch.phase`, `flopwatch.work` and `flopwatch.measure`."""

    def __init__(self, step: OwnStep) -> None:
        self.phase = step.phase
        self.work = step.work

    def measure(self, step: Callable[[], object], *, warmup_steps: int | None, measure_steps: int | None) -> None:
        """Do nothing: the job measures the step of `step_code`."""
