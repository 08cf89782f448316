"""Makes the step of a user's own script: it loads the uploaded code, and lets `flopwatch.phase` and `flopwatch.work` in
it talk to the job."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from flopwatch import steps
from workers import uploaded
from workers.uploaded import BrokenCode

if TYPE_CHECKING:
    import torch

    from app.specs._code import CodeSpec
    from workers.measure.own_step import OwnStep


def maker(code: CodeSpec, device: torch.device, arguments: Mapping[str, Any]) -> Callable[[], OwnStep]:
    """Load the function; returns one that makes the step with it, once.

    Raises:
        BrokenCode: the code cannot be imported, or its function does not take these arguments.
        InvalidEnvironment: this process has no such file.
    """
    from workers.measure.own_step import NoStep, OwnStep

    # Made first, since the code may make its model when it is imported.
    step = OwnStep()
    steps.listen(Listener(step))
    make_step = uploaded.load(code)
    try:
        inspect.signature(make_step).bind(device, **arguments)
    except TypeError as error:
        raise BrokenCode(
            f"{code.label()}: {code.function}(device, **arguments) with the arguments of the spec: {error}"
        ) from error
    except ValueError:
        pass  # a function in another language has no signature

    def make() -> OwnStep:
        try:
            step.make(lambda: make_step(device, **arguments))
        except NoStep as error:
            raise BrokenCode(f"{code.label()}: {error}") from error
        return step

    return make


class Listener:
    """What a training kind does with `flopwatch.phase`, `flopwatch.work` and `flopwatch.measure`."""

    def __init__(self, step: OwnStep) -> None:
        self.phase = step.phase
        self.work = step.work

    def measure(self, step: Callable[[], object], *, warmup_steps: int | None, measure_steps: int) -> None:
        """Do nothing: the job measures the step of `step_code`."""
