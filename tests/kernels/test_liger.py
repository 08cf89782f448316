"""The adapter of Liger-Kernel calls its functions as they are, with a stand-in of the same signatures."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from kernels import liger, operations


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


def test_operations_have_it_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def names(of: Any) -> dict[str, list[str]]:
        kernels = (of.rms_norm, of.swiglu, of.rope, of.linear_cross_entropy)
        return {kernel.name: [one.name for one in kernel.kernels] for kernel in kernels}

    assert "liger" not in str(names(operations)) or operations.HAS_LIGER
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    specification = importlib.machinery.SourceFileLoader("with_liger", operations.__file__)
    installed = ModuleType("with_liger")
    specification.exec_module(installed)
    assert names(installed) == {
        "rms_norm": ["compiled", "triton", "liger"],
        "swiglu": ["compiled", "triton", "liger"],
        "rope": ["compiled", "triton"],
        "linear_cross_entropy": ["chunked", "compiled", "triton", "liger"],
    }
    (backward,) = (one for one in installed.swiglu.kernels if one.name == "liger")
    assert "use mode forward" in str(backward.why_not("cuda", "bfloat16", backward=True))
