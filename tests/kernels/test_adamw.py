"""AdamW's update in Triton beside torch's: in Triton's interpreter without a GPU, compiled on one."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import kernels
from kernels import adamw_triton
from kernels.tolerance import TOLERANCES, error, fixed_limits
from tests.kernels.beside import draw

SHAPES = [(37,), (3, 0), (33, 65), (2 * adamw_triton.TILE,), (1000, 3)]
HYPER_PARAMETERS: dict[str, Any] = {"betas": (0.8, 0.999), "eps": 1e-3, "weight_decay": 0.3}
STEPS = {torch.float32: 3, torch.bfloat16: 1, torch.float16: 1}
"""In half precision moments are rounded after each step, and small ones by much."""


def updated_by_torch(parameter: Tensor, gradients: Sequence[Tensor], lr: float, **options: Any) -> tuple[Tensor, ...]:
    """Parameter and moments after updates in the parameter's dtype."""
    leaf = parameter.detach().clone().requires_grad_()
    optimizer = torch.optim.AdamW([leaf], lr=lr, foreach=False, **options)
    for gradient in gradients:
        leaf.grad = gradient.to(leaf.dtype)
        optimizer.step()
    state = optimizer.state[leaf]
    return leaf.detach(), state["exp_avg"], state["exp_avg_sq"]


def updated_by_ours(parameter: Tensor, gradients: Sequence[Tensor], lr: float, **options: Any) -> tuple[Tensor, ...]:
    """The same, in place."""
    tensors = parameter, torch.zeros_like(parameter), torch.zeros_like(parameter)
    rate, step = (torch.tensor(value, device=parameter.device) for value in (lr, 0.0))
    for gradient in gradients:
        kernels.adamw([tensors[0]], [gradient], [tensors[1]], [tensors[2]], [step], rate, **options)
        step += 1
    return tensors


@pytest.mark.parametrize("options", [HYPER_PARAMETERS, {**HYPER_PARAMETERS, "betas": (0.0, 0.0), "weight_decay": 0.0}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_updates(device: str, dtype: torch.dtype, options: dict[str, Any], rng: random.Random) -> None:
    for shape in SHAPES:
        parameter, *gradients = (draw(*shape, rng=rng, dtype=dtype, device=device) for _ in range(1 + STEPS[dtype]))
        exact = updated_by_torch(parameter.double(), gradients, 0.1, **options)
        ours = updated_by_ours(parameter, gradients, 0.1, **options)
        assert ours[0] is parameter
        for mine, right in zip(ours, exact, strict=True):
            assert mine.dtype == dtype
            rows = mine.reshape(1, -1), right.reshape(1, -1)
            why = error(*rows).why_wrong(fixed_limits(TOLERANCES[dtype]))
            assert why is None, f"{shape}: {why}"


def test_several_parameters_each_have_their_step_and_any_strides(device: str, rng: random.Random) -> None:
    base = draw(40, 30, rng=rng, dtype=torch.float32, device=device)
    views = [base[:10], base[10:20, ::2], base[20:, :15].mT, base[20:, 15:]]
    gradients = [draw(*view.mT.shape, rng=rng, dtype=torch.float32, device=device).mT for view in views]
    gradients[3] = torch.ones((), device=device).expand_as(views[3])
    before = base.clone()
    moments = [[torch.zeros_like(view) for view in views] for _ in range(2)]
    steps = [torch.tensor(float(n), device=device) for n in range(4)]
    rate = torch.tensor(0.1, device=device)
    kernels.adamw(views, gradients, *moments, steps, rate, **HYPER_PARAMETERS)
    for index, (view, gradient) in enumerate(zip(views, gradients, strict=True)):
        old = before.as_strided(view.shape, view.stride(), view.storage_offset()).clone().requires_grad_()
        optimizer = torch.optim.AdamW([old], lr=0.1, **HYPER_PARAMETERS)
        optimizer.state[old] = {
            "step": torch.tensor(float(index)),
            "exp_avg": torch.zeros_like(old),
            "exp_avg_sq": torch.zeros_like(old),
        }
        old.grad = gradient.clone()
        optimizer.step()
        torch.testing.assert_close(view, old.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(moments[0][index], optimizer.state[old]["exp_avg"], rtol=1e-5, atol=1e-6)
    assert torch.equal(base[10:20, 1::2], before[10:20, 1::2]), "others are as before"


def test_dtypes_may_differ(device: str, rng: random.Random) -> None:
    parameter = draw(50, rng=rng, dtype=torch.float32, device=device)
    gradient = draw(50, rng=rng, dtype=torch.bfloat16, device=device)
    expected = updated_by_torch(parameter, [gradient], 0.1, **HYPER_PARAMETERS)
    moments = torch.zeros_like(parameter), torch.zeros_like(parameter)
    rate, step = (
        torch.tensor(0.1, dtype=torch.float64, device=device),
        torch.zeros((), dtype=torch.int64, device=device),
    )
    kernels.adamw([parameter], [gradient], *([moment] for moment in moments), [step], rate, **HYPER_PARAMETERS)
    torch.testing.assert_close((parameter, *moments), expected)


def test_a_gradient_that_torch_has_negated_by_a_mark(device: str) -> None:
    moments = []
    for gradient in (torch.ones(3, device=device), torch._neg_view(-torch.ones(3, device=device))):
        parameter, first, second = (torch.zeros(3, device=device) for _ in range(3))
        rate, step = (torch.tensor(1.0, device=device) for _ in range(2))
        kernels.adamw([parameter], [gradient], [first], [second], [step], rate, **HYPER_PARAMETERS)
        moments.append(first)
    assert torch.equal(*moments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_copies_are_the_new_parameters_rounded(device: str, dtype: torch.dtype, rng: random.Random) -> None:
    parameters, gradients, first, second, alone = ([] for _ in range(5))
    copies = [draw(*shape, rng=rng, dtype=dtype, device=device) for shape in SHAPES]
    copies[2] = copies[2].repeat(1, 2)[:, ::2]
    for shape in SHAPES:
        parameters.append(draw(*shape, rng=rng, dtype=torch.float32, device=device))
        gradients.append(draw(*shape, rng=rng, dtype=torch.bfloat16, device=device))
        first.append(torch.zeros_like(parameters[-1]))
        second.append(torch.zeros_like(parameters[-1]))
        alone.append(updated_by_ours(parameters[-1].clone(), gradients[-1:], 0.1, **HYPER_PARAMETERS))
    steps, rate = [torch.zeros((), device=device)] * len(SHAPES), torch.tensor(0.1, device=device)
    kernels.adamw(parameters, gradients, first, second, steps, rate, copies=copies, **HYPER_PARAMETERS)
    for mine, copy, expected in zip(zip(parameters, first, second, strict=True), copies, alone, strict=True):
        assert all(map(torch.equal, mine, expected)), "with a copy or without, they are the same"
        assert torch.equal(copy, mine[0].to(dtype))


@pytest.mark.parametrize("written", ["parameter", "copy"])
def test_autograd_notices_the_update(device: str, written: str) -> None:
    weight, one = torch.ones(4, device=device, requires_grad=True), torch.ones(4, device=device)
    out = (weight * weight).sum()
    if written == "parameter":
        updated_by_ours(weight, [one], 0.1, **HYPER_PARAMETERS)
    else:
        updated_by_ours(one, [one.clone()], 0.1, copies=[weight], **HYPER_PARAMETERS)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_inputs_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"float32, bfloat16 or float16, not torch\.float64"):
        updated_by_ours(torch.ones(3, dtype=torch.float64), [torch.ones(3)], 0.1, **HYPER_PARAMETERS)
    one, elsewhere = torch.ones(3), torch.ones((), device="meta")
    with pytest.raises(ValueError, match="on one device, not on cpu, meta"):
        kernels.adamw([one], [one], [one], [one], [one], elsewhere, **HYPER_PARAMETERS)
    with pytest.raises(ValueError, match=r"of one shape and a step, not \[\(3,\), \(3,\), \(3,\), \(4,\)\]"):
        updated_by_ours(one, [torch.ones(4)], 0.1, **HYPER_PARAMETERS)
    with pytest.raises(ValueError, match=r"of one shape and a step, not \[\(3,\), \(3,\), \(3,\), \(3,\), \(2,\)\]"):
        updated_by_ours(one, [one], 0.1, copies=[torch.ones(2)], **HYPER_PARAMETERS)
    with pytest.raises(ValueError, match=r"float32, bfloat16 or float16, not .*torch\.float64"):
        updated_by_ours(one, [one], 0.1, copies=[one.double()], **HYPER_PARAMETERS)
    with pytest.raises(ValueError, match=r"expected lr as a tensor without axes, not \(2,\)"):
        kernels.adamw([one], [one], [one], [one], [one], torch.ones(2), **HYPER_PARAMETERS)
    with pytest.raises(ValueError, match=r"from 0 to below 1, not \(0\.9, 1\.0\)"):
        updated_by_ours(one, [one], 0.1, **{**HYPER_PARAMETERS, "betas": (0.9, 1.0)})
    with pytest.raises(ValueError, match="expected two decay rates"):
        updated_by_ours(one, [one], 0.1, **{**HYPER_PARAMETERS, "betas": (0.9, 0.9, 0.9)})
    for changed in ({"eps": -1e-8}, {"eps": float("nan")}, {"weight_decay": -0.1}):
        with pytest.raises(ValueError, match=r"expected eps and weight_decay from 0 on, not .*(-|nan)"):
            updated_by_ours(one, [one], 0.1, **{**HYPER_PARAMETERS, **changed})
    others = [[torch.ones(3) for _ in range(2)] for _ in range(4)]
    steps = [torch.zeros(()), torch.zeros(())]
    parameter = others[0][0]
    for twice in ([parameter, parameter], [parameter, parameter.view(-1)]):
        with pytest.raises(ValueError, match="twice among parameters, moments and copies"):
            kernels.adamw(twice, *others[1:], steps, torch.ones(()), **HYPER_PARAMETERS)
    for lists, lr in ((others, 0.1), ([*others[:1], [None, None], *others[2:]], torch.ones(()))):
        with pytest.raises(TypeError, match="must be tensors"):
            kernels.adamw(*lists, steps, lr, **HYPER_PARAMETERS)
    with pytest.raises(ValueError, match="shorter"):
        updated_by_ours(one, [one], 0.1, copies=[], **HYPER_PARAMETERS)
    monkeypatch.setattr(adamw_triton.triton.knobs.runtime, "interpret", False)
    with pytest.raises(ValueError, match=r"on a CUDA device, not on cpu: without a GPU call torch\.optim\.AdamW"):
        updated_by_ours(one, [one], 0.1, **HYPER_PARAMETERS)
