"""The search for tilings: in Triton's interpreter with times that the tests make up, and for real on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.attention.oracle import oracle
from kernels.device_clock import Work
from kernels.registry import ATTENTION
from kernels.tolerance import TF32_TOLERANCE, TOLERANCES, error

pytest.importorskip("triton")

from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from kernels.attention import triton_candidates, triton_launch, triton_tilings, triton_tuning
from kernels.attention.flash_triton import flash_attention
from kernels.attention.triton_candidates import Limits, candidates, why_pruned
from kernels.attention.triton_problem import Problem
from kernels.attention.triton_tiles import Tiling
from kernels.attention.triton_tilings import Tilings
from kernels.attention.triton_tuning import NothingRuns, Trial, Tuned, tune

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
LENGTH, HEAD_DIM = 32, 16
PRESENT = Tiling(32, 32, 4, 1)
SMALL, FLAT, UPRIGHT = Tiling(16, 16, 4, 1), Tiling(16, 32, 4, 1), Tiling(32, 16, 4, 1)
TABLE = Tilings(PRESENT, PRESENT, PRESENT, PRESENT)
HOPPER = Limits(227 << 10, 2, 64, 16_384, 16_384, asynchronous_products=True, can_hold=True)


@pytest.fixture(autouse=True)
def _nothing_is_remembered() -> Iterator[None]:
    triton_tilings.forget()
    yield
    triton_tilings.forget()


@pytest.fixture
def _table(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table's choice is PRESENT for every kernel."""
    monkeypatch.setattr(triton_tilings, "from_tables", lambda *_: TABLE)


on_a_small_table = pytest.mark.usefixtures("_table")


@pytest.fixture
def inputs(rng) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rng.randrange(2**32))
    return [torch.randn(1, 1, LENGTH, HEAD_DIM, generator=generator) for _ in range(3)]


class Clock:
    """Makes up times, in ms: for each kernel or form its own by tiling, else `otherwise`. Counts calls."""

    def __init__(self, otherwise: float = 2.0, **fast: dict[Tiling, float]) -> None:
        self.otherwise = otherwise
        self.fast = fast
        self.forms = {"two passes": 2.0, "one pass": 3.0}
        self.calls: list[tuple[str, Tiling]] = []

    def __call__(self, what: str, tilings: tuple[Tiling, ...], work: Work) -> float:
        self.calls.append((what, tilings[0]))
        return self.forms[what] if what in self.forms else self.fast.get(what, {}).get(tilings[0], self.otherwise)


def refusing(monkeypatch: pytest.MonkeyPatch, refused: dict[Tiling, Exception], launch: str = "forward") -> None:
    """Let a launch fail with some tilings, as Triton would."""
    real = getattr(triton_launch, launch)

    @functools.wraps(real)
    def wrapped(*arguments: Any, **options: Any) -> None:
        given = [one for one in arguments if isinstance(one, Tiling)]
        if given and given[0] in refused:
            raise refused[given[0]]
        real(*arguments, **options)

    monkeypatch.setattr(triton_launch, launch, wrapped)


def trial_of(tuned: Tuned, kernel: str, tiling: Tiling) -> Trial:
    (trial,) = [one for one in tuned.trials if (one.kernel, one.tiling) == (kernel, tiling)]
    return trial


@interpreted
@on_a_small_table
def test_the_fastest_of_each_kernel_is_chosen_and_taken_by_the_next_call(
    inputs: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(forward={FLAT: 1.0}, keys={UPRIGHT: 1.0}, queries={SMALL: 1.0}, one_pass={FLAT: 1.0})
    clock.forms["one pass"] = 1.0
    tuned = tune(*inputs, True, timer=clock, among=[SMALL, FLAT, UPRIGHT])
    assert tuned.present == TABLE
    assert tuned.chosen == Tilings(FLAT, UPRIGHT, SMALL, FLAT, prefer_one_pass=True)
    assert tuned.forms_ms == {"two passes": 2.0, "one pass": 1.0}
    taken = launched(monkeypatch)
    right = oracle(*inputs, torch.ones_like(inputs[0]), True)
    given = [tensor.requires_grad_() for tensor in inputs]
    out = flash_attention(*given, True)
    out.sum().backward()
    assert taken == [("forward_kernel", FLAT), ("keys_kernel", FLAT)], "one pass: no kernel for queries"
    assert error(out.detach(), right.out).why_wrong(TOLERANCES[torch.float32]) is None
    for tensor, gradient in zip(given, right.gradients, strict=True):
        assert torch.allclose(tensor.grad.double(), gradient, atol=1e-5)


def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Tiling]]:
    """Fills with the kernels that are launched from now on, and the tilings that they get."""
    taken: list[tuple[str, Tiling]] = []

    class Spy:
        def __init__(self, name: str) -> None:
            self.name, self.kernel = name, getattr(triton_launch, name)
            self.arg_names = self.kernel.arg_names

        def __getitem__(self, grid: Any) -> Callable[..., None]:
            def launch(*arguments: Any, **options: Any) -> None:
                sizes = (options[name] for name in ("QUERIES", "KEYS", "num_warps", "num_stages"))
                taken.append((self.name, Tiling(*sizes, options.get("HOLD", False))))
                self.kernel[grid](*arguments, **options)

            return launch

    for name in ("forward_kernel", "keys_kernel", "queries_kernel"):
        monkeypatch.setattr(triton_launch, name, Spy(name))
    for prepared in (triton_launch._forward_launch, triton_launch._keys_launch, triton_launch._queries_launch):
        prepared.cache_clear()  # they hold the kernels
    return taken


@interpreted
@on_a_small_table
def test_what_was_tuned_holds_for_its_dtype_width_and_precision_until_it_is_forgotten(inputs: list[Tensor]) -> None:
    operands = Problem.of(*inputs, False, False).operands
    tune(*inputs, timer=Clock(forward={FLAT: 1.0}), among=[FLAT], backward=False, tf32=False)
    assert triton_tilings.choose(operands, 16, "split").forward == FLAT
    assert triton_tilings.choose(operands, 16, "tf32") == TABLE
    assert triton_tilings.choose(operands, 32, "split") == TABLE
    halves = tuple(one.half() for one in operands)
    assert triton_tilings.choose(halves, 16, "split") == TABLE
    triton_tilings.forget()
    assert triton_tilings.choose(operands, 16, "split") == TABLE


@interpreted
@on_a_small_table
def test_forward_alone_leaves_the_backward_pass_as_it_is(inputs: list[Tensor]) -> None:
    clock = Clock(forward={FLAT: 1.0})
    tuned = tune(*inputs, timer=clock, among=[FLAT], backward=False)
    assert tuned.chosen == Tilings(FLAT, PRESENT, PRESENT, PRESENT)
    assert {what for what, _ in clock.calls} == {"forward"}
    assert tuned.forms_ms == {}


@interpreted
@on_a_small_table
def test_forward_alone_leaves_what_was_tuned_before(inputs: list[Tensor]) -> None:
    tune(*inputs, timer=Clock(keys={FLAT: 1.0}), among=[FLAT])
    tuned = tune(*inputs, timer=Clock(forward={UPRIGHT: 1.0}), among=[UPRIGHT], backward=False)
    assert tuned.chosen == Tilings(UPRIGHT, FLAT, PRESENT, PRESENT)


@interpreted
@on_a_small_table
def test_a_first_call_does_not_tune(inputs: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(triton_tuning, "tune", lambda *arguments, **options: asked.append(1) or tuned)
    tuned = Tuned(TABLE, TABLE, (), {})
    flash_attention(*(tensor.requires_grad_() for tensor in inputs), True).sum().backward()
    assert not asked
    # Control: what would have been called is what the registry's `tune` calls.
    ATTENTION.load("triton").tune(*inputs, True, backward=False, tell=print)
    assert asked


@interpreted
@on_a_small_table
@pytest.mark.parametrize("damage", ["wrong numbers", "a part is not written", "not a number"])
def test_a_wrong_candidate_is_never_chosen(inputs: list[Tensor], damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = triton_launch.forward

    def damaged(q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, *how: Any) -> None:
        before = out.clone()
        real(q, k, v, out, logsumexp, *how)
        if how[-1] != FLAT:
            return
        if damage == "wrong numbers":
            out[..., 5, :] *= 1.01
        elif damage == "not a number":
            logsumexp[..., 5] = torch.nan
        else:
            out[..., 5, :] = before[..., 5, :]

    monkeypatch.setattr(triton_launch, "forward", damaged)
    clock = Clock(forward={FLAT: 0.1, SMALL: 1.0})
    tuned = tune(*inputs, timer=clock, among=[FLAT, SMALL], backward=False)
    assert tuned.chosen.forward == SMALL
    name = "logsumexp" if damage == "not a number" else "out"
    assert str(trial_of(tuned, "forward", FLAT).refused).startswith(f"{name}: relative error")
    assert ("forward", FLAT) not in clock.calls, "what is wrong has no speed"


@interpreted
@on_a_small_table
@pytest.mark.parametrize("kernel", ["keys", "queries", "one_pass"])
def test_wrong_gradients_are_never_chosen(inputs: list[Tensor], kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = "queries" if kernel == "queries" else "keys"
    real = getattr(triton_launch, launch)

    def damaged(*arguments: Any) -> None:
        real(*arguments)
        written = arguments[6]
        if kernel == "one_pass":
            written = arguments[10]  # dq_sum
        if written is not None and arguments[-1] == FLAT:
            written[..., 5, :] += 1

    monkeypatch.setattr(triton_launch, launch, damaged)
    tuned = tune(*inputs, timer=Clock(**{kernel: {FLAT: 0.1, SMALL: 1.0}}), among=[FLAT, SMALL])
    assert getattr(tuned.chosen, kernel) == SMALL
    assert "relative error" in str(trial_of(tuned, kernel, FLAT).refused)


@interpreted
@on_a_small_table
@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (OutOfResources(300_000, 232_448, "shared memory"), "OutOfResources: out of resource: shared memory"),
        (PTXASError("(C7600) Register allocation failed"), "PTXASError: PTXAS error: (C7600)"),
        (CompilationError(None, None, "no such product"), "CompilationError: no such product"),
        (RuntimeError("PassManager::run failed"), "RuntimeError: PassManager::run failed"),
    ],
)
def test_what_triton_refuses_is_left_out(
    inputs: list[Tensor], failure: Exception, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing(monkeypatch, {FLAT: failure})
    clock = Clock(forward={FLAT: 0.1, SMALL: 1.0})
    tuned = tune(*inputs, timer=clock, among=[FLAT, SMALL], backward=False)
    assert tuned.chosen.forward == SMALL
    assert str(trial_of(tuned, "forward", FLAT).refused).startswith(words)
    assert tuned.trials[-1].tiling == FLAT, "the refused come last"


@interpreted
@on_a_small_table
def test_other_errors_are_not_swallowed(inputs: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    refusing(monkeypatch, {FLAT: RuntimeError("CUDA error: an illegal memory access was encountered")})
    with pytest.raises(RuntimeError, match="illegal memory access"):
        tune(*inputs, timer=Clock(), among=[FLAT], backward=False)
    operands = Problem.of(*inputs, False, False).operands
    assert triton_tilings.choose(operands, 16, "split") == TABLE, "nothing was chosen"


@interpreted
@on_a_small_table
def test_where_the_present_choice_does_not_fit_a_smaller_one_tells_what_is_right(
    inputs: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    too_large = OutOfResources(300_000, 100_000, "shared memory")
    refusing(monkeypatch, {PRESENT: too_large})
    tuned = tune(*inputs, timer=Clock(), among=[FLAT], backward=False)
    assert tuned.chosen.forward in (FLAT, SMALL)
    assert trial_of(tuned, "forward", PRESENT).refused is not None
    refusing(monkeypatch, {FLAT: too_large, SMALL: too_large})
    with pytest.raises(NothingRuns, match=r"no tiling of the forward kernel runs on this device: .*shared memory"):
        tune(*inputs, timer=Clock(), among=[FLAT], backward=False)


@interpreted
@on_a_small_table
def test_one_pass_that_fits_nowhere_leaves_two(inputs: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    real = triton_launch.keys

    def one_pass_refused(*arguments: Any) -> None:
        if arguments[10] is not None:
            raise OutOfResources(300_000, 100_000, "shared memory")
        real(*arguments)

    monkeypatch.setattr(triton_launch, "keys", one_pass_refused)
    prefers = Tilings(PRESENT, PRESENT, PRESENT, PRESENT, prefer_one_pass=True)
    monkeypatch.setattr(triton_tilings, "from_tables", lambda *_: prefers)
    tuned = tune(*inputs, timer=Clock(), among=[FLAT])
    assert tuned.chosen == TABLE
    assert tuned.forms_ms == {"two passes": 2.0}


@interpreted
@on_a_small_table
@pytest.mark.parametrize(("time", "chosen"), [(1.99, PRESENT), (1.9, FLAT)])
def test_the_present_choice_stays_unless_another_is_clearly_faster(
    inputs: list[Tensor], time: float, chosen: Tiling
) -> None:
    tuned = tune(*inputs, timer=Clock(forward={FLAT: time}), among=[FLAT], backward=False)
    assert tuned.chosen.forward == chosen


@interpreted
@on_a_small_table
def test_slow_candidates_get_one_sample(inputs: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_tuning, "ROUNDS", ((1, 2), (4, 1), (11, 1)))
    clock = Clock(forward={SMALL: 1.0, FLAT: 1.5, UPRIGHT: 50.0, PRESENT: 60.0})
    tuned = tune(*inputs, timer=clock, among=[SMALL, FLAT, UPRIGHT], backward=False)
    counts = {tiling: clock.calls.count(("forward", tiling)) for tiling in (SMALL, FLAT, UPRIGHT, PRESENT)}
    assert counts == {SMALL: 16, FLAT: 5, UPRIGHT: 1, PRESENT: 16}, "the present choice runs to the end"
    assert [trial.tiling for trial in tuned.trials] == [SMALL, PRESENT, FLAT, UPRIGHT]
    assert tuned.trials[0].median_ms == 1.0


@interpreted
@on_a_small_table
def test_three_axes_and_grouped_heads(rng) -> None:
    generator = torch.Generator().manual_seed(rng.randrange(2**32))
    q = torch.randn(2, 10, 16, generator=generator)
    assert tune(q, q, q, timer=Clock(one_pass={SMALL: 1.0}), among=[SMALL]).chosen.one_pass == SMALL
    q, k = (torch.randn(1, heads, length, 16, generator=generator) for heads, length in ((2, 10), (1, 17)))
    assert tune(q, k, k, timer=Clock(keys={SMALL: 1.0}), among=[SMALL]).chosen.keys == SMALL


def test_inputs_that_are_not_taken() -> None:
    with pytest.raises(ValueError, match="there is nothing to tune for"):
        tune(torch.ones(1, 0, 16), torch.ones(1, 4, 16), torch.ones(1, 4, 16))
    with pytest.raises(ValueError, match="float64"):
        tune(*[torch.ones(1, 4, 16, dtype=torch.float64)] * 3)


@interpreted
@on_a_small_table
def test_what_was_chosen_is_told(inputs: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    refusing(monkeypatch, {UPRIGHT: OutOfResources(300_000, 232_448, "shared memory")})
    tuned = tune(*inputs, timer=Clock(forward={FLAT: 1.0}), among=[FLAT, UPRIGHT], tell=lines.append)
    assert "forward: best 16 × 32, 4, 1: 1.000 ms; 3 candidates, 1 refused" in lines
    assert "backward pass: two passes 2.000 ms, one pass 3.000 ms" in lines
    assert "forward 16 × 32, 4, 1 (1.000 ms, instead of 32 × 32, 4, 1); keys 32 × 32, 4, 1" in tuned.summary()
    assert tuned.summary().endswith("backward in two passes")
    printed = list(triton_tuning.report(tuned, 16))
    assert printed[0] == "    16   forward   16 × 32, 4, 1: 1    32 × 32, 4, 1: 2"
    assert eval(printed[-1].strip().rstrip(",").partition(": ")[2]) == tuned.chosen, "lines that can be pasted"
    assert "    1 × OutOfResources: out of resource: shared memory" in printed


@pytest.mark.parametrize(("table", "element_bytes"), [("LARGE_HALF", 2), ("LARGE_SPLIT", 6), ("TF32", 4)])
def test_pruning_leaves_what_the_tables_chose(table: str, element_bytes: int) -> None:
    for width, tilings in getattr(triton_tilings, table).items():
        limit = Limits(227 << 10, element_bytes, width, 16_384, 16_384, element_bytes != 4, element_bytes == 2)
        for kernel in ("forward", "keys", "queries", "one_pass"):
            assert why_pruned(kernel, getattr(tilings, kernel), limit) is None, (width, kernel)
            assert getattr(tilings, kernel) in candidates(kernel, limit)


@pytest.mark.parametrize(
    ("kernel", "tiling", "limit", "reason"),
    [
        ("forward", Tiling(64, 128, 4, 4), {"shared_bytes": 99 << 10}, "bytes of shared memory"),
        ("forward", Tiling(128, 128, 4, 1), {"width": 256}, "384 registers per thread"),
        ("one_pass", Tiling(64, 128, 4, 1), {"width": 128}, "448 registers per thread"),
        ("forward", Tiling(16, 16, 8, 1), {}, "too little for so many warps"),
        ("forward", Tiling(64, 64, 4, 1), {"queries": 32}, "larger than what there is to do"),
        ("keys", Tiling(64, 64, 4, 1), {"keys": 17}, "larger than what there is to do"),
        ("forward", Tiling(64, 64, 4, 3), {"keys": 128}, "more stages than the loop has tiles"),
        ("keys", Tiling(64, 64, 4, 3), {"queries": 128}, "more stages than the loop has tiles"),
        ("forward", Tiling(64, 64, 4, 3, True), {"can_hold": False}, "no tile can be held"),
        ("queries", Tiling(128, 64, 4, 1, True), {"width": 128}, "384 registers per thread"),
    ],
)
def test_what_cannot_be_fast_is_not_compiled(kernel: str, tiling: Tiling, limit: dict[str, int], reason: str) -> None:
    limits = Limits(**{**vars(HOPPER), **limit})
    assert reason in str(why_pruned(kernel, tiling, limits))
    assert tiling not in candidates(kernel, limits)
    assert tiling in candidates(kernel, Limits(**{**vars(HOPPER), "width": 16})) or not limit, "control"


# Bytes of shared memory that Triton 3.6 reported for compute capability 9.0, in bfloat16 through the copy engine.
REPORTED = [
    ("forward", Tiling(64, 128, 4, 3), 64, 107_520),
    ("forward", Tiling(64, 128, 4, 1), 64, 25_600),
    ("forward", Tiling(64, 32, 4, 3), 128, 66_560),
    ("keys", Tiling(64, 128, 4, 3), 64, 83_968),
    ("keys", Tiling(64, 128, 4, 1), 64, 49_160),
    ("queries", Tiling(64, 128, 4, 4), 64, 148_480),
    ("one_pass", Tiling(64, 128, 4, 2), 64, 98_848),
    ("forward", Tiling(64, 64, 4, 3, True), 128, 98_360),
    ("queries", Tiling(64, 32, 4, 3, True), 64, 24_632),
]


@pytest.mark.parametrize(("kernel", "tiling", "width", "shared_bytes"), REPORTED)
def test_shared_memory_is_estimated_from_below(kernel: str, tiling: Tiling, width: int, shared_bytes: int) -> None:
    limit = Limits(**{**vars(HOPPER), "width": width})
    estimate = triton_candidates.shared_bytes_needed(kernel, tiling, limit)
    assert 0.6 * shared_bytes < estimate <= shared_bytes


@interpreted
@on_a_small_table
def test_only_candidates_that_may_be_fast_are_tried(inputs: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_candidates, "STAGES", (1,))
    tuned = tune(*inputs, timer=Clock(), backward=False)
    expected = {PRESENT, SMALL, FLAT, UPRIGHT}
    assert {trial.tiling for trial in tuned.trials} == expected, "32 rows need no larger tiles, and no eight warps"


def test_the_command_needs_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as exit_info:
        triton_tuning.main(["--head-dim", "64"])
    assert exit_info.value.code == 1
    assert "There is no CUDA device here" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tuning_for_real(dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, gradient = (
        torch.randn(2, 2, 700, 64, generator=generator, device="cuda").to(dtype).requires_grad_(index < 3)
        for index in range(4)
    )
    too_large = Tiling(128, 128, 8, 4) if dtype == torch.float32 else Tiling(128, 256, 8, 4)  # for forward at least
    among = [Tiling(64, 32, 4, 2), Tiling(32, 64, 4, 2), Tiling(32, 32, 4, 1), too_large]
    lines: list[str] = []
    tuned = tune(q, k, v, True, among=among, tell=lines.append)
    print(*triton_tuning.report(tuned, 64), sep="\n")
    assert "OutOfResources" in str(trial_of(tuned, "forward", too_large).refused)
    for kernel in ("forward", "keys", "queries", "one_pass"):
        best = next(trial for trial in tuned.trials if trial.kernel == kernel)
        assert best.refused is None
        assert best.tiling == getattr(tuned.chosen, kernel)
        assert 0 < best.median_ms < 100
    assert set(tuned.forms_ms) == {"one pass", "two passes"}
    assert len(lines) >= 9
    problem = Problem.of(q, k, v, True, None)
    assert triton_tilings.choose(problem.operands, 64, problem.precision) == tuned.chosen
    right = oracle(q, k, v, gradient, True)
    # What was chosen by noise may be what it was before: also each form, and the slowest that runs.
    slowest = Tilings(*[Tiling(32, 32, 4, 1)] * 4)
    for tilings in (tuned.chosen, slowest, Tilings(*[Tiling(32, 32, 4, 1)] * 4, prefer_one_pass=True)):
        triton_tilings.remember(problem.operands, 64, problem.precision, tilings)
        out = flash_attention(q, k, v, True)
        results = out, *torch.autograd.grad(out, (q, k, v), gradient)
        for result, expected in zip(results, (right.out, *right.gradients), strict=True):
            assert error(result.detach(), expected).why_wrong(TOLERANCES[dtype]) is None


@pytest.mark.gpu
def test_the_command_prints_lines_to_paste(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_candidates, "ROWS", (32, 64))
    monkeypatch.setattr(triton_candidates, "STAGES", (2,))
    triton_tuning.main(["--length", "512", "--heads", "2", "--dtype", "float32", "--precision", "tf32", "--no-causal"])
    printed = capsys.readouterr().out.splitlines()
    assert torch.cuda.get_device_name() in "\n".join(printed)
    assert isinstance(eval(printed[-1].strip().rstrip(",").partition(": ")[2]), Tilings)
    q = torch.ones(1, 1, 32, 64, device="cuda")
    assert triton_tilings.choose((q, q, q), 64, "tf32") == eval(printed[-1].strip().rstrip(",").partition(": ")[2])
    out, right = flash_attention(q, q, q, tf32=True), q.double()
    assert error(out, right).why_wrong(TF32_TOLERANCE) is None


def test_where_kernels_are_interpreted_the_host_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the lap that the jobs' stopwatch is made of."""
    laps: list[Work] = []
    monkeypatch.setattr(triton_tuning, "host_lap_ms", lambda work: laps.append(work) or 7.0)

    def work() -> None:
        raise AssertionError("the lap was taken elsewhere")

    assert triton_tuning.default_timer(torch.device("cpu"))("forward", (), work) == 7.0
    assert laps == [work]
