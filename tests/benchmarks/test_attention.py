"""The stress test of attention, with small shapes on the CPU."""

from typing import Any

import pytest
import torch

from benchmarks import attention_stress
from kernels.attention.problem import AttentionProblem
from kernels.registry import ATTENTION, FEATURES


@pytest.mark.parametrize("wrong", [None, "out", "gradient of logsumexp", "logsumexp without keys"])
def test_the_stress_test_finds_wrong_results(wrong, monkeypatch, capsys) -> None:
    def attention(*given: Any, **options: Any) -> Any:
        out, lse = ATTENTION.load("eager").function(*given, **options)
        if wrong == "out":
            out = 1.1 * out
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
    assert (worst > 1) == (wrong is not None)
    assert capsys.readouterr().out.count("wrong: shape 7") == (wrong is not None)


def test_the_stress_test_draws_what_the_implementation_takes() -> None:
    every = attention_stress.draw_shapes(300, seed=1)
    assert frozenset().union(*(shape.problem.features for shape in every)) == FEATURES
    assert all(shape.problem.visible_pairs(shape.queries, shape.keys) >= 0 for shape in every), "documents fill them"
    assert any(0 in (shape.problem.document_lengths or ()) for shape in every)
    few = attention_stress.draw_shapes(300, 1, frozenset({"num_kv_heads"}))
    assert frozenset().union(*(shape.problem.features for shape in few)) == {"num_kv_heads"}
