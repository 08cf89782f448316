"""Counts parameters and floating-point operations of TransformerLM, and lists vendors' peak rates. Needs no torch.

A multiply-add counts as two operations. Only matrix products count: norms, softmax, embeddings look-ups and the
optimizer are left out, as in PaLM's model FLOPs (Chowdhery et al., 2022, appendix B). The causal half of the attention
scores counts, not the masked half, whatever the implementation computes; recomputation by activation checkpointing does
not count. So `mfu` compares implementations by useful work. Only `attention_part` counts what is really computed, as it
is put beside the time that this takes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """The hyper-parameters that determine the size of a TransformerLM."""

    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    d_ff: int

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.num_heads


def parameters(shape: Shape) -> int:
    """Number of parameters: two embeddings; per block four projections, SwiGLU's three, two norms; one final norm."""
    return (
        2 * shape.vocab_size * shape.d_model
        + shape.num_layers * (_block_weights(shape) + 2 * shape.d_model)
        + (shape.d_model)
    )


def forward_flops(shape: Shape, batch_size: int, context_length: int, logit_positions: int | None = None) -> int:
    """FLOPs of a forward pass over `batch_size` sequences of `context_length` tokens.

    Args:
        logit_positions: Positions per sequence that logits are computed for; all of them by default.
    """
    if logit_positions is None:
        logit_positions = context_length
    weights = context_length * shape.num_layers * _block_weights(shape)
    head = logit_positions * shape.vocab_size * shape.d_model
    # Scores and values: each context² · d_model multiply-adds, half of them causal.
    attention = shape.num_layers * context_length**2 * shape.d_model
    return 2 * batch_size * (weights + head + attention)


def training_flops(forward: int) -> int:
    """FLOPs of forward and backward: every product has two in the backward pass, for its input and its weight."""
    return 3 * forward


def generate_flops(shape: Shape, batch_size: int, prompt_length: int, new_tokens: int) -> int:
    """FLOPs of `generate` with a cache: prefill (logits of the last position only), then one token at a time.

    The prefill yields the first new token; the last one is never fed back.
    """
    total = forward_flops(shape, batch_size, prompt_length, logit_positions=1)
    per_token = shape.num_layers * _block_weights(shape) + shape.vocab_size * shape.d_model
    steps = new_tokens - 1
    # The i-th decoding step sees prompt_length + i keys.
    keys_seen = steps * prompt_length + steps * (steps + 1) // 2
    return total + 2 * batch_size * (steps * per_token + 2 * keys_seen * shape.d_model * shape.num_layers)


def _block_weights(shape: Shape) -> int:
    return 4 * shape.d_model**2 + 3 * shape.d_model * shape.d_ff


def attention_flops(shape: tuple[int, int, int, int], *, causal: bool) -> int:
    """FLOPs of the forward pass of attention alone: of the scores and of the values; half of them if causal.

    Args:
        shape: (batch, heads, sequence, head_dim) of queries, keys and values.
    """
    batch, heads, length, head_dim = shape
    return 4 * batch * heads * length**2 * head_dim // (2 if causal else 1)


def attention_backward_flops(forward: int) -> int:
    """FLOPs of the backward pass of attention alone: four products, without the fifth that recomputes the scores."""
    return 2 * forward


ATTENTION_PARTS = ("scores", "softmax", "values")
"""The parts of attention that is written out."""
SOFTMAX_FLOPS = 5
"""Per score: compare with the greatest so far, subtract it, exponentiate, add up, divide."""
SOFTMAX_BACKWARD_FLOPS = 4
"""Per score, dS = P∘(dP − rowsum(P∘dP)): multiply, add up, subtract, multiply."""


@dataclass(frozen=True)
class Cost:
    """What a part of the work computes, and the least that it has to read and write."""

    flops: int
    bytes: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes)

    def __mul__(self, times: int) -> Cost:
        return Cost(self.flops * times, self.bytes * times)


def attention_part(
    part: str, shape: tuple[int, int, int, int, int], element_bytes: int, *, backward: bool = False
) -> Cost:
    """Cost of one part of written-out attention, of one layer: S = Q Kᵀ/√d, P = softmax(S), O = P V.

    The whole square of scores counts, also if it is causal: attention that is written out computes the masked half,
    too. (`attention_flops` counts useful work, so half of it.) The products' backward passes are two products each. The
    bytes are those of inputs and outputs, each read or written once; scaling and masking the scores in passes of their
    own moves more.

    Args:
        part: One of ATTENTION_PARTS.
        shape: (batch, heads, queries, keys, head_dim).
        element_bytes: Bytes of one number, in the precision of the products.
        backward: Of the backward pass instead of the forward pass.
    """
    batch, heads, queries, keys, head_dim = shape
    scores = batch * heads * queries * keys
    q = o = batch * heads * queries * head_dim
    k = v = batch * heads * keys * head_dim
    product = 2 * scores * head_dim
    forward = {
        "scores": (product, q + k + scores),
        "softmax": (SOFTMAX_FLOPS * scores, 2 * scores),
        "values": (product, scores + v + o),
    }
    back = {
        # Reads dS, Q and K, and writes dQ and dK.
        "scores": (2 * product, scores + 2 * q + 2 * k),
        # Reads P and dP, and writes dS.
        "softmax": (SOFTMAX_BACKWARD_FLOPS * scores, 3 * scores),
        # Reads dO, P and V, and writes dP and dV.
        "values": (2 * product, 2 * scores + 2 * v + o),
    }
    flops, numbers = (back if backward else forward)[part]
    return Cost(flops, element_bytes * numbers)


@dataclass(frozen=True)
class Peak:
    """A device's peak rates, dense (without structured sparsity), in TFLOP/s; None: no such unit."""

    source: str
    fp32: float
    tf32: float | None
    bf16: float | None
    fp16: float | None


# By regular expressions that match a device's whole name (a slice of a GPU, a laptop's or a "Ti" is another device).
# Vendors print tensor rates with sparsity: halved here. 16-bit rates are with float32 accumulation, which torch uses.
PEAKS = {
    "NVIDIA B200": Peak("NVIDIA Blackwell datasheet, HGX B200", 75, 1100, 2250, 2250),
    "NVIDIA H200": Peak("NVIDIA H200 datasheet, SXM", 67, 494.5, 989.5, 989.5),
    "NVIDIA H200 NVL": Peak("NVIDIA H200 datasheet, NVL", 60, 417.5, 835.5, 835.5),
    "NVIDIA H100 80GB HBM3": Peak("NVIDIA H100 datasheet, SXM", 67, 494.5, 989.5, 989.5),
    "NVIDIA H100 NVL": Peak("NVIDIA H100 datasheet, NVL", 60, 417.5, 835.5, 835.5),
    "NVIDIA H100 PCIe": Peak("NVIDIA H100 datasheet, PCIe", 51, 378, 756, 756),
    r"(NVIDIA )?A100-(SXM4|PCIE)-\d+GB|NVIDIA A100 80GB PCIe": Peak("NVIDIA A100 datasheet", 19.5, 156, 312, 312),
    "NVIDIA A10": Peak("NVIDIA A10 datasheet", 31.2, 62.5, 125, 125),
    "NVIDIA L40S": Peak("NVIDIA L40S datasheet", 91.6, 183, 362, 362),
    "NVIDIA L4": Peak("NVIDIA L4 datasheet", 30.3, 60, 121, 121),
    "NVIDIA GeForce RTX 4090": Peak("NVIDIA Ada GPU architecture whitepaper", 82.6, 82.6, 165.2, 165.2),
    "NVIDIA GeForce RTX 3090": Peak("NVIDIA Ampere GA102 whitepaper", 35.6, 35.6, 71, 71),
    r"Tesla V100-SXM2-\d+GB": Peak("NVIDIA V100 datasheet, SXM2", 15.7, None, None, 125),
    "Tesla T4": Peak("NVIDIA T4 datasheet", 8.1, None, None, 65),
}


def peak_tflops(device_name: str, precision: str) -> tuple[float | None, str]:
    """The vendor's dense peak of a device in "fp32", "tf32", "bf16" or "fp16".

    Returns:
        TFLOP/s and its source, or None and the reason why there is none.
    """
    for pattern, peak in PEAKS.items():
        if re.fullmatch(pattern, device_name):
            rate: float | None = getattr(peak, precision)
            return (rate, peak.source) if rate is not None else (None, f"{device_name} has no {precision} matrix unit")
    return None, f"no vendor peak is on record for {device_name}"
