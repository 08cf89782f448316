"""The library's implementations of attention against the oracle."""

from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from kernels import compiling
from kernels.attention import tiled
from kernels.attention.installed import FlashAttention
from kernels.attention.library import NO_KERNEL
from kernels.attention.oracle import oracle
from kernels.attention.problem import AttentionProblem
from kernels.attention.reference import attention
from kernels.registry import ATTENTION
from kernels.tolerance import error


def is_here(name: str) -> bool:
    """Tell whether the implementation's library, if it has one of its own, is installed."""
    library = ATTENTION.load(name).function
    try:
        return not isinstance(library, FlashAttention) or find_spec(library.module) is not None
    except ModuleNotFoundError:  # of the package that would have the module
        return False


CASES = [
    pytest.param(name, device, marks=pytest.mark.gpu if device == "cuda" else ())
    for name in ATTENTION.names()
    for device in sorted(ATTENTION.load(name).devices)
    if (name, device) != ("compiled", "cpu")  # takes a minute; test_library compiles it once
    if is_here(name)
]


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float64, device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype) for _ in range(3)]


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")  # torch's own, importing Inductor
@pytest.mark.parametrize(("name", "device"), CASES)
def test_implementations_agree_with_the_oracle(name, device, is_causal, rng, assert_close) -> None:
    implementation = ATTENTION.load(name)
    seed = rng.randrange(2**32)
    head_dim = HEAD_DIMS.get(name, 32)
    for dtype_name in sorted(implementation.dtypes[device]):
        inputs = draw(2, 3, 65, head_dim, seed=seed, dtype=getattr(torch, dtype_name), device=device)
        gradient = draw(2, 3, 65, head_dim, seed=seed + 1, dtype=inputs[0].dtype, device=device)[0]
        exact = [tensor.double().requires_grad_() for tensor in inputs]
        oracle = attention(*exact, is_causal)
        oracle.backward(gradient.double())
        inputs = [tensor.requires_grad_() for tensor in inputs]
        out = implementation.function(*inputs, is_causal)
        assert_close(out.detach(), oracle.detach())
        if not implementation.has_backward:
            continue
        out.backward(gradient)
        for given, reference in zip(inputs, exact, strict=True):
            assert_close(given.grad, reference.grad)


PROBLEMS = (
    (65, 65, AttentionProblem(4, 2, is_causal=True, window=9, document_lengths=(0, 20, 1, 44))),
    (40, 65, AttentionProblem(4, 1, is_causal=True, bottom_right=True, scale=0.3)),
    (65, 40, AttentionProblem(4, 4, window=9, softcap=3.0, return_lse=True)),
)
"""Queries, keys and what to compute; in the last, some queries see no key."""
TAKEN = {"eager": 3, "compiled": 3, "flex": 3, "tiled": 2, "triton": 3, "hopper": 2}
"""How many of them each implementation takes, or more; libraries' take two."""
HEAD_DIMS = {"hopper": 64}
"""It takes none below 40."""


@pytest.mark.filterwarnings("ignore")  # of FlexAttention without a compiler, and of why backends refuse
@pytest.mark.parametrize(("name", "device"), [*CASES, ("flex", "cpu")])
def test_implementations_compute_the_problems_that_they_take(name, device, rng, monkeypatch) -> None:
    implementation, has_backward = ATTENTION.load(name), device == "cuda" or name != "flex"  # which has none on a CPU
    if device == "cpu":
        monkeypatch.setattr(compiling, "compiled", lambda function: function)
        monkeypatch.setattr(tiled, "TILE", 16)
    taken = 0
    for queries, keys, problem in PROBLEMS:
        if problem.features - implementation.features:
            continue
        taken += 1
        width, seed = HEAD_DIMS.get(name, 32), rng.randrange(2**32)
        q, grad_out, _ = draw(2, 4, queries, width, seed=seed, dtype=torch.bfloat16, device=device)
        k, v, _ = draw(2, problem.num_kv_heads, keys, width, seed=seed + 1, dtype=q.dtype, device=device)
        right = oracle(q, k, v, grad_out, problem)
        inputs = [tensor.requires_grad_(has_backward) for tensor in (q, k, v)]
        try:
            out = implementation.function(*inputs, problem.is_causal, **problem.options(device))
        except RuntimeError as refusal:
            assert NO_KERNEL in str(refusal)  # noqa: PT017 - a backend may refuse, but not compute something else
            continue
        if problem.return_lse:
            out, logsumexp = out
            torch.testing.assert_close(logsumexp.detach().double(), right.logsumexp, atol=1e-2, rtol=1e-2)
        results = [out.detach(), *(torch.autograd.grad(out, inputs, grad_out) if has_backward else ())]
        rights = right.out, *right.gradients
        for given, expected, limit in zip(results, rights, right.limits, strict=False):
            assert (why := error(given, expected).why_wrong(limit)) is None, f"{problem}: {why}"
    assert taken >= TAKEN.get(name, 2 if name.startswith(("sdpa", "flash_attn")) else 0)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # torch warns of each reason before it raises
def test_a_backend_refuses_what_it_cannot_take() -> None:
    inputs = draw(1, 2, 64, 32, seed=6, dtype=torch.float32, device="cuda")
    with pytest.raises(RuntimeError, match=NO_KERNEL):
        ATTENTION.load("sdpa_flash").function(*inputs, True)


def test_the_reference_compiles_to_one_graph() -> None:
    q, k, v = draw(1, 2, 8, 4, seed=8)
    compiled = torch.compile(attention, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v, True), attention(q, k, v, True))
    options = AttentionProblem(window=3, softcap=2.0, document_lengths=(3, 0, 5), return_lse=True).options("cpu")
    torch.testing.assert_close(compiled(q, k, v, **options), attention(q, k, v, **options))
