"""The formulas against the model itself, counted by torch."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from workers.model import TransformerLM, accounting
from workers.model.accounting import peak_tflops
from workers.model.batches import RandomBatches
from workers.model.precision import PRECISIONS
from workers.model.steps import GenerateStep

SHAPES = [
    accounting.Shape(vocab_size=50, d_model=16, num_layers=3, num_heads=2, d_ff=40),
    accounting.Shape(vocab_size=97, d_model=48, num_layers=1, num_heads=4, d_ff=32),
]


def build(shape: accounting.Shape, context_length: int, **options) -> TransformerLM:
    return TransformerLM(
        shape.vocab_size, context_length, shape.d_model, shape.num_layers, shape.num_heads, shape.d_ff, **options
    )


def masked_half(shape: accounting.Shape, batch: int, context: int) -> int:
    """What eager attention computes and the formulas leave out: half of scores and values, forward."""
    return 2 * batch * context**2 * shape.d_model * shape.num_layers


@pytest.mark.parametrize("shape", SHAPES)
def test_parameters(shape: accounting.Shape) -> None:
    assert accounting.parameters(shape) == sum(parameter.numel() for parameter in build(shape, 8).parameters())


@pytest.mark.parametrize("activation_checkpointing", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_forward_and_training_flops(shape: accounting.Shape, activation_checkpointing: bool) -> None:
    model = build(shape, 12, activation_checkpointing=activation_checkpointing)
    with FlopCounterMode(display=False) as forward:
        loss = model(torch.zeros(3, 12, dtype=torch.long)).sum()
    assert model.forward_flops(3, 12) == forward.get_total_flops() - masked_half(shape, 3, 12)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    computed = forward.get_total_flops() + backward.get_total_flops() - 3 * masked_half(shape, 3, 12)
    counted = accounting.training_flops(model.forward_flops(3, 12))
    if activation_checkpointing:
        assert computed > counted, "recomputation is work done, and does not count"
    else:
        assert computed == counted


@pytest.mark.parametrize("shape", SHAPES)
def test_generate_flops(shape: accounting.Shape) -> None:
    model = build(shape, 20)
    step = GenerateStep(model, model, RandomBatches(10, 2, 9, torch.device("cpu"), 0), PRECISIONS["fp32"], new_tokens=5)
    step.prepare()
    with FlopCounterMode(display=False) as counter:
        step.prefill()
        step.decode()
    assert model.generate_flops(2, 9, 5) == counter.get_total_flops() - masked_half(shape, 2, 9)


def test_causal_attention_counts_half() -> None:
    shape = SHAPES[0]
    one, two = (accounting.forward_flops(shape, 1, length) for length in (1000, 2000))
    quadratic = two - 2 * one  # a·L² + b·L
    assert quadratic == 2 * (4 * 1000**2 * shape.d_model * shape.num_layers // 2)


def test_peaks_are_known_by_the_whole_name() -> None:
    assert peak_tflops("NVIDIA H200", "bf16") == (989.5, "NVIDIA H200 datasheet, SXM")
    assert peak_tflops("NVIDIA H200 NVL", "bf16")[0] == 835.5
    assert peak_tflops("NVIDIA A100-SXM4-80GB", "tf32")[0] == 156
    assert peak_tflops("NVIDIA GeForce RTX 4090", "fp32")[0] == 82.6
    for other in ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "NVIDIA A10G", "NVIDIA GeForce RTX 4090 Laptop GPU", "AMD EPYC"):
        assert peak_tflops(other, "bf16") == (None, f"no vendor peak is on record for {other}")
    assert peak_tflops("Tesla T4", "bf16") == (None, "Tesla T4 has no bf16 matrix unit")


@pytest.mark.parametrize("peak", accounting.PEAKS.values(), ids=lambda peak: peak.source)
def test_peaks_are_dense(peak: accounting.Peak) -> None:
    """Tensor rates double from tf32 to 16 bits; a rate with sparsity beside one without would show."""
    if peak.tf32 is not None and peak.bf16 is not None:
        assert peak.bf16 / peak.tf32 == pytest.approx(2, rel=0.03)
        assert peak.fp16 == peak.bf16


def test_accounting_needs_no_torch() -> None:
    code = "import sys, workers.model.accounting; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_alone_counts_as_attention_in_the_model(causal: bool) -> None:
    shape = accounting.Shape(vocab_size=1, d_model=64, num_layers=1, num_heads=4, d_ff=1)
    longer, shorter = (accounting.forward_flops(shape, 3, length, logit_positions=0) for length in (64, 32))
    in_model = longer - 2 * shorter  # what grows with the square of the length: of 64² - 2 · 32² = 64² / 2 pairs
    alone = accounting.attention_flops((3, 4, 64, 16), causal=causal)
    assert alone == in_model * 2 * (1 if causal else 2)
    assert accounting.attention_backward_flops(alone) == 2 * alone


@pytest.mark.parametrize("backward", [False, True])
def test_the_parts_of_attention_by_hand(backward: bool) -> None:
    """Two sequences, 3 heads, 4 queries, 5 keys, head dimension 8, in bfloat16."""
    shape = (2, 3, 4, 5, 8)
    pairs, q, k = 2 * 3 * 4 * 5, 2 * 3 * 4 * 8, 2 * 3 * 5 * 8
    cost = {part: accounting.attention_part(part, shape, 2, backward=backward) for part in accounting.ATTENTION_PARTS}
    product = 2 * pairs * 8 * (2 if backward else 1)
    assert cost["scores"].flops == cost["values"].flops == product
    if backward:
        assert cost["softmax"] == accounting.Cost(4 * pairs, 2 * 3 * pairs)
        assert cost["scores"].bytes == 2 * (pairs + 2 * q + 2 * k)
        assert cost["values"].bytes == 2 * (2 * pairs + q + 2 * k)
    else:
        assert cost["softmax"] == accounting.Cost(5 * pairs, 2 * 2 * pairs)
        assert cost["scores"].bytes == cost["values"].bytes == 2 * (q + k + pairs)


def test_the_products_of_the_parts_are_twice_the_useful_ones_of_causal_attention() -> None:
    shape = (2, 3, 16, 8)
    parts = [accounting.attention_part(part, (2, 3, 16, 16, 8), 4).flops for part in ("scores", "values")]
    assert sum(parts) == 2 * accounting.attention_flops(shape, causal=True)
    back = [accounting.attention_part(part, (2, 3, 16, 16, 8), 4, backward=True).flops for part in ("scores", "values")]
    assert sum(back) == accounting.attention_backward_flops(sum(parts))


def test_the_products_of_the_parts_are_those_that_torch_counts() -> None:
    from kernels.attention.reference import attention

    q = torch.randn(2, 3, 16, 8)
    with FlopCounterMode(display=False) as counter:
        attention(q, q, q, True)
    parts = [accounting.attention_part(part, (2, 3, 16, 16, 8), 4).flops for part in ("scores", "values")]
    assert counter.get_total_flops() == sum(parts)


def test_costs_add_up() -> None:
    assert accounting.Cost(1, 2) + accounting.Cost(10, 20) == accounting.Cost(11, 22)
    assert accounting.Cost(1, 2) * 3 == accounting.Cost(3, 6)
