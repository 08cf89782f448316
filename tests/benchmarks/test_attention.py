"""The scripts that time and compare attention on a GPU, with small shapes on the CPU and clocks that stand still."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import attention_decoding, attention_host, attention_stress
from kernels.attention.problem import AttentionProblem
from kernels.device_clock import Lap
from kernels.registry import ATTENTION, FEATURES

PLAIN = {"triton": None, attention_host.REFERENCE: SDPBackend.MATH}


def plain(q: Any, k: Any, v: Any, is_causal: bool = False) -> Any:
    return scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)


@pytest.mark.parametrize("wrong", [None, "out", "logsumexp", "gradient of logsumexp", "logsumexp without keys"])
def test_the_stress_test_finds_wrong_results(
    wrong: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def attention(*given: Any, **options: Any) -> Any:
        out, lse = ATTENTION.load("eager").function(*given, **options)
        if wrong == "out":
            out = 1.1 * out
        elif wrong == "logsumexp":
            lse = lse + (0.1 * lse).detach()
        elif wrong == "gradient of logsumexp":
            lse = 1.2 * lse - (0.2 * lse).detach()
        elif wrong is not None:
            lse = lse.masked_fill(lse.isinf(), 0.0)
        return out, lse

    monkeypatch.setattr(attention_stress, "DEVICE", "cpu")
    monkeypatch.setattr(attention_stress, "flash_attention", attention)
    problem = AttentionProblem(4, 2, window=7, return_lse=True)  # the last queries see no key
    shape = attention_stress.Shape(1, 33, 20, 40, problem, torch.bfloat16, True)
    wrong_shapes, worst = attention_stress.work({7: shape}, seed=1, name="triton")
    assert wrong_shapes == (wrong is not None)
    assert (max(one.share for one in worst) > 1) == (wrong is not None)
    attention_stress.print_table(worst)
    printed = capsys.readouterr().out
    assert printed.count("wrong: shape 7") == (wrong is not None)
    assert "\nelement " in printed


def test_the_stress_test_takes_functions_without_log_sum_exp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_stress, "DEVICE", "cpu")
    problem = AttentionProblem(4, 2, is_causal=True, document_lengths=(9, 0, 24), window=7)
    shape = attention_stress.Shape(1, 33, 33, 40, problem, torch.bfloat16, True)
    assert attention_stress.compare(shape, 1, "sdpa_math").reason is None


def test_the_stress_test_draws_what_the_implementation_takes() -> None:
    every = attention_stress.draw_shapes(300, seed=1)
    assert frozenset().union(*(shape.problem.features for shape in every)) == FEATURES
    assert all(shape.problem.visible_pairs(shape.queries, shape.keys) >= 0 for shape in every), "documents fill them"
    assert any(0 in (shape.problem.document_lengths or ()) for shape in every)
    few = attention_stress.draw_shapes(300, 1, frozenset({"num_kv_heads"}))
    assert frozenset().union(*(shape.problem.features for shape in few)) == {"num_kv_heads"}


def test_decoding_shows_each_backend_that_takes_the_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        def forget(self) -> None: ...

        def lap(self, work: Callable[[], None]) -> Lap:
            work()
            return Lap(device_ms=0.01, host_us=5.0, hidden=True)

    monkeypatch.setattr(attention_decoding, "flash_attention", plain)
    monkeypatch.setattr(attention_decoding, "TORCH", {"math": SDPBackend.MATH, "cudnn": SDPBackend.CUDNN_ATTENTION})
    q, k, v = (torch.randn(1, heads, rows, 16) for heads, rows in ((4, 1), (2, 64), (2, 64)))
    row = attention_decoding.row(Clock(), q, k, v, samples=2)  # type: ignore[arg-type]
    assert row == ["1, 4, 2, 64, 16", "10.0", "10.0", "–", "1.00", "0.00", "5"]


def test_host_times_are_relative_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"DEVICE": "cpu", "BACKENDS": PLAIN, "flash_attention": plain, "LOOP": 2, "ISSUED": 2}.items():
        monkeypatch.setattr(attention_host, name, value)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    ours, reference = attention_host.rows((1, 2, 32, 16), 3, compiled=False)
    assert (ours[:2], reference[:2]) == (["1x2x32x16", "triton"], ["1x2x32x16", attention_host.REFERENCE])
    assert all(float(cell.split()[0]) > 0 for cell in ours[2:])
    assert all(cell.endswith("(1.00)") for cell in reference[2:])
