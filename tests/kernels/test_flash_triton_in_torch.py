"""FlashAttention-2 in Triton as a part of torch: autograd, compiling, modes, determinism, threads, devices, memory."""

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

import triton

from kernels.attention import TritonFlashAttention2
from kernels.attention.flash_triton import _backward_operation, _forward_operation, flash_attention
from kernels.attention.problem import AttentionProblem
from kernels.attention.triton import inputs as triton_inputs
from kernels.attention.triton import launch, tilings
from tests.kernels.flash import Shape, assert_right, draw, draw_inputs, exact

WHOLE = AttentionProblem(window=7, softcap=5.0, scale=0.2, document_lengths=(0, 9, 11), bottom_right=True)
pytestmark = pytest.mark.usefixtures("_small_tiles_in_the_interpreter", "_without_hopper")


def test_output_and_gradients_keep_the_order_of_axes(device: str, rng: random.Random) -> None:
    q = draw(1, 20, 2, 16, rng=rng, device=device).transpose(1, 2).requires_grad_()
    out = flash_attention(q, q, q)
    (gradient,) = torch.autograd.grad(out, q, torch.ones_like(out))
    assert out.stride() == q.stride()
    assert gradient.stride() == q.stride()


def test_the_autograd_function_saves_one_logsumexp(device: str, is_causal: bool, rng: random.Random) -> None:
    for shape in ((2, 17, 16), (1, 2, 17, 16)):
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


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of the copies that torch 2.14 checks with
def test_operations_pass_opcheck(device: str, rng: random.Random) -> None:
    inputs = [tensor.requires_grad_() for tensor in draw_inputs(Shape(1, 2, 1, 20, 20, 16), rng, device=device)]
    options = WHOLE.options(device)
    torch.library.opcheck(_forward_operation, (*inputs, True, False), options, atol=1e-4, rtol=1e-4)
    plain = [tensor.detach() for tensor in inputs]
    out, logsumexp = _forward_operation(*plain, True, False, **options)
    gradients = torch.ones_like(out), torch.ones_like(logsumexp)
    torch.library.opcheck(
        _backward_operation,
        (*gradients, *plain, out, logsumexp, True, False),
        options,
        test_utils=("test_schema", "test_faketensor"),
        atol=1e-4,
        rtol=1e-4,
    )


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, tracing a Function
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")  # torch's own, importing Inductor
@pytest.mark.parametrize("kind", ["function", "Function", "options"])
def test_a_compiled_model_has_no_graph_break(device: str, kind: str, rng: random.Random) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if kind == "function":
            return flash_attention(2 * q, k, v, True) * 3
        if kind == "options":
            out, logsumexp = flash_attention(2 * q, k, v, True, return_lse=True, **options)
            return out * 3 + logsumexp[..., None]
        return TritonFlashAttention2.apply(2 * q, k, v, True) * 3

    backend = "inductor" if device == "cuda" else "aot_eager"
    inputs = [tensor.requires_grad_() for tensor in draw_inputs(Shape(1, 1, 1, 20, 20, 16), rng, device=device)]
    options = WHOLE.options(device)
    compiled = torch.compile(model, fullgraph=True, backend=backend)(*inputs)
    expected = model(*inputs)
    torch.testing.assert_close(compiled, expected)
    gradient = torch.ones_like(expected)
    for given, right in zip(
        torch.autograd.grad(compiled, inputs, gradient), torch.autograd.grad(expected, inputs, gradient), strict=True
    ):
        torch.testing.assert_close(given, right)


def test_operations_are_visible_to_dispatch_modes(device: str, rng: random.Random) -> None:
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
def test_determinism_on_request(device: str, rng: random.Random) -> None:
    shape = Shape(2, 4, 2, 2000, 2000, 64) if device == "cuda" else Shape(1, 2, 1, 33, 33, 16)
    inputs = [tensor.requires_grad_() for tensor in draw_inputs(shape, rng, torch.float16, device)]
    gradient = torch.ones_like(inputs[0])
    runs = []
    for _ in range(5 if device == "cuda" else 2):
        out = flash_attention(*inputs, True, window=40)
        runs.append((out.detach(), *torch.autograd.grad(out, inputs, gradient)))
    for run in runs[1:]:
        assert all(torch.equal(given, first) for given, first in zip(run, runs[0], strict=True))


def test_determinism_takes_two_passes(monkeypatch: pytest.MonkeyPatch, one_pass: None, deterministic: None) -> None:
    """Control of the test above: with `one_pass` alone, a sum is made in memory."""
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here")
    q = torch.ones(1, 1, 20, 16, requires_grad=True)
    made = []
    finish_dq = launch.finish_dq
    monkeypatch.setattr(launch, "finish_dq", lambda *given: made.append(1) or finish_dq(*given))
    flash_attention(q, q, q).sum().backward()
    assert not made
    torch.use_deterministic_algorithms(False)
    flash_attention(q, q, q).sum().backward()
    assert made


@pytest.mark.gpu
def test_a_new_thread_without_a_context(rng: random.Random) -> None:
    """Its first call of CUDA is the driver's, when its memory comes from torch's cache."""
    q, k, v = draw_inputs(Shape(1, 2, 2, 300, 300, 64), rng, torch.bfloat16, "cuda")
    expected = flash_attention(q, k, v)
    flash_attention(q, k, v)  # leaves its room in the cache
    with ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(flash_attention, q, k, v).result(), expected)


@pytest.mark.gpu
@pytest.mark.usefixtures("form")
def test_memory_grows_linearly_with_the_length() -> None:
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
        (((1, 5, 272), (1, 5, 272), (1, 5, 272)), "head dimension is 272"),
        (((1, 5, 16), (1, 0, 16), (1, 0, 16)), "there are no keys"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(shapes: tuple[tuple[int, ...], ...], message: str) -> None:
    """Others are in test_arguments."""
    with pytest.raises(ValueError, match=message):
        flash_attention(*(torch.ones(shape) for shape in shapes))


def test_a_gpu_before_ampere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(triton_inputs, "capability", lambda _device: (7, 5))
    with pytest.raises(ValueError, match=r"compute capability 7\.5, and at least 8\.0"):
        triton_inputs.check_device(torch.device("cuda"))


def test_autocast_casts_as_it_does_for_torchs_own_attention(device: str, rng: random.Random) -> None:
    inputs = draw_inputs(Shape(1, 1, 1, 20, 20, 16), rng, device=device)
    mixed = (*inputs[:2], inputs[2].bfloat16())
    narrow = [tensor.bfloat16().requires_grad_() for tensor in inputs]
    expected = flash_attention(*narrow, True)
    right = torch.autograd.grad(expected, narrow, torch.ones_like(expected))
    for given in (inputs, mixed):
        leaves = [tensor.detach().requires_grad_() for tensor in given]
        for function in (flash_attention, TritonFlashAttention2.apply):
            with torch.autocast(device, torch.bfloat16):
                out = function(*leaves, True)
                theirs = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
            assert out.dtype == theirs.dtype == torch.bfloat16
            assert torch.equal(out, expected)
            gradients = torch.autograd.grad(out, leaves, torch.ones_like(out))
            for gradient, leaf, wanted in zip(gradients, leaves, right, strict=True):
                assert gradient.dtype == leaf.dtype
                assert torch.equal(gradient, wanted.to(leaf.dtype))
    with pytest.raises(ValueError, match=r"not torch\.float32, torch\.float32 and torch\.bfloat16"):
        flash_attention(*mixed, True)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # torch 2.15 says that it loops
def test_vmap_over_further_axes(device: str, rng: random.Random) -> None:
    q, k, v = (draw(3, 1, 2, 20, 16, rng=rng, device=device) for _ in range(3))
    out = torch.func.vmap(flash_attention)(q, k, v)
    assert torch.equal(out, torch.stack([flash_attention(*one) for one in zip(q, k, v, strict=True)]))


@pytest.mark.parametrize("wanted", [{0}, {1}, {2}, {0, 2}], ids=str)
def test_only_gradients_that_are_needed_are_computed(device, wanted, form, rng, monkeypatch) -> None:
    choose = tilings.choose
    monkeypatch.setattr(tilings, "choose", lambda *which: replace(choose(*which), prefer_one_pass=form == "one pass"))
    launched = []
    for name in ("keys", "queries"):
        real = getattr(launch, name)
        monkeypatch.setattr(
            launch, name, lambda *args, real=real, name=name, **rest: launched.append(name) or real(*args, **rest)
        )
    inputs = draw_inputs(Shape(1, 2, 1, 17, 20, 16), rng, device=device)
    for index in wanted:
        inputs[index].requires_grad_()
    out = flash_attention(*inputs, True)
    gradient = draw(*out.shape, rng=rng, device=device)
    _, _, right = exact(*inputs, True, gradient)
    given = torch.autograd.grad(out, [inputs[index] for index in sorted(wanted)], gradient)
    for index, one in zip(sorted(wanted), given, strict=True):
        assert_right(f"gradient of input {index}", one, right[index])
    both = ["keys"] if form == "one pass" else ["keys", "queries"]
    assert launched == (["queries"] if wanted == {0} else both if 0 in wanted else ["keys"])


def test_checkpointed_and_in_inference(device: str, rng: random.Random) -> None:
    inputs = [one.requires_grad_() for one in draw_inputs(Shape(1, 1, 1, 20, 20, 16), rng, device=device)]
    out = flash_attention(*inputs, True)
    expected = torch.autograd.grad(out.sum(), inputs)
    again = checkpoint(flash_attention, *inputs, True, use_reentrant=False)
    for given, right in zip(torch.autograd.grad(again.sum(), inputs), expected, strict=True):
        assert torch.equal(given, right)
    with torch.inference_mode():
        assert torch.equal(flash_attention(*inputs, True), out)
