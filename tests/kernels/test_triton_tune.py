"""The choice among listed tilings: in Triton's interpreter with times that the tests make up, and for real on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.attention.oracle import oracle
from kernels.attention.problem import AttentionProblem
from kernels.device_clock import Workload
from kernels.registry import ATTENTION
from kernels.tolerance import TOLERANCES, error, fixed_limits

pytest.importorskip("triton")

from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from kernels.attention.flash_triton import flash_attention
from kernels.attention.triton import launch, tilings
from kernels.attention.triton import tune as tuning
from kernels.attention.triton.tilings import Tiling, Tilings
from kernels.attention.triton.tune import NoTilingRuns, TuningProblem, tune

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
PRESENT = Tiling(32, 32, 4, 1)
SMALL, FLAT, UPRIGHT = Tiling(16, 16, 4, 1), Tiling(16, 32, 4, 1), Tiling(32, 16, 4, 1)
TABLE = Tilings(PRESENT, PRESENT, PRESENT, PRESENT)


@pytest.fixture(autouse=True)
def _nothing_is_remembered() -> Iterator[None]:
    tilings.forget()
    yield
    tilings.forget()


@pytest.fixture
def _table(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table's choice is PRESENT for every kernel, and a time is one sample."""
    monkeypatch.setattr(tilings, "from_tables", lambda *_: TABLE)
    monkeypatch.setattr(tuning, "SAMPLES", 1)


on_a_small_table = pytest.mark.usefixtures("_table")


@pytest.fixture
def inputs(rng) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rng.randrange(2**32))
    return [torch.randn(1, 1, 32, 16, generator=generator) for _ in range(3)]


def clock(**fast: dict[Tiling, float]) -> Callable[..., float]:
    """Makes up times, in ms: of each kernel by tiling; of others 2, of one pass 3."""

    def time_ms(kernel: str, chosen: Tilings, _work: Workload) -> float:
        otherwise = 3.0 if kernel == "one_pass" else 2.0
        return fast.get(kernel, {}).get(getattr(chosen, kernel, PRESENT), otherwise)

    return time_ms


def remembered(inputs: list[Tensor]) -> Tilings:
    return TuningProblem(*inputs, False, False).present()


def damage(monkeypatch: pytest.MonkeyPatch, name: str, what: Callable[..., None]) -> None:
    """Let something happen behind a launch with FLAT; `what` gets the launch's arguments."""
    real = getattr(launch, name)

    @functools.wraps(real)
    def wrapped(*arguments: Any, **bounds: Any) -> None:
        if choose(*arguments) == FLAT:
            what(functools.partial(real, **bounds), *arguments)
        else:
            real(*arguments, **bounds)

    def choose(*arguments: Any) -> Tiling:
        chosen = tilings.choose(tuple(arguments[:3]), 16, "split")
        return getattr(chosen, "one_pass" if name == "keys" and arguments[-1] is not None else name)

    monkeypatch.setattr(launch, name, wrapped)


def refuse(failure: Exception) -> Callable[..., None]:
    def what(*_arguments: Any) -> None:
        raise failure

    return what


@interpreted
@on_a_small_table
def test_the_fastest_of_each_kernel_is_taken_by_the_next_call(inputs: list[Tensor]) -> None:
    lines: list[str] = []
    times = clock(forward={FLAT: 1.0}, keys={UPRIGHT: 1.0}, queries={SMALL: 1.0}, one_pass={FLAT: 1.0})
    line = tune(*inputs, True, timer=times, candidates=[SMALL, FLAT, UPRIGHT], tell=lines.append)
    assert line.startswith("forward 16 × 32, 4, 1; keys 32 × 16, 4, 1; queries 16 × 16, 4, 1; one pass 16 × 32, 4, 1")
    assert line.endswith("backward in one pass")
    assert "backward pass: two passes 2.000 ms, one pass 1.000 ms" in lines
    assert remembered(inputs) == Tilings(FLAT, UPRIGHT, SMALL, FLAT, prefer_one_pass=True)
    right = oracle(*inputs, torch.ones_like(inputs[0]), AttentionProblem(is_causal=True))
    leaves = [tensor.requires_grad_() for tensor in inputs]
    out = flash_attention(*leaves, True)
    out.sum().backward()
    assert error(out.detach(), right.out).why_wrong(right.limits[0]) is None
    for tensor, gradient in zip(leaves, right.gradients, strict=True):
        assert torch.allclose(tensor.grad.double(), gradient, atol=1e-5)


@interpreted
@on_a_small_table
def test_the_choice_holds_for_its_dtype_width_and_precision(inputs) -> None:
    tune(*inputs, timer=clock(keys={UPRIGHT: 1.0}), candidates=[UPRIGHT])
    kernels: set[str] = set()

    def seen(kernel: str, *rest: Any) -> float:
        kernels.add(kernel)
        return clock(forward={FLAT: 1.0})(kernel, *rest)

    tune(*inputs, timer=seen, candidates=[FLAT], backward=False, tf32=False)
    assert kernels == {"forward"}
    assert remembered(inputs) == Tilings(FLAT, UPRIGHT, PRESENT, PRESENT)
    assert TuningProblem(*inputs, False, True).present() == TABLE, "tf32"
    assert remembered([tensor.half() for tensor in inputs]) == TABLE
    assert remembered([tensor.repeat(1, 1, 1, 2) for tensor in inputs]) == TABLE
    tilings.forget()
    assert remembered(inputs) == TABLE


@interpreted
@on_a_small_table
def test_only_a_request_tunes(inputs: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    tuned: list[int] = []
    monkeypatch.setattr(tuning, "tune", lambda *arguments, **options: tuned.append(1) or "asked")
    flash_attention(*(tensor.requires_grad_() for tensor in inputs), True).sum().backward()
    assert not tuned
    assert ATTENTION.load("triton").tune(*inputs, True, backward=False, tell=print) == "asked"


@interpreted
@on_a_small_table
def test_the_problem_with_its_options_is_timed(inputs: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"window": 5, "softcap": 3.0, "document_ends": torch.tensor([9, 9, 32], dtype=torch.int32)}
    given: dict[str, Any] = {}
    monkeypatch.setattr(tuning, "tune", lambda *_arguments, **named: given.update(named) or "asked")
    assert ATTENTION.load("triton").tune(*inputs, True, backward=True, tell=print, **options) == "asked"
    problem = TuningProblem(*inputs, True, False, given["scoring"], given["bounds"])
    problem.run("forward", TABLE)
    problem.run("two_passes", TABLE)
    leaves = [tensor.requires_grad_() for tensor in inputs]
    out = flash_attention(*leaves, True, **options)
    gradients = torch.autograd.grad(out, leaves, problem._gradient)
    for name, right in zip(("out", "dq", "dk", "dv"), (out.detach(), *gradients), strict=True):
        assert torch.equal(problem.results[name], right)


def test_a_soft_cap_takes_tiles_that_leave_it_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Tiling] = []
    monkeypatch.setattr(tilings, "capability", lambda _device: (9, 0))
    monkeypatch.setattr(launch, "_keys_launch", lambda *facts: taken.append(facts[-1]) or (lambda _tensors: None))
    q, numbers = torch.empty(1, 1, 20, 64, dtype=torch.bfloat16), torch.empty(1, 1, 128)
    for softcap in (None, 9.0):
        scoring = launch.Scoring.of(q, q, True, softcap=softcap)
        launch.keys(q, q, q, q, numbers, numbers, q, q, scoring, "ieee")
    assert taken == [Tiling(128, 64, 4, 2), Tiling(64, 64, 4, 2)]


def scaled(real: Callable[..., None], *arguments: Any) -> None:
    real(*arguments)
    arguments[3][..., 5, :] *= 1.1  # out


def not_written(real: Callable[..., None], *arguments: Any) -> None:
    before = arguments[3].clone()
    real(*arguments)
    arguments[3][..., 5, :] = before[..., 5, :]


def not_a_number(real: Callable[..., None], *arguments: Any) -> None:
    real(*arguments)
    arguments[4][..., 5] = torch.nan  # logsumexp


def in_gradients(real: Callable[..., None], *arguments: Any) -> None:
    real(*arguments)
    arguments[6][..., 5, :] += 1  # dk or dq


@interpreted
@on_a_small_table
@pytest.mark.parametrize(
    ("name", "what", "kernel"),
    [
        *(("forward", what, "forward") for what in (scaled, not_written, not_a_number)),
        ("keys", in_gradients, "keys"),
        ("keys", in_gradients, "one_pass"),
        ("queries", in_gradients, "queries"),
    ],
)
def test_a_wrong_configuration_is_never_chosen(inputs, name, what, kernel, monkeypatch) -> None:
    damage(monkeypatch, name, what)
    lines: list[str] = []
    times = clock(**{kernel: {FLAT: 0.1, SMALL: 1.0}})
    tune(*inputs, timer=times, candidates=[FLAT, SMALL], backward=kernel != "forward", tell=lines.append)
    assert getattr(remembered(inputs), kernel) == SMALL
    assert any(line.startswith(f"{kernel.replace('_', ' ')} 16 × 32, 4, 1 is left out: ") for line in lines)


@interpreted
@on_a_small_table
@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (OutOfResources(300_000, 232_448, "shared memory"), "OutOfResources: out of resource: shared memory"),
        (PTXASError("(C7600) Register allocation failed"), "PTXASError: PTXAS error: (C7600)"),
        (CompilationError(None, None, "no such product"), "CompilationError: "),
        (RuntimeError("PassManager::run failed"), "RuntimeError: PassManager::run failed"),
    ],
)
def test_configurations_that_triton_refuses_are_left_out(inputs, failure, words, monkeypatch) -> None:
    damage(monkeypatch, "forward", refuse(failure))
    lines: list[str] = []
    times = clock(forward={FLAT: 0.1, SMALL: 1.0})
    tune(*inputs, timer=times, candidates=[FLAT, SMALL], backward=False, tell=lines.append)
    assert remembered(inputs).forward == SMALL
    assert lines[0].startswith(f"forward 16 × 32, 4, 1 is left out: {words}")
    assert lines[1] == "forward: 16 × 16, 4, 1: 1 ms    32 × 32, 4, 1: 2 ms"


@interpreted
@on_a_small_table
def test_other_errors_are_not_swallowed_and_change_nothing(inputs, monkeypatch) -> None:
    damage(monkeypatch, "forward", refuse(RuntimeError("CUDA error: an illegal memory access was encountered")))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        tune(*inputs, timer=clock(), candidates=[FLAT], backward=False)
    assert remembered(inputs) == TABLE


@interpreted
@on_a_small_table
def test_the_reason_is_given_if_nothing_runs(inputs: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    too_large = OutOfResources(300_000, 100_000, "shared memory")
    flat = Tilings(FLAT, FLAT, FLAT, FLAT)
    monkeypatch.setattr(tilings, "from_tables", lambda *_: flat)
    with pytest.MonkeyPatch.context() as patch:
        damage(patch, "forward", refuse(too_large))
        with pytest.raises(NoTilingRuns, match=r"no tiling of the forward kernel runs on this device: .*shared memory"):
            tune(*inputs, timer=clock(), candidates=[FLAT], backward=False)
    prefers = Tilings(PRESENT, PRESENT, PRESENT, FLAT, prefer_one_pass=True)
    monkeypatch.setattr(tilings, "from_tables", lambda *_: prefers)
    damage(monkeypatch, "keys", lambda real, *rest: refuse(too_large)() if rest[-1] is not None else real(*rest))
    tune(*inputs, timer=clock(), candidates=[FLAT])
    assert not remembered(inputs).prefer_one_pass


@interpreted
@on_a_small_table
@pytest.mark.parametrize(("time", "chosen"), [(1.99, PRESENT), (1.9, FLAT)])
def test_only_a_clearly_faster_choice_replaces_another(inputs: list[Tensor], time: float, chosen: Tiling) -> None:
    line = tune(*inputs, timer=clock(forward={FLAT: time}), candidates=[FLAT], backward=False)
    assert remembered(inputs).forward == chosen
    assert line.endswith("(as before)") == (chosen == PRESENT)


def test_inputs_that_are_not_taken() -> None:
    with pytest.raises(ValueError, match="there is nothing to tune for"):
        tune(torch.ones(1, 0, 16), torch.ones(1, 4, 16), torch.ones(1, 4, 16))
    with pytest.raises(ValueError, match="float64"):
        tune(*[torch.ones(1, 4, 16, dtype=torch.float64)] * 3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tuning_for_real(dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, gradient = (
        torch.randn(2, 2, 700, 64, generator=generator, device="cuda").to(dtype).requires_grad_(index < 3)
        for index in range(4)
    )
    too_large = Tiling(128, 128, 8, 4) if dtype == torch.float32 else Tiling(128, 256, 8, 4)  # for forward at least
    lines: list[str] = []
    tune(q, k, v, True, candidates=[Tiling(64, 32, 4, 2), Tiling(32, 32, 4, 1), too_large], tell=lines.append)
    assert any(line.startswith("forward 128 × ") and "OutOfResources" in line for line in lines)
    problem = TuningProblem(q, k, v, True, None)
    right = oracle(q, k, v, gradient, AttentionProblem(is_causal=True))
    slowest = Tilings(*[Tiling(32, 32, 4, 1)] * 4)
    for chosen in (problem.present(), slowest, Tilings(*[Tiling(32, 32, 4, 1)] * 4, prefer_one_pass=True)):
        problem.use(chosen)
        out = flash_attention(q, k, v, True)
        results = out, *torch.autograd.grad(out, (q, k, v), gradient)
        for result, expected in zip(results, (right.out, *right.gradients), strict=True):
            assert error(result.detach(), expected).why_wrong(fixed_limits(TOLERANCES[dtype])) is None


def test_where_kernels_are_interpreted_the_host_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the lap that the jobs' stopwatch is made of."""
    laps: list[Workload] = []
    monkeypatch.setattr(tuning, "host_lap_ms", lambda work: laps.append(work) or 7.0)

    def work() -> None:
        raise AssertionError("the lap was taken elsewhere")

    assert tuning.default_timer(torch.device("cpu"))("forward", TABLE, work) == 7.0
    assert laps == [work]
