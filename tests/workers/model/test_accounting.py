"""The formulas against the model itself, counted by torch."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from kernels.attention.problem import AttentionProblem
from kernels.registry import ATTENTION
from parallel.scaling import evaluate
from workers.model import TransformerLM, accounting
from workers.model.accounting import FeedForwardStack, StepMemory, peak_tflops
from workers.model.batches import RandomBatches
from workers.model.loss import cross_entropy
from workers.model.precision import PRECISIONS, set_parameter_dtype
from workers.model.steps import GenerateStep

SHAPES = [
    accounting.Shape(vocab_size=50, d_model=16, num_layers=3, num_heads=2, d_ff=40),
    accounting.Shape(vocab_size=97, d_model=48, num_layers=1, num_heads=4, d_ff=32),
    accounting.Shape(vocab_size=97, d_model=48, num_layers=2, num_heads=6, d_ff=32, num_kv_heads=2, window=5),
]


def build(shape: accounting.Shape, context_length: int, **options) -> TransformerLM:
    return TransformerLM(
        shape.vocab_size, context_length, shape.d_model, shape.num_layers, shape.num_heads, shape.d_ff,
        num_kv_heads=shape.num_kv_heads, window=shape.window, document_lengths=shape.document_lengths, **options,
    )  # fmt: skip


def masked_half(shape: accounting.Shape, batch: int, context: int) -> int:
    """Forward FLOPs that eager attention computes but the formulas do not count: those of hidden scores."""
    share = 1 - accounting.visible_share(shape.problem, context, context)
    return int(4 * batch * context**2 * shape.d_model * shape.num_layers * share)


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


@pytest.mark.parametrize(
    ("fields", "pairs"),
    [
        ({"is_causal": True}, 12 * 12 / 2),
        ({"is_causal": True, "window": 5}, 1 + 2 + 3 + 4 + 8 * 5),
        ({"is_causal": True, "document_lengths": (5, 0, 7)}, 5 * 6 / 2 + 7 * 8 / 2),
        ({"document_lengths": (5, 0, 7)}, 5 * 5 + 7 * 7),
        ({"softcap": 3.0, "scale": 1.0}, 12 * 12),
    ],
    ids=str,
)
def test_pairs_that_the_mask_shows_count(fields: dict[str, Any], pairs: float) -> None:
    problem = AttentionProblem(num_heads=6, num_kv_heads=2, **fields)
    assert accounting.attention_flops((3, 6, 12, 8), problem) == 4 * 3 * 6 * 8 * pairs, "whoever shares keys"


def test_peaks_are_known_by_the_whole_name() -> None:
    assert peak_tflops("NVIDIA H200", "bf16") == (989.5, "NVIDIA H200 datasheet, SXM")
    assert peak_tflops("NVIDIA H200 NVL", "bf16")[0] == 835.5
    assert peak_tflops("NVIDIA B300 SXM6 AC", "tf32") == (1125, "NVIDIA HGX datasheet, B200 and B300")
    for other in ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "NVIDIA A10G", "NVIDIA GeForce RTX 4090 Laptop GPU"):
        assert peak_tflops(other, "bf16") == (None, f"no vendor peak is on record for {other}")
    assert peak_tflops("Tesla T4", "bf16") == (None, "Tesla T4 has no bf16 matrix unit")


@pytest.mark.parametrize("peak", accounting.PEAKS.values(), ids=lambda peak: peak.source)
def test_peaks_are_dense(peak: accounting.Peak) -> None:
    """Tensor rates double from tf32 to 16 bits to 8; a rate with sparsity beside one without would show."""
    if peak.tf32 is not None and peak.bf16 is not None:
        assert peak.bf16 / peak.tf32 == pytest.approx(2, rel=0.03)
        assert peak.fp16 == peak.bf16
    if peak.bf16 is not None and peak.fp8 is not None:
        assert peak.fp8 / peak.bf16 == pytest.approx(2, rel=0.03)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_alone_counts_as_attention_in_the_model(causal: bool) -> None:
    shape = accounting.Shape(vocab_size=1, d_model=64, num_layers=1, num_heads=4, d_ff=1)
    longer, shorter = (accounting.forward_flops(shape, 3, length, logit_positions=0) for length in (64, 32))
    in_model = longer - 2 * shorter  # what grows with the square of the length: of 64² - 2 · 32² = 64² / 2 pairs
    problem = AttentionProblem(is_causal=causal)
    alone = accounting.attention_flops((3, 4, 64, 16), problem)
    assert accounting.attention_flops((3, 4, 64, 16), problem, queries=1) == alone // 64
    assert alone == in_model * 2 * (1 if causal else 2)
    assert accounting.attention_backward_flops(alone) == 2 * alone


PRESETS = {
    "small": accounting.Shape(10_000, 768, 12, 12, 3072),
    "xl": accounting.Shape(10_000, 1600, 48, 25, 6400),
    "8b": accounting.Shape(151_936, 4096, 34, 32, 11_008),
}
STACK = FeedForwardStack(d_model=16_384, d_ff=53_248, num_blocks=126)


def bytes_of(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def bytes_of_state(optimizer: torch.optim.Optimizer) -> int:
    return bytes_of(tensor for state in optimizer.state.values() for tensor in state.values())


@pytest.mark.parametrize(("name", "parameter_dtype"), [*((name, "fp32") for name in PRESETS), ("small", "bf16")])
def test_parameters_gradients_and_optimizer_state_of_presets(name: str, parameter_dtype: Any) -> None:
    """The real model and the real optimizer on the meta device. Exact but for AdamW's step counters."""
    shape, step = PRESETS[name], StepMemory(1, 1, "bf16", parameter_dtype)
    with torch.device("meta"):
        model = build(shape, 8)
    set_parameter_dtype(model, parameter_dtype)
    count, each = accounting.parameters(shape), step.parameter_bytes
    assert bytes_of(model.parameters()) == count * each
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    assert bytes_of(parameter.grad for parameter in model.parameters() if parameter.grad is not None) == count * each
    counters = 4 * len(list(model.parameters()))
    assert bytes_of_state(optimizer) == accounting.MOMENTS * count * each + counters
    assert counters < 1e-5 * count, "which the estimate leaves out"


class SavedTensors:
    """Collects the storages that autograd saves, each once, without those of `left_out`."""

    def __init__(self, left_out: Any) -> None:
        self._left_out = {tensor.untyped_storage().data_ptr() for tensor in left_out}
        self._alive: list[torch.Tensor] = []
        self.sizes: dict[int, int] = {}

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._left_out:
            self.sizes[storage.data_ptr()] = storage.nbytes()
        self._alive.append(tensor)  # so that no later tensor gets its address
        return tensor

    @property
    def bytes(self) -> int:
        return sum(self.sizes.values())


def saved_in_forward(shape: accounting.Shape, step: StepMemory, attention: str, device: str = "cpu") -> int:
    """Bytes that the real model and loss save, without parameters and tables of angles."""
    with torch.device(device):
        model = build(
            shape,
            step.context_length,
            attention=ATTENTION.load(attention).function,
            activation_checkpointing=step.activation_checkpointing,
        )
    set_parameter_dtype(model, step.parameter_dtype)
    tokens = torch.zeros(2, step.batch_size, step.context_length, dtype=torch.long, device=device)
    inputs, targets = tokens[0].clone(), tokens[1].clone()
    saved = SavedTensors([*model.parameters(), *model.buffers()])
    with (
        torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor),
        PRECISIONS[step.precision].autocast(device),
    ):
        loss = cross_entropy(model(inputs), targets)
    assert loss.requires_grad
    return saved.bytes


def weight_copies(shape: accounting.Shape, step: StepMemory) -> int:
    return int(evaluate(accounting.weight_copies_formula(shape, step), shape.symbols))


PACKED = dataclasses.replace(SHAPES[2], document_lengths=(5, 0, 11))
IN_BLOCKS = [(2, 24, SHAPES[0]), (1, 7, SHAPES[1]), (3, 16, PACKED)]
DTYPES = [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16"), ("fp16", "fp32")]


@pytest.mark.parametrize(("batch", "context", "shape"), IN_BLOCKS)
@pytest.mark.parametrize(("precision", "parameter_dtype"), DTYPES)
@pytest.mark.parametrize("attention", ["eager", "tiled"])
def test_activations_are_what_autograd_saves(batch, context, shape, precision, parameter_dtype, attention) -> None:
    """Within 1 %: exact with torch 2.13, and another torch may save one tensor more or less."""
    kind: Any = "eager" if attention == "eager" else "fused"
    step = StepMemory(batch, context, precision, parameter_dtype, kind, on_gpu=False)
    expected = accounting.activations(shape, step) + weight_copies(shape, step)
    if attention == "tiled":  # it repeats shared key heads, which fused attention need not
        repeated = shape.num_layers * batch * context * (shape.d_model - shape.key_width)
        expected += 2 * step.compute_bytes * repeated
    assert saved_in_forward(shape, step, attention) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(("precision", "parameter_dtype"), DTYPES)
def test_checkpointing_saves_the_inputs_of_blocks(precision: Any, parameter_dtype: Any) -> None:
    """Before the backward pass; the block that it recomputes adds what a block saves without checkpointing."""
    shape, step = SHAPES[0], StepMemory(2, 24, precision, parameter_dtype, on_gpu=False)
    checkpointed = StepMemory(2, 24, precision, parameter_dtype, activation_checkpointing=True, on_gpu=False)
    symbols = {**shape.symbols, **step.symbols}
    (inputs, _, inputs_bytes), (_, _, larger) = accounting.saved_for_backward(shape, checkpointed)
    assert inputs == "inputs of the blocks"
    ends = sum(saved.size(symbols) for saved in accounting.saved_outside_blocks(shape, step))
    head_copy = step.compute_bytes * shape.vocab_size * shape.d_model if step.casts_weights else 0
    saved_bytes = saved_in_forward(shape, checkpointed, "eager")
    assert saved_bytes == pytest.approx(inputs_bytes + ends + head_copy, rel=0.01)
    one_more = dataclasses.replace(shape, num_layers=shape.num_layers + 1)
    copies = step.compute_bytes * accounting.block_weights(shape) if step.casts_weights else 0
    block = saved_in_forward(one_more, step, "eager") - saved_in_forward(shape, step, "eager") - copies
    assert larger == pytest.approx(max(block, ends), rel=0.01)


def test_a_stacks_layers_save_their_inputs() -> None:
    stack, step = FeedForwardStack(d_model=6, d_ff=10, num_blocks=3), StepMemory(2, 5)
    sizes = [(stack.d_model, stack.d_ff), (stack.d_ff, stack.d_model)] * stack.num_blocks
    model = nn.Sequential(*(nn.Linear(*size, bias=False) for size in sizes))
    assert bytes_of(model.parameters()) == 4 * accounting.parameters(stack)
    saved = SavedTensors(model.parameters())
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        model(torch.zeros(2, 5, stack.d_model))
    assert saved.bytes == accounting.activations(stack, step)


def test_a_stack_by_hand() -> None:
    """CS336's problem communication_accounting (a), of which the tests of kind `estimate` have the answers."""
    assert evaluate(STACK.block_flops_formula, STACK.symbols) == 4 * 16_384 * 53_248
    only_inputs = StepMemory(1, 1024, "bf16", activation_checkpointing=True)
    assert accounting.activations(STACK, only_inputs) == 1024 * 2 * (126 * 16_384 + 16_384 + 53_248)


@pytest.mark.parametrize("shape", SHAPES)
def test_flops_of_blocks_are_those_of_the_model(shape: accounting.Shape) -> None:
    in_blocks = accounting.forward_flops(shape, 3, 12, logit_positions=0)
    symbols = {**shape.symbols, "T": 12, "N": shape.problem.visible_pairs(12, 12)}
    assert evaluate(shape.block_flops_formula, symbols) * 3 * 12 * shape.num_layers == in_blocks


def test_a_gpus_autocast_keeps_the_softmax_twice() -> None:
    shape, (cpu, gpu) = SHAPES[0], (StepMemory(2, 24, "bf16", on_gpu=on_gpu) for on_gpu in (False, True))
    twice = 4 * shape.num_layers * 2 * shape.num_heads * 24**2
    assert accounting.activations(shape, gpu) - accounting.activations(shape, cpu) == twice


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "parameter_dtype"), DTYPES)
@pytest.mark.parametrize("attention", ["eager", "triton"])
def test_activations_are_what_autograd_saves_on_a_gpu(precision: Any, parameter_dtype: Any, attention: str) -> None:
    shape = accounting.Shape(vocab_size=500, d_model=128, num_layers=2, num_heads=4, d_ff=256)
    kind: Any = "eager" if attention == "eager" else "fused"
    step = StepMemory(2, 128, precision, parameter_dtype, kind)
    expected = accounting.activations(shape, step) + weight_copies(shape, step)
    assert saved_in_forward(shape, step, attention, "cuda") == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("key_heads", [3, 1])
@pytest.mark.parametrize("backward", [False, True])
def test_the_parts_of_attention_by_hand(backward: bool, key_heads: int) -> None:
    """Two sequences, 3 heads, 4 queries, 5 keys, head dimension 8, in bfloat16."""
    shape = (2, 3, 4, 5, 8)
    pairs, q, k = 2 * 3 * 4 * 5, 2 * 3 * 4 * 8, 2 * key_heads * 5 * 8
    cost = {
        part: accounting.attention_part(part, shape, 2, backward=backward, key_heads=key_heads)
        for part in accounting.ATTENTION_PARTS
    }
    product = 2 * pairs * 8 * (2 if backward else 1)
    assert cost["scores"].flops == cost["values"].flops == product
    if backward:
        assert cost["softmax"] == accounting.Cost(4 * pairs, 2 * 3 * pairs)
        assert cost["scores"].bytes == 2 * (pairs + 2 * q + 2 * k)
        assert cost["values"].bytes == 2 * (2 * pairs + q + 2 * k)
    else:
        assert cost["softmax"] == accounting.Cost(5 * pairs, 2 * 2 * pairs)
        assert cost["scores"].bytes == cost["values"].bytes == 2 * (q + k + pairs)


def test_a_wider_softmax_moves_more() -> None:
    """On a GPU autocast has P and its gradient in float32; the products take copies of 16 bits."""
    shape = (2, 3, 4, 5, 8)
    pairs, q, k = 2 * 3 * 4 * 5, 2 * 3 * 4 * 8, 2 * 3 * 5 * 8

    def moved(part: str, *, backward: bool) -> int:
        return accounting.attention_part(part, shape, 2, softmax_bytes=4, backward=backward).bytes

    # S in bfloat16, P in float32.
    assert moved("scores", backward=False) == 2 * (q + k + pairs)
    assert moved("softmax", backward=False) == (2 + 4) * pairs
    assert moved("values", backward=False) == 4 * pairs + 2 * (k + q)
    # P and dP in float32, dS in bfloat16; the product has kept its copy of P.
    assert moved("scores", backward=True) == 2 * (pairs + 2 * q + 2 * k)
    assert moved("softmax", backward=True) == (4 + 4 + 2) * pairs
    assert moved("values", backward=True) == (2 + 4) * pairs + 2 * (2 * k + q)
