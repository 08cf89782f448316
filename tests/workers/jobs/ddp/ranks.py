"""What the ranks of test_ddp.py do. Ranks import it by name."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel.process_group import Rank
from workers.jobs import _training
from workers.jobs.ddp import parity as parity_module
from workers.jobs.ddp import rank as rank_module
from workers.jobs.ddp import strategies
from workers.jobs.ddp.memory import state_bytes
from workers.jobs.ddp.rank import measure_rank
from workers.measure.memory import OutOfMemory
from workers.model.steps import BackwardStep

SLOWER_MS = {"cpu": 60.0, "cuda": 5.0}
"""How much longer a step of "sends slowly" takes in its communication, by type of device."""
FORGOTTEN = "layers.1.ln1.weight"
"""The parameter whose gradient "forgets one" does not share: the smallest of the model, 5 % of all."""
CALIBRATION_CYCLES = 20_000_000


class WithKeyBias(nn.Module):
    """A model whose attention has biases. That of the keys adds the same to all scores of a query, so that softmax
    takes it away: its true gradient is zero, and what is computed is rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 12)
        self.q, self.k, self.v = (nn.Linear(12, 12) for _ in range(3))
        self.head = nn.Linear(12, 61)
        self.rounds_otherwise = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        q, k, scale = self.q(x), self.k(x).transpose(1, 2), 12**-0.5
        scores = (q * scale) @ k if self.rounds_otherwise else (q @ k) * scale
        logits: Tensor = self.head(x + scores.softmax(-1) @ self.v(x))
        return logits


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
            optimizers = record_optimizers(patch)
            found[name] = {**measure_rank(rank, spec, folder), "optimizers": optimizers}
    return found


def record_optimizers(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return what will have the optimizer of each side: its class, its parameters' shapes and its state's bytes."""
    recorded: dict[str, Any] = {}
    measure_steps = rank_module.measure_steps

    def measure(context: Any, trained: Any, *others: Any) -> Any:
        turn = measure_steps(context, trained, *others)
        if (optimizer := trained.optimizer) is not None:
            shapes = [tuple(one.shape) for group in optimizer.param_groups for one in group["params"]]
            recorded[trained.strategy] = (type(optimizer).__name__, shapes, state_bytes(optimizer))
        return turn

    patch.setattr(rank_module, "measure_steps", measure)
    return recorded


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

    def round_otherwise(spec: Any, strategy: str, module: Any, group: Any = None) -> Any:
        module.rounds_otherwise = strategy != strategies.NO_COMMUNICATION
        return wrap(spec, strategy, module, group)

    def forget_one(spec: Any, strategy: str, module: Any, group: Any = None) -> Any:
        wrapped, finish = wrap(spec, strategy, module, group)
        forgotten = next(one for name, one in module.named_parameters() if name.endswith(FORGOTTEN))

        def finish_but_one() -> None:
            own = forgotten.grad.clone()
            finish()
            forgotten.grad.copy_(own)

        return wrapped, finish if finish is None or group is not None else finish_but_one

    def update_half(spec: Any, strategy: str, wrapped: Any, group: Any = None) -> Any:
        if strategy == strategies.NO_COMMUNICATION:
            return make_optimizer(spec, strategy, wrapped, group)
        half = torch.nn.ModuleList(list(wrapped.modules())[: len(list(wrapped.modules())) // 2 : -1])
        return make_optimizer(spec, strategy, half, group)

    def update_half_of_one_side(spec: Any, strategy: str, wrapped: Any, group: Any = None) -> Any:
        make = update_half if group is None else make_optimizer
        return make(spec, strategy, wrapped, group)

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
        case "updates half of one side", _:
            patch.setattr(strategies, "make_optimizer", update_half_of_one_side)
        case "sends nothing", _:
            patch.setattr(strategies, "wrap", send_nothing)
        case "has a key bias", _:
            patch.setattr(_training, "choose_model", lambda spec, device: WithKeyBias)
            patch.setattr(strategies, "wrap", round_otherwise)
        case "forgets one", _:
            patch.setattr(strategies, "wrap", forget_one)
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
