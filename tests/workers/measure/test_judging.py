"""Judging operations: checksums of inputs, and second judgements with one input negated."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("pydantic", reason="the service's dependencies are not installed")

import torch
from torch import Tensor

from kernels.tolerance import fixed_limits
from workers.jobs._grid import judging
from workers.jobs._grid.judging import Reference, checksum, judge, judge_negated, set_errors
from workers.jobs._values import Metric, Values
from workers.measure.operations import Operation

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def draw(rng: random.Random, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rng.getrandbits(32)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_single_bit_counts(dtype: torch.dtype, rng: random.Random) -> None:
    tensor = draw(rng, 5, 77).to(dtype)
    before = checksum(tensor)
    assert checksum(tensor.clone()) == before
    size = tensor.element_size()
    bits = tensor.view(-1).view(INTEGERS[size])
    for _ in range(200):
        place, bit = rng.randrange(len(bits)), rng.randrange(8 * size)
        mask = torch.tensor(1 << bit if bit < 8 * size - 1 else -(1 << bit), dtype=bits.dtype)
        bits[place] ^= mask
        assert checksum(tensor) != before, (place, bit)
        bits[place] ^= mask
    assert checksum(tensor) == before


def test_order_counts(rng: random.Random) -> None:
    """A sum or an exclusive or alone would not see what moved."""
    tensor = draw(rng, 40, 40)
    before = checksum(tensor)
    for other in (tensor.T.contiguous(), tensor.flip(0), tensor.roll(1), tensor.view(-1).sort().values):
        assert checksum(other) != before
    for _ in range(200):
        one, two = rng.sample(range(tensor.numel()), 2)
        swapped = tensor.clone().view(-1)
        swapped[[one, two]] = swapped[[two, one]]
        assert checksum(swapped) != before


@pytest.mark.parametrize("part", [1, 7, 64, 1000])
def test_parts_are_only_how_it_is_computed(part: int, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = draw(rng, 9, 31)
    whole = checksum(tensor)
    monkeypatch.setattr(judging, "CHECKSUM_PART", part)
    assert checksum(tensor) == whole


@pytest.mark.gpu
def test_on_a_gpu_it_is_the_same_and_takes_little_memory(rng: random.Random) -> None:
    tensor = draw(rng, 300, 301)
    assert checksum(tensor.cuda()) == checksum(tensor)
    large = torch.ones(1 << 28, device="cuda")  # 1 GiB
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    checksum(large)
    assert torch.cuda.max_memory_allocated() - before < 64 << 20


def product(a: Tensor, b: Tensor) -> Tensor:
    return a.square() @ b


def make_reference(rng: random.Random) -> Reference:
    """Linear in the second input, and not in the first."""
    a, b = draw(rng, 6, 5).requires_grad_(), draw(rng, 5, 4).requires_grad_()
    grad_out = draw(rng, 6, 4)
    exact = [tensor.detach().double().requires_grad_() for tensor in (a, b)]
    out = product(*exact)
    gradients = torch.autograd.grad(out, exact, grad_out.double())
    return Reference((a, b), grad_out, (out.detach(), *gradients), (fixed_limits(1e-5),) * 3, linear_in=1)


def test_what_is_right_is_right_with_an_input_negated(rng: random.Random) -> None:
    reference = make_reference(rng)
    operation = Operation(product, reference.inputs, reference.grad_out)
    bits = [tensor.detach().clone() for tensor in reference.inputs]
    for found in (judge(operation, reference), judge_negated(operation, reference)):
        assert found.wrong is None
        assert len(found.errors) == 3
        assert max(found.errors) < 1e-5
    assert all(torch.equal(now, then) for now, then in zip(reference.inputs, bits, strict=True))
    assert reference.changed() == []


def test_a_failed_second_judgement_restores_the_inputs(rng: random.Random) -> None:
    reference = make_reference(rng)

    def fail(a: Tensor, b: Tensor) -> Tensor:
        raise ValueError("the second input is a pineapple")

    with pytest.raises(ValueError, match="pineapple"):
        judge_negated(Operation(fail, reference.inputs, reference.grad_out), reference)
    assert reference.changed() == []


def test_a_result_that_is_kept_is_right_once(rng: random.Random) -> None:
    reference = make_reference(rng)
    kept: list[Tensor] = []

    def keeps(a: Tensor, b: Tensor) -> Tensor:
        if not kept:
            kept.append(product(a, b).detach())
        return kept[0]

    operation = Operation(keeps, reference.inputs, None)
    assert judge(operation, reference).wrong is None
    assert (judge_negated(operation, reference).wrong or "").startswith("the output: relative error 2.00e+00")


def test_a_result_that_is_kept_for_an_inputs_version_is_right_once(rng: random.Random) -> None:
    """An innocent cache: the second judgement changes the input, but not the version that torch counts."""
    reference = make_reference(rng)
    kept: dict[tuple[object, ...], Tensor] = {}

    def remembers(a: Tensor, b: Tensor) -> Tensor:
        key = tuple((tensor.data_ptr(), tensor._version, tensor.shape) for tensor in (a, b))
        if key not in kept:
            kept[key] = product(a, b)
        return kept[key]

    operation = Operation(remembers, reference.inputs, None)
    assert judge(operation, reference).wrong is None
    assert (judge_negated(operation, reference).wrong or "").startswith("the output: relative error 2.00e+00")
    assert reference.changed() == []


class Lazy(torch.Tensor):
    """A tensor that could compute its values when they are read."""


def test_a_result_must_be_a_plain_tensor(rng: random.Random) -> None:
    reference = make_reference(rng)
    operation = Operation(lambda a, b: product(a, b).as_subclass(Lazy), reference.inputs, None)
    assert judge(operation, reference).wrong == "the output is a Lazy, not a plain tensor"


def test_what_was_changed_is_named(rng: random.Random) -> None:
    reference = make_reference(rng)
    assert reference.grad_out is not None
    with torch.no_grad():
        reference.inputs[1][0, 0] += 1
        reference.grad_out.zero_()
    assert reference.changed() == ["input 1", "the output's gradient"]


def test_the_larger_error_of_several_judgements_is_shown() -> None:
    values = Values([Metric("output_error", None, "fraction"), Metric("gradient_error", None, "fraction")])
    set_errors(values, judging.Judgement((0.1, 0.2, 0.3), None), judging.Judgement((0.4, 0.1, 0.1), None))
    assert values.samples("output_error", None) == [0.4]
    assert values.samples("gradient_error", None) == [0.3]
    set_errors(values, judging.Judgement((float("nan"),), "the output: relative error nan"))
    assert values.samples("output_error", None) is None
    assert values.samples("gradient_error", None) == [0.3]
