"""What scripts say of their steps, when they run by themselves: nothing is measured, and nothing is imported for it."""

import math
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import numpy
import pytest

import flopwatch
from flopwatch import steps


def test_a_script_by_itself_pays_for_no_import() -> None:
    code = (
        "import sys, flopwatch\n"
        "with flopwatch.phase('forward'):\n    flopwatch.work(flops=1)\n"
        "assert not {'torch', 'app', 'httpx', 'pydantic'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("times_ms", "said"),
    [([1, 9, 3], "3 ± 6"), ([*range(1, 11), 500], "6 ± 4"), ([7], "7"), ([12300, 12345, 12500], "12,345 ± 160")],
)
def test_measure_prints_how_certain_the_median_is(times_ms, said, capsys, monkeypatch) -> None:
    clock = iter([0.0] + [second for each in times_ms for second in (0, each / 1e3)])
    monkeypatch.setattr(flopwatch.steps, "_now_s", lambda: next(clock))
    flopwatch.measure(lambda: None, warmup_steps=1, measure_steps=len(times_ms))
    assert capsys.readouterr().out == f"step: {said} ms, the median of {len(times_ms)}\n"


def test_measure_names_the_step_in_which_a_loader_ends() -> None:
    loader = iter(range(4))
    with pytest.raises(RuntimeError, match=r"step 5 .* loader.* 3 steps to warm up and 10 measured.* begin again"):
        flopwatch.measure(lambda: next(loader))


class Heard:
    """Keeps the amounts of work that it is told."""

    def __init__(self) -> None:
        self.tokens: list[float | None] = []

    def work(self, *, tokens: float | None, **_others: float | None) -> None:
        self.tokens.append(tokens)


@pytest.mark.parametrize("listens", [True, False])
def test_what_is_no_step_is_refused(listens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_listener", Heard() if listens else None)
    with pytest.raises(TypeError, match=r"as in measure\(step\); this is of type float"):
        flopwatch.measure(0.5)  # type: ignore[arg-type]
    for name, value in (
        ("warmup_steps", -1),
        ("measure_steps", 0),
        *(("measure_steps", n) for n in (2.5, True, 10**7)),
    ):
        with pytest.raises(ValueError, match=rf"{name} as a whole number from . to 10+, not {value}"):
            flopwatch.measure(lambda: None, **{name: value})  # type: ignore[arg-type]


async def asynchronous() -> AsyncIterator[int]:
    yield 1


def generator() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize("step", [asynchronous, generator, lambda: print, Future])
def test_a_script_alone_times_no_step_that_has_not_run(step: Callable[[], object]) -> None:
    with pytest.raises(TypeError, match=r"its code has not run|may not have been done"):
        flopwatch.measure(step)


@pytest.mark.parametrize(
    ("amount", "why"),
    [
        (-5, "from 0 to 1e+30, not -5 (int)"),
        (math.nan, "not nan (float)"),
        (10**400, "to 1e+30, not 1000"),
        ("five", "one number from 0 to 1e+30, not 'five' (str)"),
        (len, "not <built-in function len>"),
    ],
    ids=lambda value: str(value)[:20],
)
@pytest.mark.parametrize("listens", [True, False])
def test_work_that_is_no_amount_is_refused_also_by_a_script_alone(amount, why, listens, monkeypatch) -> None:
    monkeypatch.setattr(steps, "_listener", Heard() if listens else None)
    with pytest.raises(ValueError, match=r"^flopwatch\.work\(tokens=…\) takes ") as refused:
        flopwatch.work(tokens=amount)
    assert why in str(refused.value)
    assert len(str(refused.value)) < 200


def test_scalars_of_libraries_are_amounts(monkeypatch: pytest.MonkeyPatch) -> None:
    np, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    heard = Heard()
    monkeypatch.setattr(steps, "_listener", heard)
    five: list[Any] = [5, 5.0, Fraction(5), np.int64(5), np.float32(5), np.array(5), np.array([5])]
    for amount in [*five, torch.tensor(5), torch.tensor([5.0], dtype=torch.bfloat16)]:
        flopwatch.work(tokens=amount)
    assert heard.tokens == [5.0] * 9
    assert {type(one) for one in heard.tokens} == {float}
    flopwatch.work(tokens=0)
    flopwatch.work(items=1)
    assert heard.tokens[9:] == [0.0, None]
    for amount in (torch.ones(2), torch.tensor(float("nan"))):
        with pytest.raises(ValueError, match=r"flopwatch\.work\(tokens=…\) takes "):
            flopwatch.work(tokens=amount)


def test_a_listener_hears_all(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[Any] = []

    class Listener:
        @contextmanager
        def phase(self, name: str) -> Iterator[None]:
            heard.append(name)
            yield

        def work(self, **amounts: float | None) -> None:
            heard.append(amounts)

        def measure(self, step: Any, **options: Any) -> None:
            heard.append(options)

    monkeypatch.setattr(steps, "_listener", None)
    steps.listen(Listener())
    with flopwatch.phase("forward"):
        flopwatch.work(items=3)
    flopwatch.measure(lambda: None, measure_steps=numpy.int64(2))  # type: ignore[arg-type]
    assert heard == ["forward", {"flops": None, "tokens": None, "items": 3}, {"warmup_steps": None, "measure_steps": 2}]
    assert type(heard[-1]["measure_steps"]) is int


@pytest.mark.parametrize(
    ("step_ms", "number"),
    [(9.0, 150), (10.0, 100), (1e-3, 1000), (0.0, 1000), (333.0, 10), (60.0, 20), (5e3, 10), (math.inf, 10)],
)
def test_a_second_of_steps_is_a_round_number(step_ms: float, number: int) -> None:
    assert steps.steps_of_a_second(step_ms) == number
