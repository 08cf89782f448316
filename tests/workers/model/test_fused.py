"""A model with Triton kernels beside the same in plain PyTorch: in Triton's interpreter without a GPU."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from workers.measure.compilation import compilation
from workers.model import TransformerLM
from workers.model.compiled import compile_blocks, compile_model
from workers.model.transformer import FUSED

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = {
    "linear_cross_entropy": {"softmax_gradient_"},
    "rms_norm": {"rms_norm", "rms_norm_backward"},
    "rope": {"rope"},
}
"""The operations of each."""
pytestmark = [
    *([pytest.mark.gpu] if DEVICE == "cuda" else []),
    # torch's compiler does so itself.
    pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning"),
]


def model(**options: Any) -> TransformerLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "context_length": 9, "d_model": 24, "num_layers": 2, "num_heads": 4, "d_ff": 20}
    return TransformerLM(**{**sizes, "num_kv_heads": 2, **options}).to(DEVICE)  # type: ignore[arg-type]


def ids(length: int = 9) -> Tensor:
    return torch.randint(61, (2, length), generator=torch.Generator().manual_seed(1)).to(DEVICE)


def results(of: TransformerLM, call: Callable[..., Tensor] | None = None) -> list[Tensor]:
    """The loss and all gradients."""
    loss = (of if call is None else call)(ids(), targets=ids().flip(-1))
    return [loss.detach(), *torch.autograd.grad(loss, list(of.parameters()))]


class Calls(TorchDispatchMode):
    """The names of our operations that are called, as often as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "flopwatch":
            self.names.append(func.__name__.partition(".")[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("fused", [*((name,) for name in FUSED), FUSED], ids="+".join)
def test_loss_and_gradients_are_those_of_plain_pytorch(fused: tuple[str, ...]) -> None:
    plain, other = model().double(), model(fused=fused).double()
    with Calls() as calls:
        mine = results(other)
    assert set(calls.names) == set().union(*(KERNELS[name] for name in fused))
    for one, right in zip(mine, results(plain), strict=True):
        torch.testing.assert_close(one, right)


@pytest.mark.parametrize("parameter_dtype", [torch.float32, torch.bfloat16])
def test_under_autocast_errors_are_those_of_plain_pytorch(parameter_dtype: torch.dtype) -> None:
    exact = results(model().to(parameter_dtype).double())
    errors = []
    for fused in ((), FUSED):
        with torch.autocast(DEVICE, torch.bfloat16):
            rounded = results(model(fused=fused).to(parameter_dtype))
        pairs = list(zip(rounded, exact, strict=True))
        assert [one.dtype for one, _ in pairs[1:]] == [parameter_dtype] * (len(pairs) - 1)
        errors.append([((one - right).norm() / right.norm()).item() for one, right in pairs])
    for plain, fused_error in zip(*errors, strict=True):
        assert fused_error < 2 * plain + 4e-3


def test_norms_under_autocast_have_the_dtype_of_products() -> None:
    norm = model(fused=("rms_norm",)).ln_final
    x = torch.randn(3, 24, device=DEVICE)
    assert norm(x).dtype == torch.float32
    with torch.autocast(DEVICE, torch.bfloat16):
        assert norm(x).dtype == torch.bfloat16


@pytest.fixture
def fresh_compiler(fresh_compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))


@pytest.mark.parametrize("whole", [False, True])
def test_compiled_results_are_those_of_plain_pytorch(fresh_compiler: None, whole: bool) -> None:
    of = model(fused=FUSED)
    with torch.autocast(DEVICE, torch.bfloat16):
        expected = results(of)
        call = compile_model(of) if whole else compile_blocks(of)
        mine = results(of, call)
    assert compilation().graphs >= 1
    assert (compilation().graph_breaks, compilation().frames_not_compiled) == (0, 0)
    for one, right in zip(mine, expected, strict=True):
        torch.testing.assert_close(one, right, rtol=2e-2, atol=2e-2 * right.abs().max().item())


def test_selective_checkpoints_recompute_what_costs_memory_traffic_only() -> None:
    """Each of two blocks' norms runs twice; what is outside of blocks once."""
    options = {"activation_checkpointing": True, "checkpoint_scope": "selective", "checkpoint_layers": 0}
    of = model(fused=FUSED, **options).double()
    with Calls() as calls:
        mine = results(of)
    for one, right in zip(mine, results(model().double()), strict=True):
        torch.testing.assert_close(one, right)
    counted = {name: calls.names.count(name) for name in ("rms_norm", "softmax_gradient_")}
    assert counted == {"rms_norm": 2 * (2 * 2) + 1, "softmax_gradient_": 1}


def test_unknown_parts_are_refused() -> None:
    with pytest.raises(ValueError, match="fused: unknown gelu; known are linear_cross_entropy, rms_norm, rope"):
        model(fused=("rope", "gelu"))
