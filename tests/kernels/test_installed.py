import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.attention import installed
from kernels.attention.library import NO_KERNEL
from kernels.attention.problem import AttentionProblem
from kernels.attention.reference import attention
from kernels.registry import ATTENTION

PROBLEMS = (
    (9, 9, AttentionProblem(4, 4, is_causal=True)),
    (9, 9, AttentionProblem(4, 2, window=3, softcap=2.0)),
    (5, 9, AttentionProblem(4, 1, is_causal=True, window=4, bottom_right=True, scale=0.3)),
    (9, 9, AttentionProblem(4, 2, is_causal=True, document_lengths=(4, 0, 5))),
    (9, 9, AttentionProblem(4, 4, window=2, document_lengths=(9,))),
)


def library(unlimited: Any) -> ModuleType:
    """A module with the library's two functions, written from its README: rows before heads, masks to the right."""

    def flash_attn_func(
        q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float | None, causal: bool,
        window_size: tuple[Any, Any], softcap: float,
    ) -> Any:  # fmt: skip
        assert isinstance(softcap, float), "None breaks the backward pass of version 4"
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        places = torch.arange(q.shape[2])[:, None] + (k.shape[2] - q.shape[2])
        keys = torch.arange(k.shape[2])
        hidden = (keys > places) if causal else torch.zeros(q.shape[2], k.shape[2], dtype=torch.bool)
        left, right = window_size
        hidden = hidden if left == unlimited else hidden | (keys < places - left)
        hidden = hidden if right == unlimited else hidden | (keys > places + right)
        k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
        scores = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(hidden, -torch.inf)
        out = (torch.softmax(scores, -1) @ v).transpose(1, 2)
        return (out, torch.logsumexp(scores, -1)) if unlimited is None else out

    def flash_attn_varlen_func(
        q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, **options: Any,
    ) -> Any:  # fmt: skip
        lengths = cu_seqlens_q.diff().tolist()
        assert cu_seqlens_q.dtype == torch.int32
        assert torch.equal(cu_seqlens_q, cu_seqlens_k)
        assert max_seqlen_q == max_seqlen_k == max(lengths)
        assert sum(lengths) == q.shape[0]
        assert min(lengths) > 0
        documents = zip(*(torch.split(tensor, lengths) for tensor in (q, k, v)), strict=True)
        parts = [flash_attn_func(*(part.unsqueeze(0) for part in parts), **options) for parts in documents]
        return torch.cat([(part[0] if isinstance(part, tuple) else part).squeeze(0) for part in parts])

    module = ModuleType("library")
    vars(module).update(flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func)
    return module


@pytest.mark.parametrize(
    ("name", "module", "unlimited"),
    [
        ("flash_attn", "flash_attn.flash_attn_interface", -1),
        ("flash_attn_3", "flash_attn_interface", -1),
        ("flash_attn_4", "flash_attn.cute", None),
    ],
)
@pytest.mark.parametrize("number", range(len(PROBLEMS)))
def test_a_problem_is_put_to_the_library_in_its_words(name, module, unlimited, number, rng, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, module, library(unlimited))
    queries, keys, problem = PROBLEMS[number]
    generator = torch.Generator().manual_seed(rng.randrange(2**32))
    heads = problem.num_heads, problem.num_kv_heads or problem.num_heads, problem.num_kv_heads or problem.num_heads
    q, k, v = (
        torch.randn(2, count, rows, 8, generator=generator, dtype=torch.float64)
        for count, rows in zip(heads, (queries, keys, keys), strict=True)
    )
    options = problem.options("cpu")
    given = ATTENTION.load(name).function(q, k, v, problem.is_causal, **options)
    torch.testing.assert_close(given, attention(q, k, v, problem.is_causal, **options))


def test_a_problem_that_the_library_lacks_and_a_missing_library_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    function = ATTENTION.load("flash_attn_4").function
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    short, long = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 5, 8)
    with pytest.raises(RuntimeError, match=f"{NO_KERNEL}.*pip install flash-attn-4"):
        function(long, long, long)
    with pytest.raises(RuntimeError, match=f"{NO_KERNEL}.*last query and the last key"):
        function(short, long, long, True)
    for head_dim in (20, 264):
        wide = torch.randn(1, 2, 5, head_dim)
        with pytest.raises(RuntimeError, match=f"{NO_KERNEL}.*multiples of 8, up to 256"):
            function(wide, wide, wide)


def test_version_4_alone_is_not_taken_for_version_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", library(None))
    monkeypatch.delitem(sys.modules, "flash_attn.flash_attn_interface", raising=False)
    inputs = [torch.randn(1, 2, 5, 8) for _ in range(3)]
    assert ATTENTION.load("flash_attn_4").function(*inputs).shape == inputs[0].shape
    with pytest.raises(RuntimeError, match=f"{NO_KERNEL}.*pip install flash-attn$"):
        ATTENTION.load("flash_attn").function(*inputs)


def test_documents_end_with_the_sequence() -> None:
    starts, longest = installed._starts(torch.tensor([0, 3, 9], dtype=torch.int32), 0, 2, 5)
    assert starts.tolist() == [0, 3, 5, 8, 10], "the library would read what lies behind"
    assert longest == 3
