"""Numbers that steps return: which are found, and when they are read."""

import math
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from workers.measure.returned import (
    MAX_NUMBERS,
    RETURNED,
    STEPS,
    ReturnedNumbers,
    check_constant,
    check_finite,
    numbers_in,
    slim,
    work_rows,
)

Pair = namedtuple("Pair", "loss accuracy")


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        (None, {}),
        (2, {"value": 2.0}),
        (torch.tensor(2.5), {"value": 2.5}),
        (torch.tensor([[2.5]], dtype=torch.bfloat16, requires_grad=True), {"value": 2.5}),
        (torch.ones(2), {}),
        (True, {}),
        ("2", {}),
        (torch.tensor(1j), {}),
        ({"large": 10**400, "loss": 1}, {"loss": 1.0}),
        (torch.empty((), device="meta"), {}),
        ((torch.tensor(1.0), {"norm": 3.0}), {"0": 1.0, "1.norm": 3.0}),
        (Pair(1.0, 0.5), {"loss": 1.0, "accuracy": 0.5}),
        (Output(torch.tensor(4.0), torch.ones(3)), {"loss": 4.0}),
        ({"loss": torch.tensor(4.0), "parts": [1, 2]}, {"loss": 4.0, "parts.0": 1.0, "parts.1": 2.0}),
    ],
)
def test_numbers_are_found_by_name(returned: Any, found: dict[str, float]) -> None:
    assert dict(numbers_in(returned)) == found
    assert dict(numbers_in(slim(returned))) == found


def test_first_steps_and_round_ones_are_kept_and_read_between_steps() -> None:
    buffer = torch.zeros(())  # a step may return the same tensor each time, as a CUDA graph does
    numbers = ReturnedNumbers(lambda: {"loss": buffer})
    wanted = []
    for step in range(1, 14):
        numbers.take()
        wanted += [step] if numbers.wants_next else []
        buffer.fill_(step)
    numbers.take()
    assert wanted == [*range(1, STEPS + 1), 6, 8, 10, 12]
    assert numbers.rows == [*(["returned", step, "loss", float(step), None] for step in wanted), made(13)]


def made(steps: int) -> list[Any]:
    return ["steps", None, "steps", steps, None]


def test_many_numbers_are_cut() -> None:
    numbers = ReturnedNumbers(lambda: list(range(1000)))
    numbers.take()
    numbers.take()
    assert len(numbers.rows) == MAX_NUMBERS + 1


def test_work_that_is_known() -> None:
    assert work_rows({"tokens": 8, "flops": None, "items": math.inf}) == [
        ["work", None, "tokens", 8, None],
        ["work", None, "items", None, "inf"],
    ]


@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
def test_what_stays_infinite_or_nan_is_suspect_and_what_passes_a_note(value: str) -> None:
    losses = iter([1.0, float(value), float(value), 2.0])
    numbers = ReturnedNumbers(lambda: {"loss": next(losses)})

    def checks() -> list[tuple[str, bool, str, str]]:
        numbers.take()
        return [(check.name, check.ok, check.severity, check.detail) for check in numbers.checks()]

    assert [checks(), checks()] == [[], []]
    for severity in ("note", "suspect"):  # one reading may pass
        assert checks() == [("finite", False, severity, f"loss is {value} from step 2 on")]
    assert checks() == [("finite", False, "note", f"step 2: loss is {value}, and later finite")]


@pytest.mark.parametrize(
    ("name", "value", "others", "severity"),
    [
        ("best_loss", "inf", ["loss"], "note"),
        ("best_loss", "nan", ["loss"], "suspect"),
        ("out.loss", "inf", ["loss"], "suspect"),
        ("value", "inf", [], "suspect"),
    ],
)
def test_what_was_never_finite_may_be_meant_so_if_it_is_infinite_beside_a_loss(name, value, others, severity) -> None:
    rows = [[RETURNED, step, one, 1.0, None] for step in (1, 2) for one in others]
    rows += [[RETURNED, step, name, None, value] for step in (1, 2)]
    assert [check.severity for check in check_finite(rows)] == [severity]
    once = "suspect" if value == "nan" else "note"
    assert [check.severity for check in check_finite([[RETURNED, 10, name, None, value]])] == [once]


@pytest.mark.parametrize(
    ("values", "steps", "told"),
    [
        ({"value": 6.51}, STEPS + 1, "value"),
        ({"value": 6.51, "accuracy": 0.5}, STEPS + 1, "value"),
        ({"value": 6.51}, STEPS, None),
        ({"rank 0 loss": 6.51, "rank 0 lr": None}, STEPS + 1, "rank 0 loss"),
        ({"loss": 6.9375}, STEPS + 1, None),  # in bfloat16, AdamW with a learning rate of 1e-5 does not change it
        ({"value": 8.0}, STEPS + 1, None),
        ({"lr": 0.1, "out": None}, STEPS + 1, None),
    ],
)
def test_numbers_that_never_change_are_told(values: dict[str, float | None], steps: int, told: str | None) -> None:
    """None is a number that changes."""
    rows = [
        [RETURNED, step, name, float(step) if value is None else value, None]
        for step in range(1, steps + 1)
        for name, value in values.items()
    ]
    found = check_constant(rows)
    assert [(check.name, check.severity) for check in found] == ([("constant", "note")] if told else [])
    assert told is None or found[0].detail.startswith(f"{told} is 6")
