"""What the ranks of test_ddp.py do. Ranks import it by name."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from parallel.process_group import Rank
from workers.jobs.ddp import parity as parity_module
from workers.jobs.ddp import strategies
from workers.jobs.ddp.rank import measure_rank
from workers.measure.memory import OutOfMemory
from workers.model.steps import BackwardStep

SLOWER_MS = {"cpu": 20.0, "cuda": 5.0}
"""How much longer a step of "sends slowly" takes in its communication, by type of device."""
CALIBRATION_CYCLES = 20_000_000


def run_all(rank: Rank, specs: dict[str, Any], folder: str) -> dict[str, Any]:
    """Measure one spec after the other; the first part of a name may say what to break."""
    found = {}
    # Measuring collects garbage: it need not look through all that was imported.
    gc.freeze()
    for name, spec in specs.items():
        with pytest.MonkeyPatch.context() as patch:
            # The compiler's first half only: the whole takes too long for every run of the tests.
            patch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
            break_down(patch, rank, name.split(", ")[0])
            found[name] = measure_rank(rank, spec, folder)
    return found


def slow_down(device: torch.device) -> Callable[[], None]:
    """Return a function that keeps the device busy for `SLOWER_MS`: a GPU's host would wait beside its work."""
    seconds = 1e-3 * SLOWER_MS[device.type]
    if device.type == "cpu":
        return lambda: time.sleep(seconds)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    for event in (start, end):  # the first call, which loads the kernel, is not timed
        torch.cuda._sleep(CALIBRATION_CYCLES)  # type: ignore[no-untyped-call]
        event.record()
    end.synchronize()
    cycles = int(CALIBRATION_CYCLES * 1e3 * seconds / start.elapsed_time(end))
    return lambda: torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def break_down(patch: pytest.MonkeyPatch, rank: Rank, how: str) -> None:
    """Break this process: its strategy sends nothing, or its memory is too small for something."""
    wrap, build, forward = strategies.wrap, strategies.build, BackwardStep.forward
    make_optimizer = strategies.make_optimizer
    parity: list[None] = []

    def send_nothing(spec: Any, strategy: str, module: Any, group: Any = None) -> Any:
        return wrap(spec, strategy, module, group)[0], None

    def send_less(spec: Any, strategy: str, module: Any, group: Any = None) -> Any:
        for parameter in module.parameters():  # of the batch's mean, which is half of both, 1/64 is missing
            parameter.register_hook(lambda gradient: gradient * (1 - 2 / 64))
        return wrap(spec, strategy, module, group)

    def send_slowly(spec: Any, strategy: str, module: Any, group: Any = None) -> Any:
        wrapped, finish = wrap(spec, strategy, module, group)
        if finish is None or group is not None:
            return wrapped, finish

        wait = slow_down(rank.device)

        def finish_late() -> None:
            wait()
            finish()

        return wrapped, finish_late

    def update_half(spec: Any, strategy: str, wrapped: Any, group: Any = None) -> Any:
        if strategy == strategies.NO_COMMUNICATION:
            return make_optimizer(spec, strategy, wrapped, group)
        half = torch.nn.ModuleList(list(wrapped.modules())[: len(list(wrapped.modules())) // 2 : -1])
        return make_optimizer(spec, strategy, half, group)

    def build_too_much(spec: Any, strategy: str, *others: Any, **options: Any) -> Any:
        if strategy == strategies.NO_COMMUNICATION:
            raise OutOfMemory("out of memory in making the model: too much")
        return build(spec, strategy, *others, **options)

    def build_too_much_once(spec: Any, strategy: str, *others: Any, **options: Any) -> Any:
        if strategy == strategies.NO_COMMUNICATION and not parity:
            parity.append(None)
            raise OutOfMemory("out of memory in making the model: too much")
        return build(spec, strategy, *others, **options)

    def run_out(step: Any) -> None:
        if type(step.module).__name__ == "TransformerLM":  # no wrapper is around it
            raise RuntimeError("CUDA out of memory. Tried to allocate 1 GiB")
        forward(step)

    match how, rank.index:
        case "sends slowly", _:
            patch.setattr(strategies, "wrap", send_slowly)
        case "updates half", _:
            patch.setattr(strategies, "make_optimizer", update_half)
        case "sends nothing", _:
            patch.setattr(strategies, "wrap", send_nothing)
        case "lacks a rank of 64", 1:
            patch.setattr(strategies, "wrap", send_less)
        case "does not fit", 1:
            patch.setattr(strategies, "build", build_too_much)
        case "does not fit later", 1:
            patch.setattr(BackwardStep, "forward", run_out)
        case "no host memory", 0:
            patch.setattr(parity_module, "host_memory", lambda name: 0)
        case "one process does not fit", 0:
            patch.setattr(strategies, "build", build_too_much_once)
