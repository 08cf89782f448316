"""What the time of a step of several ranks is lost to, from profiled steps that are made by hand."""

import json
from collections import defaultdict
from typing import Any

import pytest
import torch

from app.specs import KINDS
from workers.changes._base import Look, Shared
from workers.jobs.ddp.stragglers import COLUMNS, Lateness
from workers.jobs.ddp.timelines import WAITING, Ranks
from workers.jobs.diagnosis.look import candidates
from workers.jobs.diagnosis.ranks import lost_by

CODE = {"sha256": "0" * 64, "function": "make_step", "file": "train.py"}
ALL_REDUCE = "all_reduce before optimizer (1 a step, up to 25 MB)"
OF_RANK_1 = "rank 1 before forward layers.0 (the others wait for it)"


def seen(begin: float, end: float, *, host: float = 0.0, began: float = 0.0) -> dict[str, Any]:
    """A step that computes for 10 ms, idles for `host`, and then does nothing until its all-reduce ends."""
    places = [["kernels", "matmul", "", 10.0], *([["host", "before forward", "layers.0", host]] if host else [])]
    return {
        "begin_ms": began,
        "ms": end,
        "places": places,
        "collectives": [["all_reduce", begin, end, "backward"]],
        "exposed": [[0, begin, end, "before optimizer", ""]],
        "longest": [],
    }


def ranks(*steps: dict[str, Any]) -> Ranks:
    return Ranks([[one] for one in steps], {"all_reduce": 25 << 20})


DEVICE = ("kernels", "elementwise")
LATE = ranks(seen(10, 32), seen(30, 32, host=20.0))
EVEN = ranks(seen(10, 12), seen(10, 12))


def test_a_rank_waits_for_the_one_in_which_the_collective_is_shortest() -> None:
    assert [one["communication", WAITING] for one in LATE.places] == [20, 0]
    assert [sum(one.values()) for one in LATE.places] == [32, 32], "busy and idle time are the step"


def test_a_clock_that_is_ahead_is_no_lateness() -> None:
    """Rank 1's clock is 7 ms ahead, and its last collective ends 1 ms later than the alignment says."""
    step = seen(10, 12), seen(10, 12, began=7)
    for one, end in zip(step, (32, 33), strict=True):
        one["collectives"] += [["all_reduce", 20, 22, "backward"], ["all_reduce", 30, end, "backward"]]
    found = ranks(*step)
    assert found.ahead_ms == [0, 7]
    assert found.residual_ms == 1
    assert found.early_ms == [[0, 0]]
    assert Lateness(found).late == []


def test_waiting_in_several_collectives_at_once_counts_once() -> None:
    """gloo's operations all wait from when they were issued."""
    step = seen(10, 32), seen(30, 32, host=20)
    for one, begin in zip(step, (12, 30), strict=True):
        one["collectives"].append(["all_reduce", begin, 33, "backward"])
    found = ranks(*step)
    assert Lateness(found).mean_ms(1) == pytest.approx(20, abs=1.01)
    assert (found.ahead_ms, found.residual_ms) == ([0, 0], 0)


@pytest.mark.parametrize(
    ("longer", "known", "said"),
    [
        (("input", "before forward"), {}, "its input takes 1234 ms longer than the others'"),
        (("launches", "before backward"), {}, "its host is 1234 ms later (launches before backward)"),
        (DEVICE, {}, "its device or its work takes 1234 ms longer"),
        (DEVICE, {"work": {"tokens": [8.0, 8.0]}}, "its device or its work takes 1234 ms longer"),
        (DEVICE, {"work": {"tokens": [8.0, 16.0]}}, "its work takes 1234 ms longer: 2.00 times the others' tokens"),
        (DEVICE, {"clocks_mhz": [1980, 1410]}, "its device takes 1234 ms longer (at 1410 MHz, the others at 1980)"),
        (DEVICE, {"clocks_mhz": [None, 1410]}, "its device or its work takes 1234 ms longer"),
        (DEVICE, {"clocks_mhz": [1980.0]}, "its device or its work takes 1234 ms longer"),  # of this host's ranks
        (None, {}, "why is not known"),
    ],
)
def test_why_a_rank_is_late(longer: tuple[str, str] | None, known: dict[str, Any], said: str) -> None:
    late = seen(30, 32)
    late["places"] += [[*longer, "", 1234.0]] if longer else []
    lateness = Lateness(ranks(seen(10, 32), late), **known)
    assert (lateness.late, lateness.why(1)) == ([1], said)
    detail = f"rank 1 is late in 1 of 1 steps: {said}; clocks aligned to 0 ms"
    assert (lateness.check().ok, lateness.check().detail) == (False, detail)
    assert Lateness(EVEN).check().detail == "no rank is late in most steps; clocks aligned to 0 ms"


def test_ranks_that_take_turns_within_a_step_are_no_stragglers() -> None:
    one, other = seen(10, 12), seen(10, 12)
    for step, begins in ((one, (20, 30)), (other, (25, 25))):
        step["collectives"] += [["all_reduce", begins[0], 26, ""], ["all_reduce", begins[1], 31, ""]]
    lateness = Lateness(ranks(one, other))
    assert (lateness.late, lateness.in_turns) == ([], True)
    assert lateness.turns_ms == 5
    assert lateness.check().detail.startswith("ranks take turns in being late")  # type: ignore[union-attr]


def waiting(*steps: list[float]) -> Lateness:
    """Ranks that compute for 10 ms more than the time for which others wait for them."""
    of_ranks = [[seen(10 + max(step) - ms, 12 + max(step)) for step, ms in zip(steps, of, strict=True)]
                for of in zip(*steps, strict=True)]  # fmt: skip
    return Lateness(Ranks(of_ranks, {}))


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([[20, 3, 0, 2], [20, 0, 2, 3], [20, 2, 3, 0]], "no rank is late in most steps"),
        ([[20, 20, 0, 0]] * 6, "rank 2 is late in 6 of 6 steps: why is not known; rank 3 is late in 6 of 6"),
        ([[25, 0, 20, 20], [25, 20, 0, 20], [25, 20, 20, 0]], "ranks take turns in being late"),
        ([[20, 0], [0, 20]] * 3, "ranks take turns in being late"),
    ],
)  # fmt: skip
def test_ranks_take_turns_only_if_not_the_same_ones_always_come_last(steps: list[list[float]], said: str) -> None:
    lateness = waiting(*steps)
    check = lateness.check()
    assert check.detail.startswith(said)
    assert check.ok == said.startswith("no rank")
    assert lateness.in_turns == said.startswith("ranks take turns")


def test_one_rank_is_no_straggler_and_nobody_comes_last_where_nobody_waits() -> None:
    assert (Lateness(ranks(seen(10, 12))).rows(), Lateness(ranks(seen(10, 12))).check()) == ([], None)
    last = [column.name for column in COLUMNS].index("last_percent")
    assert [row[last] for row in Lateness(EVEN).rows() if row[0] == "all"] == [0, 0]
    assert [row[last] for row in Lateness(LATE).rows() if row[0] == "all"] == [0, 100]


def test_ranks_that_ran_other_collectives_are_not_compared() -> None:
    other = seen(10, 32)
    other["collectives"][0][0] = "all_gather"
    in_some = Ranks([[seen(10, 12)] * 6, [seen(10, 12)] * 2 + [other] * 4], {})
    for found in (ranks(seen(10, 12), other), in_some):
        check = Lateness(found).check()
        assert not check.ok
        assert "ran different collectives" in check.detail
        assert (Lateness(found).rows(), Lateness(found).in_turns) == ([], False)
    assert Lateness(ranks()).check() is None
    places = ranks(seen(10, 12), other).places
    assert all(WAITING not in where for one in places for (_, where), ms in one.items() if ms)


ALONE = [12.0] * 8


@pytest.mark.parametrize(
    ("profiled", "step_ms", "exposed_ms", "alone", "lost"),
    [
        (LATE, 32.0, 2.0, [[10.0] * 8, [30.0] * 8],
         {("host", OF_RANK_1): 20, ("kernels", "matmul"): 10, ("communication", ALL_REDUCE): 2}),
        (EVEN, 20.0, 8.0, [ALONE, ALONE], {("communication", ALL_REDUCE): 8, ("kernels", "matmul"): 12}),
        (Ranks([[], []], {}), 20.0, 8.0, [ALONE, ALONE], {("communication", ""): 8, ("kernels", ""): 12}),
    ],
    ids=["what a late rank does longer", "exposed as measured and not as profiled", "without a profile"],
)  # fmt: skip
def test_what_the_step_is_lost_to(profiled, step_ms, exposed_ms, alone, lost) -> None:
    found = {of: ms for of, ms in lost_by(profiled, step_ms, exposed_ms, alone).items() if ms}
    assert found == pytest.approx(lost)


def test_without_the_step_that_moves_nothing_the_profile_tells() -> None:
    lost = lost_by(LATE, 32.0, None, [[], []])
    assert lost["communication", ALL_REDUCE] == 2
    assert lost["host", OF_RANK_1] == pytest.approx(20)
    assert sum(lost.values()) == pytest.approx(32)


def known(**fields: Any) -> Look:
    step = KINDS["ddp"].model_validate({"model": {"size": "tiny"}, "context_length": 64, **fields})
    device = torch.device("cuda" if fields.get("backend") == "nccl" else "cpu")
    return Look(step, device, None, shared=Shared(100.0, 4.0))  # type: ignore[arg-type]


def tried(**fields: Any) -> dict[str, dict[str, Any]]:
    """The changes of a step that loses most to communication, with their fields."""
    look = known(**fields)
    spec = KINDS["diagnosis"].model_validate({"step": look.spec.model_dump()})
    lost = defaultdict(float, {("communication", ""): 10.0, ("optimizer", ""): 5.0, ("launches", ""): 2.0})
    return {row[0]: json.loads(row[-1]) for row in candidates(spec, look, lost) if row[2] is None}  # type: ignore[misc, arg-type]


@pytest.mark.parametrize(
    ("fields", "changes"),
    [
        (
            {"strategy": "bucketed", "bucket_size_mb": None},
            {"smaller_buckets": {"bucket_size_mb": 25.0}, "larger_buckets": None},
        ),
        (
            {"strategy": "torch_ddp", "bucket_size_mb": 8.0},
            {
                "smaller_buckets": {"bucket_size_mb": 4.0},
                "predicted_buckets": {"bucket_size_mb": 4.0},
                "larger_buckets": {"bucket_size_mb": 16.0},
            },
        ),
        (
            {"strategy": "naive"},
            {"bucketed_gradients": {"strategy": "bucketed"}, "overlapped_gradients": {"strategy": "overlapped"}},
        ),
        ({"strategy": "fsdp", "prefetch": 0}, {"gather_earlier": {"prefetch": 1}}),
        ({"strategy": "fsdp", "prefetch": 4}, {"gather_earlier": None}),
        ({"strategy": "torch_fsdp"}, {"gather_once": {"reshard_after_forward": False}, "gather_earlier": None}),
        ({"strategy": "fsdp", "reshard_after_forward": False}, {"gather_once": None}),
        ({"strategy": "fsdp"}, {"sharded_optimizer": None, "gather_bf16": None, "cuda_graph": None}),
        (
            {"strategy": "fsdp", "precision": "bf16", "cast_before_communication": False},
            {"gather_bf16": {"cast_before_communication": True}},
        ),
        ({"strategy": "bucketed"}, {"sharded_optimizer": {"sharded_optimizer": True}}),
        ({"step_code": CODE}, {"fused_optimizer": None}),
        ({"strategy": "fsdp", "backend": "nccl"}, {"cuda_graph": {"cuda_graph": True}}),
    ],
)
def test_the_fields_of_a_step_of_ranks_that_may_help(fields: dict[str, Any], changes: dict[str, Any]) -> None:
    """None: what such a step has or cannot have is not tried."""
    found = tried(**fields)
    assert {name: found.get(name) for name in changes} == changes
    assert ("bucketed_gradients" in found) == (fields.get("strategy") == "naive")
