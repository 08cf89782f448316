"""Judging operations: checksums of inputs, and judgements on inputs that hold other values."""

import random
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from kernels.device_events import reset_peaks
from kernels.tolerance import fixed_limits
from workers.measure.judging import Draw, Expected, Reference, checksum, judge, judge_results
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


@pytest.mark.gpu
def test_on_a_gpu_it_is_the_same_and_takes_little_memory(rng: random.Random) -> None:
    tensor = draw(rng, 300, 301)
    assert checksum(tensor.cuda()) == checksum(tensor)
    large = torch.ones(1 << 28, device="cuda")  # 1 GiB
    before = torch.cuda.memory_allocated()
    reset_peaks()
    checksum(large)
    assert torch.cuda.max_memory_allocated() - before < 64 << 20


def product(a: Tensor, b: Tensor) -> Tensor:
    return a.square() @ b


def draw_of(name: str, rng: random.Random) -> Draw:
    given = draw(rng, 6, 5), draw(rng, 5, 4), draw(rng, 6, 4)
    exact = [tensor.double().requires_grad_() for tensor in given[:2]]
    out = product(*exact)
    right = out.detach(), *torch.autograd.grad(out, exact, given[2].double())
    return Draw(name, lambda: given, tuple(Expected(tensor, fixed_limits(1e-5)) for tensor in right))


def make_reference(rng: random.Random) -> Reference:
    timed = draw_of("timed", rng)
    a, b, grad_out = (tensor.clone() for tensor in timed.values())
    inputs = a.requires_grad_(), b.requires_grad_()
    return Reference(inputs, grad_out, timed, (draw_of("other inputs", rng),))


def test_what_is_right_is_right_with_other_values(rng: random.Random) -> None:
    reference = make_reference(rng)
    operation = Operation(product, reference.inputs, reference.grad_out)
    bits = [tensor.detach().clone() for tensor in reference.inputs]
    for values in (None, *reference.checked):
        found = judge(operation, reference, values)
        assert found.wrong is None
        assert set(found.errors) == {0, 1, 2}
        assert max(error.relative for error in found.errors.values()) < 1e-5
    assert all(torch.equal(now, then) for now, then in zip(reference.inputs, bits, strict=True))
    assert reference.changed() == []


def test_all_inputs_hold_the_other_values_at_the_same_place(rng: random.Random) -> None:
    reference = make_reference(rng)
    given = *reference.inputs, reference.grad_out
    places = [(tensor.data_ptr(), tensor._version) for tensor in given]
    (other,) = reference.checked
    with reference.holding(other):
        assert all(map(torch.equal, given, other.values()))
        assert [(tensor.data_ptr(), tensor._version) for tensor in given] == places
    assert reference.changed() == []


def test_inputs_at_other_addresses(rng: random.Random) -> None:
    """As a CUDA graph that was captured without copying its inputs, on a CPU: it reads those of the first call."""
    reference, first = make_reference(rng), []

    def captured(a: Tensor, b: Tensor) -> Tensor:
        first.extend([] if first else [a, b])
        result: Tensor = product(a, b)
        result.data.copy_(product(*first))
        return result

    for function, wrong in ((product, None), (captured, "the output")):
        operation = Operation(function, reference.inputs, reference.grad_out)
        for values in (reference.timed, *reference.checked):
            assert judge(operation, reference, values).wrong is None
            assert (judge(operation, reference, values, moved=True).wrong or "None").startswith(str(wrong))
            assert reference.changed() == []


def test_results_of_a_timed_call(rng: random.Random) -> None:
    reference = make_reference(rng)
    out = product(*reference.inputs)
    gradients = torch.autograd.grad(out, reference.inputs, reference.grad_out)
    assert judge_results(out, gradients, reference, reference.timed).wrong is None
    assert judge_results(None, gradients, reference, reference.timed).wrong is None
    wrong = judge_results(out, (gradients[0], 1.01 * gradients[1]), reference, reference.timed)
    assert (wrong.wrong or "").startswith("the gradient of input 1: relative error 1.00e-02")
    assert judge_results(1.01 * out, (), reference, reference.timed).wrong
    assert (
        judge_results(None, (gradients[0], None), reference, reference.timed).wrong
        == "the gradient of input 1 is missing"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("which", [0, 1], ids=["forward", "backward"])
def test_work_for_which_the_current_stream_does_not_wait_is_wrong(rng: random.Random, which: int) -> None:
    timed, other = draw_of("timed", rng), draw_of("other inputs", rng)
    a, b, grad_out = (tensor.cuda() for tensor in timed.values())
    reference = Reference((a.requires_grad_(), b.requires_grad_()), grad_out, on_gpu(timed), (on_gpu(other),))
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    class OnTheSide(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
            ctx.save_for_backward(a, b)
            with torch.cuda.stream(stream if which == 0 else None):
                return product(a, b)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            with torch.cuda.stream(stream if which == 1 else None), torch.enable_grad():
                given = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
                return torch.autograd.grad(product(*given), given, gradients)

    for function, wrong in ((OnTheSide.apply, True), (product, False)):
        operation = Operation(function, reference.inputs, reference.grad_out)
        judge(operation, reference)  # libraries are loaded
        torch.cuda.synchronize()
        assert (judge(operation, reference, reference.checked[0]).wrong is not None) is wrong
        torch.cuda.synchronize()


def on_gpu(draw: Draw) -> Draw:
    expected = (Expected(one.tensor.cuda(), one.limit) for one in draw.expected)
    return Draw(draw.name, lambda: [tensor.cuda() for tensor in draw.values()], tuple(expected))


class Lazy(torch.Tensor):
    """A tensor that could compute its values when they are read."""


def test_a_result_must_be_a_plain_tensor(rng: random.Random) -> None:
    reference = make_reference(rng)
    operation = Operation(lambda a, b: product(a, b).as_subclass(Lazy), reference.inputs, None)
    assert judge(operation, reference).wrong == "the output is a Lazy, not a plain tensor"


def test_a_result_that_torch_lets_nobody_read(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a CUDA graph of torch.compile overwrites its former results, on GPUs."""
    reference = make_reference(rng)
    words = "Error: accessing tensor output of CUDAGraphs that has been overwritten by a subsequent run."
    monkeypatch.setattr("workers.measure.judging.error", Mock(side_effect=RuntimeError(words)))
    operation = Operation(product, reference.inputs, None)
    assert judge(operation, reference, others=True).wrong is None
    with pytest.raises(RuntimeError, match="overwritten"):
        judge(operation, reference)


def test_what_was_changed_is_named(rng: random.Random) -> None:
    reference = make_reference(rng)
    with torch.no_grad():
        reference.inputs[1][0, 0] += 1
        reference.grad_out.zero_()
    assert reference.changed() == ["input 1", "the output's gradient"]
