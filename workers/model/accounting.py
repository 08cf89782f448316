"""Counts parameters, floating-point operations and bytes of models, and lists vendors' peak rates. Needs no torch.

A multiply-add counts as two operations. Only matrix products count: norms, softmax, embeddings look-ups and the
optimizer are left out, as in PaLM's model FLOPs (Chowdhery et al., 2022, appendix B). Of the attention scores only
those that the mask shows count, whatever the implementation computes; recomputation by activation checkpointing does
not count. So `mfu` compares implementations by useful work. Only `attention_part` counts all computed FLOPs, since they
are compared with the measured time.

Memory includes parameters, gradients, optimizer state, and the tensors that autograd saves for the backward pass. It
excludes temporaries of single operations, the gradients of activations and the allocator's rounding. Formulas are also
given as text, for people and for `parallel.scaling.evaluate`, in these symbols: B sequences of T tokens; V vocab_size,
D d_model, L num_layers (of a stack, num_blocks), H num_heads, E width of all key heads, F d_ff, N visible scores of a
head and sequence.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from kernels.attention.problem import AttentionProblem
from parallel.scaling import evaluate

ITEM_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 2}
"""Bytes of a number in each precision; tf32 is float32 in memory, and fp8 keeps activations in bf16."""
MOMENTS = 2
"""Tensors of a parameter's shape that AdamW keeps: first and second moment (Loshchilov & Hutter, 2019, algorithm 2)."""


@dataclass(frozen=True)
class Shape:
    """The hyper-parameters that determine the size of a TransformerLM."""

    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    d_ff: int
    num_kv_heads: int | None = None
    window: int | None = None
    document_lengths: tuple[int, ...] | None = None

    @property
    def problem(self) -> AttentionProblem:
        return AttentionProblem(
            self.num_heads,
            self.num_kv_heads,
            is_causal=True,
            window=self.window,
            document_lengths=self.document_lengths,
        )

    @property
    def key_width(self) -> int:
        """Width of all heads of keys, or of values."""
        return self.head_dim * (self.num_kv_heads or self.num_heads)

    @property
    def head_dim(self) -> int:
        return self.d_model // self.num_heads

    @property
    def symbols(self) -> dict[str, int]:
        return {
            "V": self.vocab_size,
            "D": self.d_model,
            "L": self.num_layers,
            "H": self.num_heads,
            "F": self.d_ff,
            **({} if self.key_width == self.d_model else {"E": self.key_width}),
        }

    @property
    def parameters_formula(self) -> str:
        return f"2 * V * D + L * ({self.block_formula} + 2 * D) + D"

    @property
    def products_formula(self) -> str:
        """The number of weights in all matrices that inputs are multiplied by."""
        return f"L * ({self.block_formula}) + V * D"

    @property
    def block_formula(self) -> str:
        projections = "4 * D**2" if self.key_width == self.d_model else "2 * D**2 + 2 * D * E"
        return f"{projections} + 3 * D * F"

    @property
    def block_flops_formula(self) -> str:
        """FLOPs per token of one block's forward pass, including attention; N are the pairs that the mask shows."""
        return f"2 * ({self.block_formula}) + {'2 * T * D' if counts_half(self.problem) else '4 * D * N / T'}"

    exchanged = 4
    """Tensors (tokens, d_model) that tensor parallelism moves in a block's forward pass: attention and feed-forward
    layer each gather their input and scatter their output (Korthikanti et al., 2022, figure 5)."""


@dataclass(frozen=True)
class FeedForwardStack:
    """Blocks of two linear layers, d_model to d_ff and back, without biases and with nothing between them.

    Stanford CS336, assignment 2, problem communication_accounting, and "How to Scale Your Model" (Austin et al., 2025),
    part 5, take such a stack for a large transformer, whose FLOPs are nearly all in these layers.
    """

    d_model: int
    d_ff: int
    num_blocks: int

    @property
    def symbols(self) -> dict[str, int]:
        return {"D": self.d_model, "F": self.d_ff, "L": self.num_blocks}

    parameters_formula = "L * 2 * D * F"
    block_formula = "2 * D * F"
    block_flops_formula = "4 * D * F"
    exchanged = 2
    """Tensors (tokens, d_model) that tensor parallelism moves in a block's forward pass: it gathers its input and
    scatters its output (Austin et al., 2025, part 5)."""


def parameters(shape: Shape | FeedForwardStack) -> int:
    """Return the number of parameters: two embeddings; per block four projections, SwiGLU's three, two norms; one final
    norm. A stack has two matrices per block."""
    return int(evaluate(shape.parameters_formula, shape.symbols))


def forward_flops(shape: Shape, batch_size: int, context_length: int, logit_positions: int | None = None) -> int:
    """Return the FLOPs of a forward pass over `batch_size` sequences of `context_length` tokens. `logit_positions`:
    positions per sequence that logits are computed for; all of them by default."""
    if logit_positions is None:
        logit_positions = context_length
    weights = context_length * shape.num_layers * block_weights(shape)
    head = logit_positions * shape.vocab_size * shape.d_model
    heads = batch_size, shape.num_heads, context_length, shape.head_dim
    return 2 * batch_size * (weights + head) + shape.num_layers * attention_flops(heads, shape.problem)


def training_flops(forward: int) -> int:
    """Return the FLOPs of forward and backward pass: every product has two in the backward pass, for its input and its
    weight."""
    return 3 * forward


def generate_flops(shape: Shape, batch_size: int, prompt_length: int, new_tokens: int) -> int:
    """Return the FLOPs of `generate` with a cache: prefill (logits of the last position only), then one token at a
    time.

    The prefill yields the first new token; the last one is never fed back.
    """
    total = forward_flops(shape, batch_size, prompt_length, logit_positions=1)
    per_token = shape.num_layers * block_weights(shape) + shape.vocab_size * shape.d_model
    steps = new_tokens - 1
    # The i-th decoding step sees prompt_length + i keys, or the window's.
    keys_seen = sum(min(prompt_length + i, shape.window or prompt_length + i) for i in range(1, new_tokens))
    return total + 2 * batch_size * (steps * per_token + 2 * keys_seen * shape.d_model * shape.num_layers)


def block_weights(shape: Shape | FeedForwardStack) -> int:
    return int(evaluate(shape.block_formula, shape.symbols))


Attention = Literal["eager", "fused", "triton", "tiled", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn"]
"""Implementations of attention whose memory is known. `fused` is `triton` on a GPU and `sdpa_flash` on a CPU."""


@dataclass(frozen=True)
class StepMemory:
    """The choices of a training step that change what autograd saves."""

    batch_size: int
    context_length: int
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    parameter_dtype: Literal["fp32", "bf16"] = "fp32"
    attention: Attention = "eager"
    activation_checkpointing: bool = False
    on_gpu: bool = True
    """On a GPU autocast computes the softmax in float32; on a CPU it leaves it in 16 bits."""

    @property
    def compute_bytes(self) -> int:
        """Bytes of a number that a matrix product takes or yields."""
        return ITEM_BYTES[self.precision]

    @property
    def parameter_bytes(self) -> int:
        """Bytes of a number in parameters, gradients, optimizer state, and the residual stream."""
        return ITEM_BYTES[self.parameter_dtype]

    @property
    def merges_heads(self) -> bool:
        """True if attention returns its output head by head, so that the output projection takes a copy."""
        return not (self.on_gpu and self.attention.startswith("sdpa"))

    @property
    def casts_weights(self) -> bool:
        """True if autocast makes 16-bit copies of the weights and of the inputs of matrix products."""
        return self.compute_bytes != self.parameter_bytes

    @property
    def symbols(self) -> dict[str, int]:
        return {"B": self.batch_size, "T": self.context_length}


@dataclass(frozen=True)
class SavedTensors:
    """One or more tensors of one shape that autograd saves for the backward pass."""

    what: str
    item_bytes: int
    axes: tuple[str, ...]
    """The symbols whose product is the number of elements."""

    @property
    def formula(self) -> str:
        """Bytes, as text."""
        counts = Counter(self.axes)
        powers = [axis if count == 1 else f"{axis}**{count}" for axis, count in counts.items()]
        return " * ".join([str(self.item_bytes), *powers] if self.item_bytes > 1 else powers)

    def size(self, symbols: Mapping[str, int]) -> int:
        """Bytes."""
        return math.prod((symbols[axis] for axis in self.axes), start=self.item_bytes)


BTD, BTE, BTF, BHT, BHTT = (tuple(axes) for axes in ("BTD", "BTE", "BTF", "BHT", "BHTT"))


def saved_by_block(shape: Shape | FeedForwardStack, step: StepMemory) -> list[SavedTensors]:
    """Return the tensors that one block saves for the backward pass, in the order of the forward pass.

    Derived from `workers.model.transformer` and the derivatives of torch's operations: a matrix product saves its
    inputs, a product of tensors both factors, softmax its output, silu its input. Tensors that several operations save
    count once. Compare Korthikanti et al., 2022, section 4.1, whose block differs in norms, activation and dropout.

    A stack's linear layers save only their inputs, (tokens, d_model) and (tokens, d_ff).
    """
    number = step.compute_bytes
    if isinstance(shape, FeedForwardStack):
        return [
            SavedTensors("inputs of the first layer", number, BTD),
            SavedTensors("inputs of the second layer", number, BTF),
        ]
    # Autocast caches the 16-bit copies of weights, but not those of inputs: each projection makes its own.
    attention_inputs, feed_forward_inputs = (3, 2) if step.casts_weights else (1, 1)
    return [
        *_saved_by_norm("attention"),
        SavedTensors("inputs of q, k, v projections", attention_inputs * number, BTD),
        *_saved_inputs_of_attention(shape, step),
        *_saved_by_attention(shape, step),
        SavedTensors("input of output projection", number, BTD),
        *_saved_by_norm("feed-forward"),
        SavedTensors("inputs of w1, w3", feed_forward_inputs * number, BTD),
        SavedTensors("w1 x, silu(w1 x), w3 x, their product", 4 * number, BTF),
    ]


def _saved_by_norm(of: str) -> list[SavedTensors]:
    """Return the tensors that RMSNorm saves: its input, the normalised input, and 1 / rms of each token, in float32."""
    return [
        SavedTensors(f"{of} norm: input and normalised", 2 * 4, BTD),
        SavedTensors(f"{of} norm: 1 / rms", 4, ("B", "T")),
    ]


def _saved_inputs_of_attention(shape: Shape, step: StepMemory) -> list[SavedTensors]:
    """Return queries, keys and values. Eager attention repeats key heads for their groups, and saves these copies."""
    number = step.compute_bytes
    if step.attention == "eager" or shape.key_width == shape.d_model:
        return [SavedTensors("queries, keys, values", 3 * number, BTD)]
    return [SavedTensors("queries", number, BTD), SavedTensors("keys, values", 2 * number, BTE)]


def takes_mask(shape: Shape, step: StepMemory) -> bool:
    """Return True if attention is an operation of torch's to which a window or documents are a mask. Each block makes
    one in its own data type of it, and saves that."""
    of_torch = step.attention.startswith("sdpa") or (step.attention == "fused" and not step.on_gpu)
    return of_torch and bool(shape.window or shape.document_lengths)


def _saved_by_attention(shape: Shape, step: StepMemory) -> list[SavedTensors]:
    """Return the tensors that attention saves beside queries, keys and values.

    Fused attention saves its output, and the log-sum-exp in float32 (Dao, 2023, section 3.1). The output projection's
    input counts separately, since it is a copy in another layout. A single head, and torch's own kernels on a GPU, need
    no copy: there it is the output itself.
    """
    number = step.compute_bytes
    if step.attention != "eager":
        output = [SavedTensors("attention: output", number, BTD)] if step.merges_heads else []
        mask = [SavedTensors("attention: mask", number, ("T", "T"))] if takes_mask(shape, step) else []
        return [*output, SavedTensors("attention: log-sum-exp", 4, BHT), *mask]
    # Under autocast the values are multiplied by a 16-bit copy of the float32 softmax.
    softmax = number + 4 if number < 4 and step.on_gpu else number
    return [SavedTensors("attention: softmax", softmax, BHTT), SavedTensors("attention: causal mask", 1, ("T", "T"))]


def saved_outside_blocks(shape: Shape | FeedForwardStack, step: StepMemory) -> list[SavedTensors]:
    """Return the tensors that a transformer saves outside its blocks: embedding, final norm, output layer, loss. A
    stack saves none.

    `workers.model.loss` computes in float32, and saves the logits and their log-sum-exp.
    """
    if isinstance(shape, FeedForwardStack):
        return []
    return [
        SavedTensors("token ids and targets", 2 * 8, ("B", "T")),
        *_saved_by_norm("final"),
        SavedTensors("input of output layer", step.compute_bytes, BTD),
        SavedTensors("logits", 4, ("B", "T", "V")),
        SavedTensors("log-sum-exp of logits", 4, ("B", "T")),
    ]


def saved_for_backward(shape: Shape | FeedForwardStack, step: StepMemory) -> list[tuple[str, str, int]]:
    """Return the tensors saved for the backward pass: (name, formula, bytes). The bytes add up to `activations`.

    With checkpointing, each block keeps its input in the type of the residual stream (Chen et al., 2016, with blocks as
    segments). When the backward pass reaches the last block, the tensors outside the blocks are free again, and that
    block is recomputed: the larger of the two sizes counts, in addition to the inputs of all blocks.
    """
    symbols = {**shape.symbols, **step.symbols}
    blocks, outside = saved_by_block(shape, step), saved_outside_blocks(shape, step)
    if not step.activation_checkpointing:
        per_block = [SavedTensors(saved.what, saved.item_bytes, ("L", *saved.axes)) for saved in blocks]
        return [(saved.what, saved.formula, saved.size(symbols)) for saved in [*per_block, *outside]]
    residual_bytes = step.compute_bytes if isinstance(shape, FeedForwardStack) else step.parameter_bytes
    inputs = SavedTensors("inputs of the blocks", residual_bytes, ("L", *BTD))
    block_bytes, outside_bytes = (sum(saved.size(symbols) for saved in part) for part in (blocks, outside))
    block_formula_text, outside_formula = saved_formula(blocks), saved_formula(outside)
    return [
        (inputs.what, inputs.formula, inputs.size(symbols)),
        (
            "one block, recomputed" if block_bytes >= outside_bytes else "embedding, final norm, output layer, loss",
            f"max({block_formula_text}, {outside_formula})",
            max(block_bytes, outside_bytes),
        ),
    ]


def saved_formula(saved: Sequence[SavedTensors]) -> str:
    """Return the sum of the bytes as text, with the terms of equal axes added up: "28 * B * T * D + 16 * B * T * F"."""
    terms: dict[tuple[str, ...], int] = {}
    for tensor in saved:
        terms[tensor.axes] = terms.get(tensor.axes, 0) + tensor.item_bytes
    return " + ".join(SavedTensors("", number, axes).formula for axes, number in terms.items()) or "0"


def activations(shape: Shape | FeedForwardStack, step: StepMemory) -> int:
    """Return the bytes saved for the backward pass."""
    return sum(size for _, _, size in saved_for_backward(shape, step))


def activations_formula(shape: Shape | FeedForwardStack, step: StepMemory) -> str:
    blocks, outside = saved_by_block(shape, step), saved_outside_blocks(shape, step)
    if step.activation_checkpointing:
        return " + ".join(text for _, text, _ in saved_for_backward(shape, step))
    return f"L * ({saved_formula(blocks)})" + (f" + {saved_formula(outside)}" if outside else "")


def weight_copies_formula(shape: Shape | FeedForwardStack, step: StepMemory) -> str:
    """Return the bytes of the 16-bit copies of the weights that autocast caches until the forward pass ends, and
    autograd saves; 0 for a stack, which has its master weights only, as CS336 counts."""
    if isinstance(shape, FeedForwardStack) or not step.casts_weights:
        return "0"
    return f"{step.compute_bytes} * ({shape.products_formula})"


def attention_flops(shape: tuple[int, int, int, int], problem: AttentionProblem, queries: int | None = None) -> int:
    """Return the FLOPs of the forward pass of attention alone: scores and values of visible pairs. `shape`: (batch,
    query heads, keys, head_dim). `queries`: number of queries; None: as many as keys."""
    batch, heads, keys, head_dim = shape
    queries = queries or keys
    return int(4 * batch * heads * queries * keys * head_dim * visible_share(problem, queries, keys))


def visible_share(problem: AttentionProblem, queries: int, keys: int) -> Fraction:
    """Return the share of all pairs of a query and a key that counts."""
    if counts_half(problem):
        return Fraction(1, 2)
    return Fraction(problem.visible_pairs(queries, keys), queries * keys)


def counts_half(problem: AttentionProblem) -> bool:
    """Return True for a causal mask and nothing else: it counts half, n²/2 pairs and not n(n + 1)/2, as everywhere."""
    return problem.is_causal and not problem.features & {"window", "document_lengths", "bottom_right"}


def attention_backward_flops(forward: int) -> int:
    """Return the FLOPs of the backward pass of attention alone: four products, without the fifth that recomputes the
    scores."""
    return 2 * forward


ATTENTION_PARTS = ("scores", "softmax", "values")
"""The parts of eager attention."""
SOFTMAX_FLOPS = 5
"""FLOPs per score: compare with the largest so far, subtract it, exponentiate, add up, divide."""
SOFTMAX_BACKWARD_FLOPS = 4
"""FLOPs per score of dS = P∘(dP − rowsum(P∘dP)): multiply, add up, subtract, multiply."""


@dataclass(frozen=True)
class Cost:
    """The FLOPs of a part of the work, and the fewest bytes that it has to read and write."""

    flops: int
    bytes: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes)

    def __mul__(self, times: int) -> Cost:
        return Cost(self.flops * times, self.bytes * times)


def matrix_product(batch: int, rows: int, inner: int, columns: int, element_bytes: int) -> Cost:
    """Return the cost of `batch` products (rows × inner) · (inner × columns), each matrix read or written once."""
    numbers = rows * inner + inner * columns + rows * columns
    return Cost(2 * batch * rows * inner * columns, element_bytes * batch * numbers)


def attention_part(
    part: str,
    shape: tuple[int, int, int, int, int],
    element_bytes: int,
    *,
    softmax_bytes: int | None = None,
    backward: bool = False,
    key_heads: int | None = None,
) -> Cost:
    """Return the cost of one part of eager attention in one layer: S = Q Kᵀ/√d, P = softmax(S), O = P V.

    All scores count, even with a mask: eager attention computes the masked ones, too. (`attention_flops` counts only
    the visible ones.) The products' backward passes are two products each. The bytes are those of inputs and
    outputs, each read or written once; separate passes that scale and mask the scores, or cast them, move more.

    Args:
        part: One of ATTENTION_PARTS.
        shape: (batch, heads, queries, keys, head_dim).
        element_bytes: Bytes of one number, in the precision of the products.
        softmax_bytes: Bytes of one number of the softmax's output and gradient; None: `element_bytes`. On a GPU
            autocast computes the softmax in float32.
        backward: Return the cost of the backward pass instead of the forward pass.
        key_heads: Heads of keys and values; None: as many as of queries.
    """
    wide = (softmax_bytes or element_bytes) / element_bytes
    batch, heads, queries, keys, head_dim = shape
    scores = batch * heads * queries * keys
    q = o = batch * heads * queries * head_dim
    k = v = batch * (key_heads or heads) * keys * head_dim
    product = 2 * scores * head_dim
    forward = {
        "scores": (product, q + k + scores),
        "softmax": (SOFTMAX_FLOPS * scores, (1 + wide) * scores),
        "values": (product, wide * scores + v + o),
    }
    back = {
        # Reads dS, Q and K, and writes dQ and dK.
        "scores": (2 * product, scores + 2 * q + 2 * k),
        # Reads P and dP, and writes dS.
        "softmax": (SOFTMAX_BACKWARD_FLOPS * scores, (2 * wide + 1) * scores),
        # Reads dO, V and P as the forward product had it, and writes dP and dV.
        "values": (2 * product, (1 + wide) * scores + 2 * v + o),
    }
    flops, numbers = (back if backward else forward)[part]
    return Cost(flops, round(element_bytes * numbers))


@dataclass(frozen=True)
class Peak:
    """A device's peak rates, dense (without structured sparsity), in TFLOP/s; None: no such unit."""

    source: str
    fp32: float
    tf32: float | None
    bf16: float | None
    fp16: float | None
    fp8: float | None = None


# Keys are regular expressions for the whole name, since a MIG slice, a laptop's GPU or a "Ti" is another device.
# Vendors print tensor rates with sparsity: halved here. 16-bit rates are with float32 accumulation, which torch uses.
PEAKS = {
    # A superchip's rates are those of two GPUs: https://www.nvidia.com/en-us/data-center/gb200-nvl72/
    "NVIDIA GB200": Peak("NVIDIA GB200 NVL72 datasheet, half a superchip", 80, 1250, 2500, 2500, 5000),
    # Eight GPUs' rates, divided: https://www.nvidia.com/en-us/data-center/hgx/
    "NVIDIA B200|NVIDIA B300( SXM6 AC)?": Peak("NVIDIA HGX datasheet, B200 and B300", 75, 1125, 2250, 2250, 4500),
    # An H100's GPU: https://www.nvidia.com/en-us/data-center/grace-hopper-superchip/
    "NVIDIA GH200 (480GB|144G HBM3e)": Peak("NVIDIA GH200 datasheet", 67, 494.5, 989.5, 989.5, 1979),
    "NVIDIA H200": Peak("NVIDIA H200 datasheet, SXM", 67, 494.5, 989.5, 989.5, 1979),
    "NVIDIA H200 NVL": Peak("NVIDIA H200 datasheet, NVL", 60, 417.5, 835.5, 835.5, 1670.5),
    "NVIDIA H100 80GB HBM3": Peak("NVIDIA H100 datasheet, SXM", 67, 494.5, 989.5, 989.5, 1979),
    "NVIDIA H100 NVL": Peak("NVIDIA H100 datasheet, NVL", 60, 417.5, 835.5, 835.5, 1670.5),
    "NVIDIA H100 PCIe": Peak("NVIDIA H100 datasheet, PCIe", 51, 378, 756, 756, 1513),
    r"(NVIDIA )?A100-(SXM4|PCIE)-\d+GB|NVIDIA A100 80GB PCIe": Peak("NVIDIA A100 datasheet", 19.5, 156, 312, 312),
    "NVIDIA A10": Peak("NVIDIA A10 datasheet", 31.2, 62.5, 125, 125),
    # https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.1.pdf
    "NVIDIA RTX A6000": Peak("NVIDIA Ampere GA102 whitepaper, RTX A6000", 38.7, 77.4, 154.8, 154.8),
    "NVIDIA L40S": Peak("NVIDIA L40S datasheet", 91.6, 183, 362, 362, 733),
    "NVIDIA L4": Peak("NVIDIA L4 datasheet", 30.3, 60, 121, 121, 242.5),
    "NVIDIA GeForce RTX 4090": Peak("NVIDIA Ada GPU architecture whitepaper", 82.6, 82.6, 165.2, 165.2, 330.3),
    "NVIDIA GeForce RTX 3090": Peak("NVIDIA Ampere GA102 whitepaper", 35.6, 35.6, 71, 71),
    r"Tesla V100-SXM2-\d+GB": Peak("NVIDIA V100 datasheet, SXM2", 15.7, None, None, 125),
    "Tesla T4": Peak("NVIDIA T4 datasheet", 8.1, None, None, 65),
    # https://rocm.docs.amd.com/en/latest/conceptual/gpu-arch/mi300.html has the same.
    "AMD Instinct MI300X( OAM)?": Peak("AMD Instinct MI300X data sheet", 163.4, 653.7, 1307.4, 1307.4, 2614.9),
}


def peak_tflops(device_name: str, precision: str) -> tuple[float | None, str]:
    """Return the vendor's dense peak of a device in "fp32", "tf32", "bf16", "fp16" or "fp8". Returns TFLOP/s and its
    source, or None and the reason why there is none."""
    for pattern, peak in PEAKS.items():
        if re.fullmatch(pattern, device_name):
            rate: float | None = getattr(peak, precision)
            return (rate, peak.source) if rate is not None else (None, f"{device_name} has no {precision} matrix unit")
    return None, f"no vendor peak is on record for {device_name}"


def mixed_rate(shares: Mapping[str, float], rates: Mapping[str, float | None]) -> float | None:
    """Return the rate of work whose shares are done at different rates, by precision: their weighted harmonic mean.

    A measured rate divided by it is the ideal time, Σ FLOPs ÷ rate of their precision, as a share of the measured time.
    None if a rate is unknown.
    """
    times = [(share, rates.get(precision)) for precision, share in shares.items()]
    return None if any(rate is None for _, rate in times) else 1 / sum(share / rate for share, rate in times if rate)
