"""The played call of attention beside torch's allocations, and beside the formulas of an assignment."""

from typing import Any

import pytest

from workers.model.accounting import StepMemory
from workers.model.attention_memory import BACKWARD, BETWEEN, FORWARD, AttentionMemory

MIB = 2**20
SIZES = [(8, 1, 256, 16), (2, 3, 300, 32), (1, 2, 320, 64)]


def call(size: tuple[int, int, int, int], precision: Any = "fp32", attention: Any = "eager", **more: Any) -> Any:
    batch, heads, length, head_dim = size
    on_gpu = more.pop("on_gpu", False)
    return AttentionMemory(
        heads, head_dim, StepMemory(batch, length, precision, attention=attention, on_gpu=on_gpu), **more
    )


def measured(size: tuple[int, int, int, int], precision: str, attention: str, *, causal: bool) -> dict[str, int]:
    """Bytes that torch's profiler saw: each pass's peak, and what is there between the passes."""
    import torch

    from kernels.registry import ATTENTION
    from workers.measure.allocations import make_recording

    function = ATTENTION.load(attention).function
    recording = make_recording(torch.device("cpu"), 100_000)
    recording.begin({}, stacks=False)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    *inputs, grad_out = (torch.randn(size, dtype=dtype) for _ in range(4))
    inputs = [one.requires_grad_() for one in inputs]
    recording.mark("preparation", {})
    out = function(*inputs, causal)
    recording.mark(FORWARD, {})
    gradients = torch.autograd.grad(out, inputs, grad_out)
    recording.mark(BACKWARD, {})
    found = {one.stretch.phase: one.stretch for one in recording.end()}
    del out, gradients
    return {FORWARD: found[FORWARD].peak.total, BETWEEN: found[FORWARD].end.total, BACKWARD: found[BACKWARD].peak.total}


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("causal", [False, True])
def test_the_bytes_are_those_of_torchs_allocations(size, precision, causal) -> None:
    pytest.importorskip("torch")
    found = {name: moment.total for name, moment in call(size, precision, causal=causal).moments().items()}
    # A few numbers, and the positions of which the mask is made, are not played; nor oneDNN's copies for bf16 products.
    copies = 0.3 if precision == "bf16" else 0
    peaks = measured(size, precision, "eager", causal=causal)
    assert peaks.pop(FORWARD) == pytest.approx(found.pop(FORWARD), rel=copies, abs=32 * size[2])
    assert peaks == pytest.approx(found, abs=32 * size[2])


@pytest.mark.parametrize("attention", ["sdpa_flash", "tiled"])
def test_fused_attention_keeps_what_grows_with_the_length(attention: str) -> None:
    pytest.importorskip("torch")
    size = 2, 3, 300, 32
    found = call(size, "fp32", attention, causal=True).moments()[BETWEEN].total
    assert measured(size, "fp32", attention, causal=True)[BETWEEN] == pytest.approx(found, rel=0.005)
    # An assignment's formula: queries, keys, values, output and its gradient, and a log-sum-exp for each query.
    assert found == 4 * (5 * 2 * 3 * 300 * 32 + 2 * 3 * 300)


@pytest.mark.parametrize("attention", ["eager", "sdpa_flash"])
@pytest.mark.parametrize("name", [FORWARD, BACKWARD])
@pytest.mark.parametrize("limit", [10**6, 80 * 10**9])
def test_the_first_length_beyond_a_device_is_the_first(attention: str, name: str, limit: int) -> None:
    def at(length: int) -> int:
        return call((8, 1, length, 64), attention=attention, on_gpu=True).moments()[name].total

    first = call((8, 1, 7, 64), attention=attention, on_gpu=True).first_beyond(limit, name)
    assert at(first - 1) <= limit < at(first)
