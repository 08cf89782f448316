"""The kernels for compute capability 9.0: what they take and in which order they work, and, on such a device, their
results against the oracle, with hundreds of shapes drawn at random.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from benchmarks.attention_stress import Shape as Drawn
from benchmarks.attention_stress import draw_shape, why_wrong
from kernels.attention import flash_triton
from kernels.attention.flash_triton import flash_attention
from kernels.attention.hopper import launch as hopper
from kernels.attention.triton import inputs as triton_inputs
from kernels.registry import ATTENTION
from tests.kernels.flash import Shape, check, draw, draw_inputs

CPU = torch.device("cpu")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an H200."""

    class Properties:
        multi_processor_count = 132

    monkeypatch.setattr(hopper, "is_here", lambda _device: True)
    monkeypatch.setattr(triton_inputs, "capability", lambda _device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: Properties)


@pytest.fixture
def h200() -> None:
    if not torch.cuda.is_available() or not hopper.is_here(torch.device("cuda", 0)):
        pytest.skip("needs compute capability 9.0 and the Triton that the kernels are for")


@pytest.fixture(autouse=True)
def _nothing_remembered() -> Iterator[None]:
    yield
    hopper._forward_launch.cache_clear()
    hopper._backward_launches.cache_clear()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (128, 16, 8_000_000), (8, 128, 260_000), (256, 64, 16_000_000), (5, 7, 1)]
)
def test_each_unit_of_work_is_somebodys_turn(shape: tuple[int, int, float], is_causal: bool) -> None:
    """The kernel's own arithmetic, on numbers of the host."""
    from kernels.attention.hopper.forward import next_unit

    tiles, planes, head_bytes = shape
    programs, span = hopper.order_of_work(tiles, planes, head_bytes, 132, is_causal)
    assert 1 <= programs <= tiles * planes
    assert 1 <= span <= planes
    total = tiles * planes
    units = [
        next_unit.fn(turn, program, programs) for turn in range(-(-total // programs)) for program in range(programs)
    ]
    assert sorted(unit for unit in units if unit < total) == list(range(total))


@pytest.mark.usefixtures("here")
def test_what_is_taken(rng: random.Random) -> None:
    def taken(*inputs: Tensor) -> str | None:
        return hopper.why_not(*inputs)

    for head_dim, reason in ((64, None), (40, None), (256, None), (32, "from 40 to 256"), (100, "multiples of 8")):
        inputs = draw_inputs(Shape(1, 2, 1, 9, 17, head_dim), rng, torch.bfloat16)
        why = taken(*inputs)
        assert (why is None) == (reason is None)
        assert reason is None or reason in (why or "")
        launch = hopper._forward_launch(
            CPU, torch.bfloat16, inputs[0].shape, inputs[1].shape, *(one.stride() for one in (*inputs, inputs[0])), True
        )
        assert (launch is None) == (reason is not None)
    q, k, v = draw_inputs(Shape(1, 2, 1, 9, 17, 64), rng, torch.float32)
    assert "not torch.float32" in (taken(q, k, v) or "")
    q, k, v = (one.half() for one in (q, k, v))
    odd = draw(1, 1, 17, 65, rng=rng, dtype=torch.float16)[..., :64]
    assert "k's address or its strides" in (taken(q, odd, v) or "")


def test_the_name_hopper_refuses_what_its_kernels_do_not_take(rng: random.Random) -> None:
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here")
    implementation = ATTENTION.load("hopper")
    assert implementation.dtypes == {"cuda": {"bfloat16", "float16"}}
    with pytest.raises(ValueError, match=r"'hopper' cannot take these inputs: it needs compute capability 9\.0"):
        implementation.function(*draw_inputs(Shape(1, 1, 1, 5, 5, 64), rng), True)


@pytest.mark.gpu
@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("head_dim", [40, 64, 80, 128, 256])
def test_results_agree_with_the_oracle(head_dim: int, rng: random.Random) -> None:
    for dtype in hopper.DTYPES:
        for sizes in ((2, 3, 3, 515, 515), (1, 6, 2, 300, 1111), (2, 4, 1, 1111, 300), (1, 2, 2, 8200, 128)):
            for is_causal in (False, True):
                check(*draw_inputs(Shape(*sizes, head_dim), rng, dtype, "cuda"), is_causal, rng, only_hopper=True)


@pytest.mark.gpu
@pytest.mark.usefixtures("h200")
def test_shapes_drawn_at_random(rng: random.Random) -> None:
    for _ in range(200):
        shape: Drawn = draw_shape(rng)
        assert why_wrong(shape, rng) is None, shape


@pytest.mark.gpu
@pytest.mark.usefixtures("h200")
def test_heads_behind_rows_and_a_gradient_without_strides(rng: random.Random) -> None:
    q, k, v = (draw(2, 200, 4, 64, rng=rng, dtype=torch.bfloat16, device="cuda").transpose(1, 2) for _ in range(3))
    check(q, k, v, True, rng, only_hopper=True)
    inputs = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    given = torch.autograd.grad(flash_attention(*inputs, True).sum(), inputs)
    ones = torch.autograd.grad(flash_attention(*inputs, True), inputs, torch.ones_like(q))
    for one, other in zip(given, ones, strict=True):
        torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
@pytest.mark.usefixtures("h200")
def test_a_cuda_graph_computes_anew_when_it_is_replayed(rng: random.Random) -> None:
    """Under capture, and after other calls took the same launch to other addresses."""
    inputs = [one.requires_grad_() for one in draw_inputs(Shape(1, 4, 2, 300, 300, 64), rng, torch.bfloat16, "cuda")]
    gradient = torch.randn_like(inputs[0])

    def step(leaves: list[Tensor]) -> tuple[Tensor, ...]:
        out = flash_attention(*leaves, True, only_hopper=True)
        return (out, *torch.autograd.grad(out, leaves, gradient))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(inputs)
    for _ in range(3):
        fresh = draw_inputs(Shape(1, 4, 2, 300, 300, 64), rng, torch.bfloat16, "cuda")
        with torch.no_grad():
            for one, values in zip(inputs, fresh, strict=True):
                one.copy_(values)
        flash_attention(*fresh, True)
        graph.replay()
        # Other leaves, since autograd warns of those that it met on another stream.
        now = [one.detach().clone().requires_grad_() for one in inputs]
        for given, right in zip(captured, step(now), strict=True):
            torch.testing.assert_close(given, right, atol=1e-2, rtol=1e-2)


@pytest.mark.gpu
@pytest.mark.usefixtures("h200")
def test_threads_with_streams_of_their_own(rng: random.Random) -> None:
    problems = [draw_inputs(Shape(1, 4, 4, 512, 512, 64), rng, torch.bfloat16, "cuda") for _ in range(8)]
    expected = [flash_attention(*problem, True) for problem in problems]
    torch.cuda.synchronize()

    def run(index: int) -> bool:
        with torch.cuda.stream(torch.cuda.Stream()):
            right = all(torch.equal(flash_attention(*problems[index], True), expected[index]) for _ in range(20))
        torch.cuda.synchronize()
        return right

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(run, range(8)))


@pytest.mark.gpu
@pytest.mark.usefixtures("h200")
def test_memory_that_is_given_out_again_for_another_shape(rng: random.Random) -> None:
    for length in (300, 200, 300, 250, 200) * 3:
        inputs = draw_inputs(Shape(1, 2, 2, length, length, 128), rng, torch.bfloat16, "cuda")
        check(*inputs, True, rng, only_hopper=True)
        del inputs
        torch.cuda.empty_cache()


@pytest.mark.gpu
@pytest.mark.usefixtures("h200")
def test_launch_hooks_see_each_launch(rng: random.Random) -> None:
    import triton

    inputs = draw_inputs(Shape(1, 2, 2, 300, 300, 64), rng, torch.bfloat16, "cuda")
    expected = flash_attention(*inputs, True)
    seen: list[str] = []
    hook = triton.knobs.runtime.launch_enter_hook

    def note(metadata: object) -> None:
        seen.append(metadata.get()["name"])  # type: ignore[attr-defined]

    hook.add(note)
    try:
        assert torch.equal(flash_attention(*inputs, True), expected)
    finally:
        hook.remove(note)
    assert seen == ["forward_kernel"]
    flash_triton.flash_attention(*inputs, True)
    assert len(seen) == 1
