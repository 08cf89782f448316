"""The adapter of Liger-Kernel calls its functions as they are, with a stand-in of the same signatures."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from kernels import liger
from kernels.attention.library import NO_KERNEL
from kernels.registry import KERNELS


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the stand-in was called with."""
    calls: list[tuple[Any, ...]] = []
    functional = ModuleType("liger_kernel.transformers.functional")

    def liger_rms_norm(x, weight, eps, offset=0.0, casting_mode="llama", in_place=True):
        calls.append(("rms_norm", eps, in_place))
        return x * weight

    def liger_swiglu(a, b):
        calls.append(("swiglu",))
        return a * b

    def liger_fused_linear_cross_entropy(
        hidden, weight, target, bias=None, ce_weight=None, ignore_index=-100, accum_dtype=None
    ):
        calls.append(("linear_cross_entropy", target.tolist(), accum_dtype))
        return (hidden @ weight.T).sum()

    for function in (liger_rms_norm, liger_swiglu, liger_fused_linear_cross_entropy):
        setattr(functional, function.__name__, function)
    packages = ModuleType("liger_kernel"), ModuleType("liger_kernel.transformers")
    packages[1].functional = functional  # type: ignore[attr-defined]
    for module in (*packages, functional):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return calls


def test_its_functions_are_called_so_that_they_keep_their_inputs(calls: list[tuple[Any, ...]]) -> None:
    x, weight = torch.ones(2, 3), torch.full((3,), 2.0)
    assert torch.equal(liger.rms_norm(x, weight, 1e-5), 2 * x)
    assert torch.equal(liger.swiglu(x, 3 * x), 3 * x)
    assert liger.linear_cross_entropy(x, 2 * torch.ones(4, 3), torch.tensor([0, 3])) == 48
    assert calls == [("rms_norm", 1e-5, False), ("swiglu",), ("linear_cross_entropy", [0, 3], torch.float32)]


def test_operations_have_it_and_say_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    x = torch.ones(2, 3)
    of = {"rms_norm": (x, x[0]), "swiglu": (x, x), "linear_cross_entropy": (x, x, x[0, :1])}
    for name, inputs in of.items():
        with pytest.raises(RuntimeError, match=rf"{NO_KERNEL}: .*: pip install liger-kernel"):
            KERNELS.load(name).implementation("liger").function(*inputs)
    reason = KERNELS.load("swiglu").implementation("liger").why_not("cuda", "bfloat16", backward=True)
    assert "use mode forward" in str(reason)
    assert "liger" not in {one.name for one in KERNELS.load("rope").kernels}
