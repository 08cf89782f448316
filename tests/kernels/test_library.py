"""Properties of the compiled implementations; test_attention compares each one with the oracle."""

import functools
from typing import Any

import pytest
import torch

from kernels import compiling
from kernels.attention import library
from kernels.attention.reference import attention
from kernels.registry import ATTENTION


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")  # torch's own, importing Inductor
def test_compiled_attention_agrees_with_eager(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU with the compiler's first half only: what torch makes C++ of is its own, and takes seconds."""
    if device == "cpu":
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
        compiling.compiled.cache_clear()
    q, k, v = (torch.randn(1, 2, 9, 16, device=device, requires_grad=True) for _ in range(3))
    out = ATTENTION.load("compiled").function(q, k, v, True)
    given = torch.autograd.grad(out.sum(), (q, k, v))
    compiling.compiled.cache_clear()
    right = attention(q, k, v, True)
    torch.testing.assert_close(out, right)
    torch.testing.assert_close(given, torch.autograd.grad(right.sum(), (q, k, v)), atol=1e-5, rtol=1e-4)


def test_backends_get_a_mask_only_where_there_is_one() -> None:
    q, k = torch.empty(1, 1, 4, 8), torch.empty(1, 1, 9, 8)
    assert library._mask(q, q, True, bottom_right=True) == (True, None)
    assert library._mask(q[:, :, :1], k, True, bottom_right=True) == (False, None)
    ends = torch.tensor([2, 4], dtype=torch.int32)
    is_causal, mask = library._mask(q, q, True, document_ends=ends)
    assert (is_causal, mask.int().tolist()) == (False, [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]])
    assert library._mask(q, q, True, document_ends=ends)[1] is mask, "made once for a batch"
    ends[0] = 4
    assert library._mask(q, q, True, document_ends=ends)[1].sum() == 10, "other documents in the same memory"


def test_what_is_made_of_documents_serves_inference_and_training() -> None:
    q, k, v = (torch.randn(1, 2, 5, 8, requires_grad=True) for _ in range(3))
    function, ends = ATTENTION.load("sdpa_math").function, torch.tensor([2, 5], dtype=torch.int32)
    with torch.inference_mode():
        own = ends.clone()
        for last in (2, 3):  # changed in place, and tensors made here have no version
            own[0] = last
            right = attention(q, k, v, True, document_ends=own)
            torch.testing.assert_close(function(q, k, v, True, document_ends=own), right)
        function(q, k, v, True, document_ends=ends)
    function(q, k, v, True, document_ends=ends).sum().backward()
    assert q.grad is not None, "the mask of the call before may be saved for the backward pass"


@pytest.mark.parametrize(
    ("queries", "heads", "backend"), [(64, 2, None), (65, 2, "TRITON"), (33, 4, "TRITON"), (128, 2, None)]
)
def test_flex_leaves_torchs_decoding_where_that_has_no_kernel(queries, heads, backend, monkeypatch) -> None:
    chosen = []

    def compiled(_function: Any) -> Any:
        return lambda q, *_, kernel_options, **__: chosen.append((kernel_options or {}).get("BACKEND")) or q

    monkeypatch.setattr(compiling, "compiled", compiled)
    q, k = torch.empty(1, heads, queries, 16), torch.empty(1, 1, 200, 16)
    ATTENTION.load("flex").function(q, k, k)
    assert chosen == [backend]


@pytest.mark.long
def test_every_size_is_compiled_and_none_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """More sizes than torch compiles by default. The backend is a stub: what is counted is who asks for kernels."""
    compiled = []

    def count(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
        compiled.append(graph)
        return graph

    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile_(function, backend=count, **options))
    compiling.compiled.cache_clear()
    torch.compiler.reset()
    try:
        most = 2 * torch._dynamo.config.recompile_limit
        for length in range(1, most + 1):
            q = torch.ones(1, length, 4)
            assert torch.equal(ATTENTION.load("compiled").function(q, q, q), attention(q, q, q))
        assert len(compiled) == most
    finally:
        compiling.compiled.cache_clear()
        torch.compiler.reset()
