"""What the judge notices: planted faults, and no fault of honest kernels."""

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch

from kernels.attention.problem import AttentionProblem
from kernels.operations import linear_cross_entropy
from kernels.registry import ATTENTION, KERNELS
from tests.kernels.rounded import rounded_flash_attention
from tests.workers.measure.faults import FAULTS, Fault
from tests.workers.measure.judged import LARGE, SMALL, draws, honest_attention, honest_kernels, noticed
from workers.measure.judging import judge
from workers.measure.operations import Operation
from workers.measure.references import attention_reference, kernel_reference

CPU = torch.device("cpu")
COMPILED_FOR_MINUTES = ("flex", "triton")
"""Attentions that are compiled anew for each problem. tests/kernels compares them with the oracle, too."""


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_planted_fault_is_wrong(fault: Fault) -> None:
    assert noticed(fault, SMALL, CPU) is not None


@pytest.mark.parametrize("name", ["rms_norm", "rope", "swiglu", "weighted_sum"])
def test_plain_pytorch_is_right_in_few_rows(name: str) -> None:
    """By chance its errors are large there, relative to the results."""
    kernel = KERNELS.load(name)
    for dtype, seed in product((torch.bfloat16, torch.float16), range(24)):
        reference = kernel_reference(kernel, 2, 64, dtype, backward=True, seed=seed, device=CPU)
        operation = Operation(kernel.plain, reference.inputs, reference.grad_out)
        assert [judge(operation, reference, draw).wrong for draw in draws(reference)] == [None] * len(draws(reference))


@pytest.mark.parametrize(
    ("length", "dtype", "causal"),
    [(1, torch.bfloat16, True), (5, torch.float16, False), (130, torch.bfloat16, False), (130, torch.float16, True)],
)
def test_the_roundings_of_kernels_on_gpus_are_right(length: int, dtype: torch.dtype, causal: bool) -> None:
    """Weights and their gradients are rounded before they are multiplied, as tensor cores take them."""
    reference = attention_reference(
        (2, 2, length, 32), (2, 2, length, 32), dtype, AttentionProblem(num_heads=2, is_causal=causal),
        backward=True, seed=length, device=CPU,
    )  # fmt: skip
    operation = Operation(
        lambda *inputs: rounded_flash_attention(*inputs, causal), reference.inputs, reference.grad_out
    )
    for draw in draws(reference):
        assert judge(operation, reference, draw).wrong is None, draw.name


@pytest.mark.parametrize("name", ["eager", "tiled"])
def test_float16_has_room_for_the_scores_of_a_small_scale(name: str) -> None:
    problem, shape = AttentionProblem(num_heads=2, scale=0.001), (1, 2, 96, 64)
    reference = attention_reference(shape, shape, torch.float16, problem, backward=True, seed=0, device=CPU)
    function = partial(ATTENTION.load(name).function, scale=0.001)
    operation = Operation(function, reference.inputs, reference.grad_out)
    assert [judge(operation, reference, draw).wrong for draw in draws(reference)] == [None] * 4


def test_messages_call_an_operations_inputs_as_its_plain_pytorch_does() -> None:
    reference = kernel_reference(linear_cross_entropy, 3, 8, torch.float32, backward=False, seed=0, device=CPU)
    assert reference.names == ("hidden", "weight", "scale")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] if name in COMPILED_FOR_MINUTES else [])
        for name in ATTENTION.names()
        if not name.startswith("cpu_")
    ],
)
def test_on_a_gpu_no_attention_is_wrong(name: str) -> None:
    size = replace(LARGE, head_dims=(64,))  # of the others most of the time is the compilers'
    assert honest_attention(size, torch.device("cuda"), [name]) == {name: []}


@pytest.mark.gpu
def test_on_a_gpu_every_fault_is_wrong_and_no_kernel() -> None:
    device = torch.device("cuda")
    for name, wrong in honest_kernels(LARGE, device):
        assert wrong == [], name
    assert [fault.name for fault in FAULTS if noticed(fault, LARGE, device) is None] == []
