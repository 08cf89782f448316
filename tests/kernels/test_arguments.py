"""Arguments that contradict each other: every exported operation refuses them, or computes what plain PyTorch does."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("triton")

import kernels
from kernels.registry import ATTENTION
from tests.kernels.test_derivatives import INPUTS, ROWS, Function, dtype_of, walked

pytestmark = pytest.mark.usefixtures("_small_tiles_in_the_interpreter")
REFUSALS = (ValueError, TypeError, IndexError)


def contradictions(inputs: list[Tensor]) -> Iterator[tuple[str, list[Tensor]]]:
    """Each input with another size of one axis, another number of axes, another dtype, and on another device."""
    for n, one in enumerate(inputs):
        others = {f"axis {axis}": torch.cat([one, one.narrow(axis, 0, 1)], axis) for axis in range(one.dim())}
        others |= {"fewer axes": one[0], "float16": one.half(), "integers": one.long()}
        others["float8"] = one.to(torch.float8_e5m2)
        if len(inputs) > 1:
            others["meta"] = one.to("meta")
        for title, other in others.items():
            yield f"{title} of input {n}", [*inputs[:n], other, *inputs[n + 1 :]]


def fault(function: Function, plain: Function, inputs: list[Tensor]) -> str | None:
    """Return what is wrong with the answer."""
    try:
        given = function(*inputs)
    except REFUSALS as error:
        named = {str(tuple(one.shape)) for one in inputs} | {str(one.dtype) for one in inputs}
        named |= {str(one.device) for one in inputs} | {str(size) for one in inputs for size in one.shape}
        return None if sum(word in str(error) for word in named) > 1 else f"the error does not name both: {error}"
    try:
        right = plain(*(one.double() for one in inputs))
    except (*REFUSALS, RuntimeError) as error:
        return f"an answer, where PyTorch says: {error}"
    same = given.shape == right.shape and torch.allclose(given.double(), right, rtol=1e-2, atol=1e-2)
    return None if same else "another answer than PyTorch's"


def test_arguments_that_contradict_each_other_are_refused(device: str) -> None:
    faults = {}
    for name, shapes, function, plain in walked(device):
        if " " in name and not name.startswith("chunked"):
            continue
        generator = torch.Generator().manual_seed(0)
        inputs = [torch.randn(shape, generator=generator).to(device) for shape in shapes]
        for title, contradicting in contradictions(inputs):
            if found := fault(function, plain, contradicting):
                faults[name, title] = found
    assert not faults


def test_a_tensor_that_torch_has_negated_by_a_mark(device: str) -> None:
    """As `z.conj().imag` is; its memory has the numbers' opposites."""
    for name, shapes, function, _ in walked(device):
        generator = torch.Generator().manual_seed(0)
        inputs = [torch.randn(shape, generator=generator).to(device, dtype_of(name, device)) for shape in shapes]
        marked = function(*map(torch._neg_view, inputs))
        assert torch.equal(marked, function(*(-one for one in inputs))), name


def test_more_rows_than_kernels_count(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.rows.MOST_ROWS", ROWS - 1)
    for name in ("rms_norm", "rope", "weighted_sum"):
        shapes, called, _ = INPUTS[name]
        with pytest.raises(ValueError, match=f"expected at most {ROWS - 1} rows, not {ROWS}: call it on parts"):
            called(getattr(kernels, name))(*(torch.ones(shape, device=device) for shape in shapes))


@pytest.mark.parametrize("name", ["cpu_flash", "cpu_naive", "eager", "sdpa_flash", "sdpa_math", "tiled", "triton"])
@pytest.mark.parametrize(
    "shapes",
    [
        ((2, 2, 5, 16), (1, 2, 5, 16), (1, 2, 5, 16)),
        ((1, 2, 5, 16), (1, 2, 5, 16), (1, 2, 4, 16)),
        ((1, 3, 5, 16), (1, 2, 5, 16), (1, 2, 5, 16)),
        ((1, 2, 5, 16), (1, 2, 5, 8), (1, 2, 5, 8)),
        ((1, 2, 5, 16), (1, 2, 5, 16), (1, 1, 5, 16)),
        ((1, 2, 5, 16), (2, 5, 16), (2, 5, 16)),
    ],
)
def test_attention_broadcasts_nothing(name: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    """Implementations of torch would, or fail with words that name neither."""
    with pytest.raises(ValueError, match=r"not|differ|no multiple"):
        ATTENTION.load(name).function(*(torch.ones(shape) for shape in shapes), False)


@pytest.mark.parametrize("name", ["cpu_flash", "flash_attn", "flex", "sdpa_math"])
def test_most_implementations_want_heads(name: str) -> None:
    with pytest.raises(ValueError, match=r"\(batch, heads, sequence, head_dim\).* not \(2, 5, 16\)"):
        ATTENTION.load(name).function(*(torch.ones(2, 5, 16) for _ in range(3)), False)


@pytest.mark.parametrize("value_dim", [8, 24])
def test_values_of_another_head_dimension(value_dim: int) -> None:
    """As torch's attention takes them; the other implementations name those that do."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 5, 16), (2, 2, 5, 16), (2, 2, 5, value_dim))
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    right = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    for name in ("eager", "sdpa_math"):
        assert torch.allclose(ATTENTION.load(name).function(q, k, v, True), right)
    single = q.float(), k.float(), v.float()
    for name in ("cpu_flash", "cpu_naive", "tiled", "triton"):
        with pytest.raises(ValueError, match=rf"keys, 16, not {value_dim}: .* 'eager' or 'sdpa_math'"):
            ATTENTION.load(name).function(*single, True)


@pytest.mark.parametrize("name", ["eager", "sdpa_flash", "sdpa_math", "tiled", "triton"])
def test_options_and_inputs_that_attention_does_not_take(name: str) -> None:
    attend = ATTENTION.load(name).function
    q = torch.ones(1, 2, 5, 16)
    for window in (0, -1):
        with pytest.raises(ValueError, match=rf"window must be at least 1, .* not {window}"):
            attend(q, q, q, False, window=window)
    for scale in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=f"scale must be a positive number, not {scale}"):
            attend(q, q, q, False, scale=scale)
    with pytest.raises((ValueError, RuntimeError), match=r"window.* (not 2\.5|'float')"):
        attend(q, q, q, False, window=2.5)
    with pytest.raises((TypeError, RuntimeError), match=r"(?s)document_ends.*list"):
        attend(q, q, q, False, document_ends=[2, 5])
    with pytest.raises(ValueError, match=r"(torch\.int64.*){3}"):
        attend(q.long(), q.long(), q.long(), False)
    with pytest.raises(ValueError, match=r"head dimension .* 0"):
        attend(q[..., :0], q[..., :0], q[..., :0], False)
    with torch.autocast("cpu", torch.bfloat16):
        attend(q, q.half(), q.half(), False)
        with pytest.raises(ValueError, match=r"torch\.float64"):
            attend(q, q.double(), q.double(), False)


def test_without_a_gpu_errors_name_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("flash_attention", "TritonFlashAttention2", "linear_cross_entropy", "rms_norm", "rope", "weighted_sum")
    functions = {
        name: INPUTS[name][1](getattr(kernels, name, None) or getattr(kernels.attention, name)) for name in names
    }
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)  # modules imported from here on would not interpret
    for name, function in functions.items():
        with pytest.raises(ValueError, match=r"on a CUDA device, not on cpu: without a GPU call .*TRITON_INTERPRET=1"):
            function(*(torch.ones(shape) for shape in INPUTS[name][0]))


@pytest.mark.parametrize("name", ["compiled", "eager", "flex", "tiled", "triton"])
def test_documents_that_go_back(name: str) -> None:
    attend = ATTENTION.load(name).function
    q = torch.ones(1, 1, 6, 16)
    for ends in ([4, 2, 6], [-1, 6], [3, 7]):
        with pytest.raises(ValueError, match=rf"grow from 0 to at most 6 tokens, not \[{ends[0]}"):
            attend(q, q, q, False, document_ends=torch.tensor(ends, dtype=torch.int32))
