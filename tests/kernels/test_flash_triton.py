"""FlashAttention-2 in Triton against the float64 oracle: in Triton's interpreter without a GPU, compiled on one.

The interpreter gets short sequences and small tiles.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.attention.reference import attention_with_logsumexp
from kernels.tolerance import TF32_TOLERANCE, TOLERANCES, error

pytest.importorskip("triton")

from kernels.attention import TritonFlashAttention2, triton_tilings
from kernels.attention.flash_triton import _backward_operation, _forward_operation, flash_attention
from kernels.attention.triton_tiles import Tiling

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SMALL = triton_tilings.Tilings(Tiling(32, 16, 4, 2), Tiling(16, 32, 4, 2), Tiling(32, 16, 4, 2), Tiling(16, 32, 4, 2))


@dataclass(frozen=True)
class Shape:
    batch: int
    heads: int
    key_heads: int
    queries: int
    keys: int
    head_dim: int


SHORT = [
    Shape(1, 2, 2, 40, 40, 16),
    Shape(1, 2, 1, 33, 70, 32),
    Shape(1, 1, 1, 70, 33, 64),
    Shape(2, 1, 1, 50, 50, 80),
    Shape(1, 1, 1, 1, 1, 128),
    Shape(1, 1, 1, 1, 37, 16),
    Shape(1, 1, 1, 20, 35, 256),
]
LONG = [
    Shape(2, 3, 3, 128, 128, 16),
    Shape(2, 4, 2, 257, 257, 32),
    Shape(1, 2, 2, 1, 1, 64),
    Shape(1, 6, 1, 300, 1111, 64),
    Shape(2, 3, 3, 1111, 300, 64),
    Shape(2, 2, 2, 515, 515, 80),
    Shape(1, 4, 4, 640, 640, 128),
    Shape(1, 2, 1, 333, 450, 128),
    Shape(1, 2, 2, 200, 333, 256),
]
CASES = [
    *(pytest.param("cpu", shape, id=f"cpu-{index}", marks=DEVICES[0].marks) for index, shape in enumerate(SHORT)),
    *(pytest.param("cuda", shape, id=f"cuda-{index}", marks=DEVICES[1].marks) for index, shape in enumerate(LONG)),
]


@pytest.fixture(autouse=True)
def _small_tiles_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        monkeypatch.setattr(triton_tilings, "choose", lambda *_: SMALL)


@pytest.fixture
def one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward pass in its one-pass form, wherever that is not the faster one."""
    choose = triton_tilings.choose
    monkeypatch.setattr(triton_tilings, "choose", lambda *which: replace(choose(*which), prefer_one_pass=True))


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def draw(*shape: int, rng: random.Random, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(rng.randrange(2**32))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)


def draw_inputs(
    shape: Shape, rng: random.Random, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    q = draw(shape.batch, shape.heads, shape.queries, shape.head_dim, rng=rng, dtype=dtype, device=device)
    k, v = (
        draw(shape.batch, shape.key_heads, shape.keys, shape.head_dim, rng=rng, dtype=dtype, device=device)
        for _ in range(2)
    )
    return q, k, v


def exact(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, *gradients: Tensor | None
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Output, log-sum-exp and gradients by the oracle in float64, for the gradients of these two outputs."""
    inputs = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
    group = q.shape[-3] // k.shape[-3] if q.dim() == 4 else 1
    keys_and_values = [tensor.repeat_interleave(group, -3) if group > 1 else tensor for tensor in inputs[1:]]
    outputs = attention_with_logsumexp(inputs[0], *keys_and_values, is_causal)
    pairs = [(output, grad.double()) for output, grad in zip(outputs, gradients, strict=False) if grad is not None]
    grads = (
        torch.autograd.grad([one for one, _ in pairs], inputs, [grad for _, grad in pairs], materialize_grads=True)
        if pairs
        else ()
    )
    return outputs[0].detach(), outputs[1].detach(), grads


def assert_right(name: str, out: Tensor, oracle: Tensor, tolerance: float | None = None) -> None:
    why = error(out.detach(), oracle).why_wrong(TOLERANCES[out.dtype] if tolerance is None else tolerance)
    assert why is None, f"{name}: {why}"


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    rng: random.Random,
    tolerance: float | None = None,
    **options: bool,
) -> None:
    """Output and all gradients."""
    inputs = [tensor.requires_grad_() for tensor in (q, k, v)]
    out = flash_attention(*inputs, is_causal, **options)
    assert out.shape == q.shape
    gradient = draw(*out.shape, rng=rng, dtype=out.dtype, device=str(out.device))
    gradients = torch.autograd.grad(out, inputs, gradient)
    oracle, _, oracle_gradients = exact(q, k, v, is_causal, gradient)
    assert_right("output", out, oracle, tolerance)
    for name, given, right in zip(("dq", "dk", "dv"), gradients, oracle_gradients, strict=True):
        assert_right(name, given, right, tolerance)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("device", "shape"), CASES)
def test_output_and_gradients_agree_with_the_oracle(
    device: str, shape: Shape, is_causal: bool, rng: random.Random
) -> None:
    for dtype in DTYPES:
        check(*draw_inputs(shape, rng, dtype, device), is_causal, rng)


@pytest.mark.usefixtures("one_pass")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("device", "shape"), CASES)
def test_one_pass_agrees_with_the_oracle(device: str, shape: Shape, is_causal: bool, rng: random.Random) -> None:
    for dtype in DTYPES[1:]:
        check(*draw_inputs(shape, rng, dtype, device), is_causal, rng)


@pytest.mark.usefixtures("one_pass")
@pytest.mark.parametrize("device", DEVICES)
def test_one_pass_in_single_precision(device: str, rng: random.Random) -> None:
    for head_dim in (64, 80):
        check(*draw_inputs(Shape(1, 2, 1, 70, 85, head_dim), rng, torch.float32, device), True, rng)


@pytest.mark.parametrize("device", DEVICES)
def test_the_logsumexp_is_differentiable_too(device: str, rng: random.Random) -> None:
    shape = Shape(1, 2, 2, 37, 45, 32)
    q, k, v = (tensor.requires_grad_() for tensor in draw_inputs(shape, rng, torch.float32, device))
    out, logsumexp = _forward_operation(q, k, v, True, None)
    gradients = [draw(*tensor.shape, rng=rng, device=device) for tensor in (out, logsumexp)]
    oracle, oracle_logsumexp, both = exact(q, k, v, True, *gradients)
    assert_right("output", out, oracle)
    assert_right("log-sum-exp", logsumexp, oracle_logsumexp)
    for given, right in zip(torch.autograd.grad((out, logsumexp), (q, k, v), gradients), both, strict=True):
        assert_right("of both", given, right)
    _, logsumexp = _forward_operation(q, k, v, True, None)
    _, _, alone = exact(q, k, v, True, None, gradients[1])
    for given, right in zip(torch.autograd.grad(logsumexp, (q, k), gradients[1]), alone[:2], strict=True):
        assert_right("of the log-sum-exp alone", given, right)


@pytest.mark.parametrize("device", DEVICES)
def test_any_strides(device: str, rng: random.Random) -> None:
    """Heads behind rows, rows that are padded, odd addresses, expanded keys, and a last axis that is not contiguous."""
    for dtype in DTYPES[-2:]:
        drawn = functools.partial(draw, rng=rng, dtype=dtype, device=device)
        tensors = [
            drawn(1, 40, 3, 16).transpose(1, 2),
            drawn(1, 3, 40, 21)[..., :16],
            drawn(3 * 40 * 16 + 1)[1:].view(1, 3, 40, 16),
            drawn(1, 1, 40, 16).expand(1, 3, 40, 16),
            drawn(1, 3, 16, 40).transpose(-2, -1),
        ]
        for first in range(0, len(tensors), 1 if device == "cuda" else 2):
            q, k, v = (tensors[(first + index) % len(tensors)].detach() for index in range(3))
            check(q, k, v, True, rng)


@pytest.mark.parametrize("device", DEVICES)
def test_output_and_gradients_keep_the_order_of_axes(device: str, rng: random.Random) -> None:
    q = draw(2, 40, 3, 16, rng=rng, device=device).transpose(1, 2).requires_grad_()
    out = flash_attention(q, q, q)
    (gradient,) = torch.autograd.grad(out, q, torch.ones_like(out))
    assert out.stride() == q.stride()
    assert gradient.stride() == q.stride()


@pytest.mark.parametrize("device", DEVICES)
def test_a_gradient_without_strides(device: str, rng: random.Random) -> None:
    """That of a sum is one number, expanded."""
    q, k, v = (tensor.requires_grad_() for tensor in draw_inputs(Shape(1, 2, 2, 20, 20, 16), rng, device=device))
    flash_attention(q, k, v).sum().backward()
    _, _, gradients = exact(q, k, v, False, torch.ones_like(q))
    for tensor, right in zip((q, k, v), gradients, strict=True):
        # Σ of attention's outputs hardly depends on q and k: rounding is judged by the size of what cancels.
        assert torch.allclose(tensor.grad.double(), right, atol=1e-5)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_the_autograd_function_takes_three_and_four_axes_and_saves_one_logsumexp(
    device: str, is_causal: bool, rng: random.Random
) -> None:
    for shape in ((2, 33, 16), (2, 3, 33, 16)):
        q, k, v = (draw(*shape, rng=rng, device=device).requires_grad_() for _ in range(3))
        out = TritonFlashAttention2.apply(q, k, v, is_causal)
        gradient = draw(*shape, rng=rng, device=device)
        oracle, logsumexp, gradients = exact(q, k, v, is_causal, gradient)
        saved = [tensor for tensor in out.grad_fn.saved_tensors if tensor.shape == shape[:-1]]
        assert len(saved) == 1
        assert_right("log-sum-exp", saved[0], logsumexp)
        assert_right("output", out, oracle)
        for given, right in zip(torch.autograd.grad(out, (q, k, v), gradient), gradients, strict=True):
            assert_right("gradient", given, right)


@pytest.mark.parametrize("device", DEVICES)
def test_no_query_and_no_batch(device: str) -> None:
    k = torch.ones(2, 1, 5, 16, device=device, requires_grad=True)
    out = flash_attention(torch.ones(2, 1, 0, 16, device=device, requires_grad=True), k, k)
    assert out.shape == (2, 1, 0, 16)
    out.sum().backward()
    assert not k.grad.any()
    assert flash_attention(k[:0], k[:0], k[:0]).shape == (0, 1, 5, 16)


@pytest.mark.filterwarnings("ignore:All-NaN:RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("device", DEVICES)
def test_what_is_not_a_number_reaches_those_who_see_it_only(device: str, rng: random.Random) -> None:
    shape = Shape(1, 1, 1, 70, 70, 16)
    for bad in (math.nan, math.inf):
        q, k, v = draw_inputs(shape, rng, device=device)
        q[0, 0, 40, 3] = bad
        out, _, _ = exact(q, k, v, True)
        given = flash_attention(q, k, v, True)
        assert torch.equal(given.isnan(), out.isnan())
        assert given[0, 0, 40].isnan().all()
        assert given.isnan().any(-1).sum() == 1
        q, k, v = draw_inputs(shape, rng, device=device)
        k[0, 0, 40] = bad
        given = flash_attention(q, k, v, True)
        assert not given[0, 0, :40].isnan().any()
        if math.isnan(bad):
            assert given[0, 0, 40:].isnan().all()


@pytest.mark.parametrize("device", DEVICES)
def test_large_scores_do_not_overflow(device: str, rng: random.Random) -> None:
    q, k, v = draw_inputs(Shape(1, 1, 1, 40, 40, 16), rng, device=device)
    out, _, _ = exact(1e3 * q, k, v, True)
    given = flash_attention(1e3 * q, k, v, True)
    assert torch.isfinite(given).all()
    assert_right("output", given, out, 1e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_operations_pass_opcheck(device: str, rng: random.Random) -> None:
    inputs = [tensor.requires_grad_() for tensor in draw_inputs(Shape(1, 2, 1, 20, 24, 16), rng, device=device)]
    # Rows and heads of other steps than the fake results would have are opcheck's business too.
    turned = [tensor.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for tensor in inputs]
    for case in (inputs, turned):
        torch.library.opcheck(_forward_operation, (*case, True, None), atol=1e-4, rtol=1e-4)
        out, logsumexp = (tensor.detach() for tensor in _forward_operation(*case, True, None))
        plain = [tensor.detach() for tensor in case]
        torch.library.opcheck(
            _backward_operation,
            (torch.ones_like(out), None, *plain, out, logsumexp, True, None),
            test_utils=("test_schema", "test_faketensor"),
            atol=1e-4,
            rtol=1e-4,
        )


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, tracing a Function
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")  # torch's own, importing Inductor
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", ["function", "Function"])
def test_a_compiled_model_has_no_graph_break(device: str, form: str, rng: random.Random) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if form == "function":
            return flash_attention(2 * q, k, v, True) * 3
        return TritonFlashAttention2.apply(2 * q, k, v, True) * 3

    backend = "inductor" if device == "cuda" else "aot_eager"
    inputs = [tensor.requires_grad_() for tensor in draw_inputs(Shape(1, 2, 2, 40, 40, 16), rng, device=device)]
    compiled = torch.compile(model, fullgraph=True, backend=backend)(*inputs)
    expected = model(*inputs)
    torch.testing.assert_close(compiled, expected)
    gradient = torch.ones_like(expected)
    for given, right in zip(
        torch.autograd.grad(compiled, inputs, gradient), torch.autograd.grad(expected, inputs, gradient), strict=True
    ):
        torch.testing.assert_close(given, right)


@pytest.mark.parametrize("device", DEVICES)
def test_who_asks_for_an_operation_sees_one(device: str, rng: random.Random) -> None:
    """A dispatch mode sees the operation; without one, kernels are launched at once."""
    seen: list[str] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(operation))
            return operation(*args, **(kwargs or {}))

    q, k, v = draw_inputs(Shape(1, 1, 1, 20, 20, 16), rng, device=device)
    with Seen():
        flash_attention(q, k, v)
    assert "flopwatch.flash_attention.default" in seen
    out = flash_attention(q.requires_grad_(), k, v)
    assert type(out.grad_fn).__name__ == "TritonFlashAttention2Backward"


@pytest.mark.usefixtures("deterministic", "one_pass")
@pytest.mark.parametrize("device", DEVICES)
def test_results_are_the_same_bit_for_bit_when_determinism_is_asked_for(device: str, rng: random.Random) -> None:
    length = 2000 if device == "cuda" else 40
    inputs = [
        tensor.requires_grad_()
        for tensor in draw_inputs(Shape(2, 4, 2, length, length, 64), rng, torch.float16, device)
    ]
    gradient = torch.ones_like(inputs[0])
    runs = []
    for _ in range(5 if device == "cuda" else 2):
        out = flash_attention(*inputs, True)
        runs.append((out.detach(), *torch.autograd.grad(out, inputs, gradient)))
    for run in runs[1:]:
        assert all(torch.equal(given, first) for given, first in zip(run, runs[0], strict=True))


def test_determinism_takes_two_passes(monkeypatch: pytest.MonkeyPatch, one_pass: None, deterministic: None) -> None:
    """Control of the test above: with `one_pass` alone, the buffer that is added to is made."""
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here")
    q = torch.ones(1, 1, 20, 16, requires_grad=True)
    made = []
    new_zeros = Tensor.new_zeros
    monkeypatch.setattr(Tensor, "new_zeros", lambda self, *args, **kw: made.append(1) or new_zeros(self, *args, **kw))
    flash_attention(q, q, q).sum().backward()
    assert not made
    torch.use_deterministic_algorithms(False)
    flash_attention(q, q, q).sum().backward()
    assert made


@pytest.mark.gpu
def test_products_of_single_precision_are_exact_or_tf32(rng: random.Random) -> None:
    for head_dim in (64, 128):
        q, k, v = draw_inputs(Shape(1, 2, 2, 300, 300, head_dim), rng, device="cuda")
        check(q, k, v, True, rng, tf32=False)
        check(q, k, v, True, rng, TF32_TOLERANCE, tf32=True)
        out, _, _ = exact(q, k, v, True)
        assert error(flash_attention(q, k, v, True, tf32=True), out).relative > 10 * TOLERANCES[torch.float32]
        torch.set_float32_matmul_precision("high")
        try:
            assert torch.equal(flash_attention(q, k, v, True), flash_attention(q, k, v, True, tf32=True))
        finally:
            torch.set_float32_matmul_precision("highest")


@pytest.mark.gpu
def test_errors_of_single_precision_do_not_grow_with_the_length(rng: random.Random) -> None:
    """Tensor cores cut sums: left to them, the output of 8192 keys is too small by 5e-5 (see `add_product`)."""
    for head_dim in (32, 64, 128):
        inputs = [one.requires_grad_() for one in draw_inputs(Shape(1, 1, 1, 8192, 8192, head_dim), rng, device="cuda")]
        out = flash_attention(*inputs)
        gradient = draw(*out.shape, rng=rng, device="cuda")
        oracle, _, oracle_gradients = exact(*inputs, False, gradient)
        assert_right("output", out, oracle, 2e-6)
        for given, right in zip(torch.autograd.grad(out, inputs, gradient), oracle_gradients, strict=True):
            assert_right("gradient", given, right, 2e-6)


@pytest.mark.gpu
def test_a_new_thread_without_a_context(rng: random.Random) -> None:
    """Its first call of CUDA is the driver's, when its memory comes from torch's cache."""
    q, k, v = draw_inputs(Shape(1, 2, 2, 300, 300, 64), rng, torch.bfloat16, "cuda")
    expected = flash_attention(q, k, v)
    flash_attention(q, k, v)  # leaves its room in the cache
    with ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(flash_attention, q, k, v).result(), expected)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_another_than_the_current_device(rng: random.Random) -> None:
    assert torch.cuda.current_device() == 0
    check(*draw_inputs(Shape(1, 2, 2, 300, 300, 64), rng, torch.bfloat16, "cuda:1"), True, rng)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["one pass", "two passes"])
def test_memory_grows_linearly_with_the_length(form: str, request: pytest.FixtureRequest) -> None:
    if form == "one pass":
        request.getfixturevalue("one_pass")

    def peak(length: int) -> int:
        q, k, v = (
            torch.randn(1, 2, length, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
        )
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        flash_attention(q, k, v, True).sum().backward()
        return torch.cuda.max_memory_allocated() - before

    peak(1024)
    short, long = peak(8192), peak(32768)
    assert long == pytest.approx(4 * short, rel=0.05)
    assert long < 32768 * 2 * 64 * 2 * 12  # twelve tensors of q's size; scores alone would be 512 such


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 5), (2, 5), (2, 5)), "three or four axes"),
        (((1, 5, 16), (1, 5, 16), (1, 4, 16)), "k and v of one shape"),
        (((1, 5, 16), (2, 5, 16), (2, 5, 16)), "batch and head dimension"),
        (((1, 5, 16), (1, 5, 32), (1, 5, 32)), "batch and head dimension"),
        (((1, 3, 5, 16), (1, 2, 5, 16), (1, 2, 5, 16)), "3 heads are no multiple of k's 2"),
        (((1, 5, 272), (1, 5, 272), (1, 5, 272)), "head dimension is 272"),
        (((1, 5, 16), (1, 0, 16), (1, 0, 16)), "there are no keys"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(shapes: tuple[tuple[int, ...], ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flash_attention(*(torch.ones(shape) for shape in shapes))


def test_dtypes_that_do_not_fit_are_refused() -> None:
    single, double = torch.ones(1, 5, 16), torch.ones(1, 5, 16, dtype=torch.float64)
    with pytest.raises(ValueError, match="float64"):
        flash_attention(double, double, double)
    with pytest.raises(ValueError, match="float16"):
        flash_attention(single, single.half(), single)
