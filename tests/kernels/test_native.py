"""Calls without Python: what they launch, and when they leave a call to Python. The CUDA driver is a fake in C."""

import ctypes
import logging
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.nvidia import driver as nvidia

from kernels import launching
from kernels.attention.flash_triton import PLAIN_OPTIONS, flash_attention
from kernels.attention.hopper import native
from kernels.attention.reference import attention
from kernels.launching import Address, Window
from kernels.versions import KNOWN_VERSIONS

SHAPE = (2, 3, 4, 8)
NUMBERS = 2 * 3 * 4 * 8


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The CUDA driver, whose kernels are functions in C."""
    file = tmp_path_factory.mktemp("driver") / "libcuda.so"
    source = Path(__file__).with_name("fake_driver.c")
    command = ["c++", "-x", "c", "-shared", "-fPIC", f"-I{native.LIBRARY.include_folders[0]}", str(source)]
    subprocess.run([*command, "-o", str(file)], check=True, capture_output=True, text=True)
    loaded = ctypes.CDLL(str(file))
    loaded.asked.restype = ctypes.c_char_p
    return loaded


@pytest.fixture
def calls(fake: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The library, which knows no call yet. It stays the operations' implementation for tensors on the CPU."""
    loaded = native.load(native.LIBRARY.file())
    loaded.open(fake._name, fake._name)
    native.implement(loaded, "CPU")
    monkeypatch.setattr(native, "_loaded", loaded)
    fake.forget()
    yield loaded
    loaded.forget()
    fake.fail_with(0)


def function(fake: ctypes.CDLL, name: str) -> int:
    return ctypes.cast(getattr(fake, name), ctypes.c_void_p).value


def forward_kernel(fake: ctypes.CDLL) -> dict[str, Any]:
    window = ("window", 0, 0, 7, 3, list(SHAPE), [384, 128, 32, 4], [1, 1, 4, 8])
    scale = int.from_bytes(ctypes.c_float(0.25), "little")
    tensors = [("address", place, 0) for place in (1, 2, 3, 4)]
    return {
        "function": function(fake, "forward_function"), "grid": 24, "threads": 128, "shared_bytes": 512,
        "overlaps": False, "parameters": [window, *tensors, ("value", NUMBERS), ("value", scale)],
    }  # fmt: skip


def backward_kernels(fake: ctypes.CDLL) -> list[dict[str, Any]]:
    common = {"grid": NUMBERS, "threads": 32, "shared_bytes": 0, "overlaps": True}
    prepare = {"parameters": [("address", 3, 0), ("address", 4, 16)], "function": function(fake, "prepare_function")}
    tensors = [("address", place, 0) for place in (7, 5, 6)]
    finish = {"parameters": [("address", 4, 16), *tensors], "function": function(fake, "finish_function")}
    return [common | prepare, common | finish]


def draw(*, needs: str = "qkv") -> list[Tensor]:
    return [torch.randn(SHAPE).requires_grad_(name in needs) for name in "qkv"]


def teach(calls: Any, fake: ctypes.CDLL, *, deterministic: bool = True) -> None:
    q, k, v = (one.detach() for one in draw())
    calls.learn_forward(q, k, v, True, forward_kernel(fake))
    rest = q, q.new_empty(SHAPE[:3]), True, NUMBERS + 4, deterministic
    calls.learn_backward(q, q, k, v, *rest, backward_kernels(fake))


class Listener(TorchDispatchMode):
    """Sees the operations."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def test_a_known_call_launches_and_is_differentiated(calls: Any, fake: ctypes.CDLL) -> None:
    q, k, v = draw()
    assert native.attend(q, k, v, True) is None
    teach(calls, fake)
    out = native.attend(q, k, v, True)
    torch.testing.assert_close(out, q + 2 * k + 3 * v)
    gradient = torch.randn(SHAPE)
    for given, factor in zip(torch.autograd.grad(out, (q, k, v), gradient), (1, 2, 3), strict=True):
        torch.testing.assert_close(given, factor * gradient)
    said = fake.asked().decode().splitlines()
    assert said[0] == "context set"
    assert said[1] == f"map {q.data_ptr()} type 7 swizzle 3 rest 0 2 0: 8/8/1/32 4/4/1/128 3/1/1/384 2/1/1/0"
    assert said[2:] == [
        "launch 24×1×1 of 128×1×1, 512 bytes, stream 1ff, overlaps 0",
        f"launch {NUMBERS}×1×1 of 32×1×1, 0 bytes, stream 1ff, overlaps 1",
        f"launch {NUMBERS}×1×1 of 32×1×1, 0 bytes, stream 1ff, overlaps 1",
    ]


def test_only_calls_of_the_same_kind_are_known(calls: Any, fake: ctypes.CDLL) -> None:
    q, k, v = (one.detach() for one in draw())
    teach(calls, fake)
    shifted = torch.randn(NUMBERS + 1)[1:].view(SHAPE)
    turned = torch.randn(2, 4, 3, 8).transpose(1, 2)
    sparse = q.to_sparse()
    for others in (
        (q[:1], k[:1], v[:1]), (q.half(), k.half(), v.half()), (q, k.half(), v), (q, turned, v), (turned, k, v),
        (shifted, k, v), (q[0], k[0], v[0]), (sparse, k, v), (q, k[:, :1], v[:, :1]), (q, k, v[:, :, :2]),
    ):  # fmt: skip
        assert native.attend(*others, True) is None
    assert native.attend(q, k, v, False) is None
    assert native.attend(q, k, v, True) is not None


@pytest.mark.parametrize("needs", ["q", "kv", "v", ""])
def test_calls_that_need_some_gradients_only_are_left_to_python(needs, calls, fake, monkeypatch) -> None:
    teach(calls, fake)
    inputs = draw(needs=needs)
    out = native.attend(*inputs, True)
    assert out.requires_grad == bool(needs)
    asked = []

    def by_python(gradient: Tensor, _none: None, *rest: Any) -> tuple[Tensor | None, ...]:
        asked.append(rest[-1])
        return tuple(gradient + 7 if needed else None for needed in rest[-1])

    monkeypatch.setattr("kernels.attention.flash_triton._gradients", by_python)
    leaves = [one for one in inputs if one.requires_grad]
    if not needs:
        return
    gradient = torch.randn(SHAPE)
    for given in torch.autograd.grad(out, leaves, gradient):
        torch.testing.assert_close(given, gradient + 7)
    assert asked == [tuple(name in needs for name in "qkv")]


def test_gradients_cannot_be_differentiated_in_turn(calls, fake, monkeypatch) -> None:
    teach(calls, fake)
    monkeypatch.setattr(
        "kernels.attention.flash_triton._gradients", lambda gradient, *_rest: (1 * gradient, 2 * gradient, gradient)
    )
    inputs = draw()
    out = native.attend(*inputs, True)
    for loss in (out.square().sum(), out.sum()):  # the second's gradient requires none itself
        given = torch.autograd.grad(loss, inputs, create_graph=True)
        for one in given:
            with pytest.raises(RuntimeError, match="flash_attention has no second derivative; attention 'eager'"):
                one.sum().backward(retain_graph=True)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch uses it in forward mode
def test_operations_refuse_what_their_inputs_derivatives_are_asked_for(calls: Any, fake: ctypes.CDLL) -> None:
    teach(calls, fake)
    q, k, v = (one.detach() for one in draw())
    forward, backward = torch.ops.flopwatch.flash_attention, torch.ops.flopwatch.flash_attention_backward
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(k, v)
        assert native.attend(q, k, v, True) is not None
        with pytest.raises(RuntimeError, match="flash_attention has no derivative in forward mode"):
            flash_attention(q, dual, v, True)
        with pytest.raises(RuntimeError, match="flash_attention has no derivative in forward mode"):
            forward(q, dual, v, True, False)
        with pytest.raises(RuntimeError, match="flash_attention has no derivative in forward mode"):
            backward(q, None, q, dual, v, q, q.new_empty(SHAPE[:3]), True, False)
    with pytest.raises(RuntimeError, match=r"flash_attention has no gradient through torch\.func"):
        torch.func.grad(lambda k: forward(q, k, v, True, False)[0].sum())(k)
    given = backward(q, None, q, k.requires_grad_(), v, q, q.new_empty(SHAPE[:3]), True, False)
    with pytest.raises(RuntimeError, match="flash_attention has no second derivative"):
        given[2].sum().backward()


def test_listeners_see_the_operations(calls: Any, fake: ctypes.CDLL) -> None:
    teach(calls, fake)
    inputs = draw()
    out = native.attend(*inputs, True)
    with Listener() as listener:
        torch.autograd.grad(out, inputs, torch.randn(SHAPE))
        torch.ops.flopwatch.flash_attention(*(one.detach() for one in inputs), True, False)
    assert {"flopwatch.flash_attention_backward.default", "flopwatch.flash_attention.default"} <= set(listener.seen)


def test_an_odd_gradient_goes_to_the_operation(calls: Any, fake: ctypes.CDLL) -> None:
    teach(calls, fake)
    inputs = draw()
    out = native.attend(*inputs, True)
    gradient = TwoTensor(torch.randn(SHAPE), torch.randn(SHAPE))
    given = torch.autograd.grad(out, inputs, gradient)
    assert all(type(one) is TwoTensor for one in given)


@pytest.fixture
def asked_of_python(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of Python's implementations, which answer with sevens."""
    asked = []

    def forward(q: Tensor, k: Tensor, v: Tensor, *results: Tensor, plain: bool | None) -> bool:
        if plain is None:
            return False
        asked.append("forward")
        for result in results[:2]:
            result.fill_(7)
        return True

    def by_python(gradient: Tensor, *_rest: Any, needed: tuple[bool, ...], options: Any) -> tuple[Tensor, ...]:
        asked.append("backward" if options == PLAIN_OPTIONS else "backward with options")
        return tuple(torch.full_like(gradient, 7) for _ in needed)

    monkeypatch.setattr("kernels.attention.hopper.launch.forward", forward)
    monkeypatch.setattr("kernels.attention.flash_triton._gradients", by_python)
    return asked


def test_operations_launch_what_is_known(calls: Any, fake: ctypes.CDLL, asked_of_python: list[str]) -> None:
    q, k, v = (one.detach() for one in draw())
    operations = torch.ops.flopwatch
    assert operations.flash_attention(q, k, v, True, False)[0].eq(7).all()
    assert asked_of_python == ["forward"]
    teach(calls, fake)
    for context in (torch.enable_grad(), torch.no_grad(), torch.inference_mode()):
        with context:
            out, logsumexp = operations.flash_attention(q, k, v, True, False)
            torch.testing.assert_close(out, q + 2 * k + 3 * v)
            assert logsumexp.eq(0.25).all()
            given = operations.flash_attention_backward(q, None, q, k, v, out, logsumexp, True, False)
            for one, factor in zip(given, (1, 2, 3), strict=True):
                torch.testing.assert_close(one, factor * q)
    assert asked_of_python == ["forward"]


def test_values_that_are_not_in_memory_are_not_read_from_it(calls, fake, asked_of_python) -> None:
    """Of a view that is to be negated, and of zeros without memory. torch fills memory with what an operation takes."""
    teach(calls, fake)
    q, k, v = (one.detach() for one in draw())
    negated, zeros = torch._neg_view(q), torch._efficientzerotensor(SHAPE)
    for odd in (negated, zeros):
        assert native.attend(odd, k, v, True) is None
    out, logsumexp = torch.ops.flopwatch.flash_attention(negated, k, v, True, False)
    torch.testing.assert_close(out, -q + 2 * k + 3 * v)
    given = torch.ops.flopwatch.flash_attention_backward(zeros, None, q, k, v, out, logsumexp, True, False)
    assert given[1].eq(0).all(), "the output's gradient is expanded, and then copied"
    assert not asked_of_python
    out = torch.ops.flopwatch.flash_attention(zeros, k, v, True, False)[0]  # an expanded q is unknown
    torch.testing.assert_close(out, attention(torch.zeros(SHAPE), k, v, True))


def test_operations_leave_to_python_what_is_not_known(calls, fake, asked_of_python, monkeypatch) -> None:
    import triton

    teach(calls, fake)
    q, k, v = (one.detach() for one in draw())
    out, logsumexp = q, q.new_empty(SHAPE[:3])
    forward, backward = torch.ops.flopwatch.flash_attention, torch.ops.flopwatch.flash_attention_backward
    assert forward(q, k, v, False, False)[0].eq(7).all()
    assert backward(q, None, q, k, v, out, logsumexp, False, False)[0].eq(7).all()
    assert backward(q, logsumexp, q, k, v, out, logsumexp, True, False)[0].eq(7).all()
    assert asked_of_python == ["forward", "backward", "backward"]
    for options in ({"scale": 0.5}, {"document_ends": torch.tensor([4], dtype=torch.int32)}, {"bottom_right": True}):
        assert backward(q, None, q, k, v, out, logsumexp, True, False, **options)[0].eq(7).all()
        assert asked_of_python.pop() == "backward with options"
        right = attention(q, k, v, True, **options)
        torch.testing.assert_close(forward(q, k, v, True, False, **options)[0], right)
    monkeypatch.setattr(triton.knobs.runtime.launch_exit_hook, "calls", [print])
    assert forward(q, k, v, True, False)[0].eq(7).all()
    assert backward(q, None, q, k, v, out, logsumexp, True, False)[0].eq(7).all()
    assert asked_of_python[3:] == ["forward", "backward"]


def test_compiled_functions_call_without_python(calls: Any, fake: ctypes.CDLL, asked_of_python: list[str]) -> None:
    compiled = torch.compile(flash_attention, fullgraph=True, dynamic=False, backend="aot_eager")
    inputs = draw()
    gradient = torch.randn(SHAPE)
    assert compiled(*inputs, True).eq(7).all()
    assert asked_of_python == ["forward"]
    teach(calls, fake)
    out = compiled(*inputs, True)
    q, k, v = inputs
    torch.testing.assert_close(out, q + 2 * k + 3 * v)
    for given, factor in zip(torch.autograd.grad(out, inputs, gradient), (1, 2, 3), strict=True):
        torch.testing.assert_close(given, factor * gradient)
    assert asked_of_python == ["forward"]


def test_profilers_see_the_calls_by_name(calls: Any, fake: ctypes.CDLL) -> None:
    teach(calls, fake)
    inputs = draw()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        out = native.attend(*inputs, True)
        torch.autograd.grad(out, inputs, torch.randn(SHAPE))
    (forward,) = [one for one in profile.events() if one.name == "flopwatch::flash_attention"]
    backward = [one for one in profile.events() if "flopwatch::Attention" in one.name]
    assert forward.sequence_nr >= 0
    assert {one.sequence_nr for one in backward} == {forward.sequence_nr}, "who belongs together"


def test_an_expanded_gradient_and_one_that_is_unknown(calls, fake, monkeypatch) -> None:
    teach(calls, fake)
    inputs = draw()
    out = native.attend(*inputs, True)
    for given, factor in zip(torch.autograd.grad(out.sum(), inputs), (1, 2, 3), strict=True):
        torch.testing.assert_close(given, torch.full(SHAPE, float(factor)))
    monkeypatch.setattr("kernels.attention.flash_triton._gradients", lambda gradient, *_rest: (gradient,) * 3)
    odd = torch.randn(2, 4, 3, 8).transpose(1, 2)
    out = native.attend(*inputs, True)
    for given in torch.autograd.grad(out, inputs, odd):
        torch.testing.assert_close(given, odd)


def test_determinism_is_kept(calls: Any, fake: ctypes.CDLL, asked_of_python: list[str]) -> None:
    teach(calls, fake, deterministic=False)
    q, k, v = (one.detach() for one in draw())
    backward = torch.ops.flopwatch.flash_attention_backward
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        try:
            backward(q, None, q, k, v, q, q.new_empty(SHAPE[:3]), True, False)
        finally:
            torch.use_deterministic_algorithms(False)
        assert asked_of_python == ["backward"] * deterministic


def test_a_launch_that_fails_says_why(calls: Any, fake: ctypes.CDLL) -> None:
    teach(calls, fake)
    q, k, v = (one.detach() for one in draw())
    out, logsumexp, operations = q, q.new_empty(SHAPE[:3]), torch.ops.flopwatch
    fake.fail_with(1)
    for launch in (
        lambda: native.attend(*draw(), True),
        lambda: operations.flash_attention(q, k, v, True, False),
        lambda: operations.flash_attention_backward(q, None, q, k, v, out, logsumexp, True, False),
    ):
        with pytest.raises(RuntimeError, match="attention: a launch failed: invalid argument"):
            launch()
    fake.fail_with(0)
    assert native.attend(q, k, v, True) is not None


def test_threads_call_and_learn_at_the_same_time(calls: Any, fake: ctypes.CDLL) -> None:
    teach(calls, fake)

    def run(index: int) -> bool:
        q, k, v = draw()
        gradient = torch.randn(SHAPE)
        right = True
        for _ in range(50):
            if index % 4 == 0:
                teach(calls, fake)
            out = native.attend(q, k, v, True)
            (dq, _, dv) = torch.autograd.grad(out, (q, k, v), gradient)
            right &= torch.equal(dq, gradient) and torch.equal(dv, 3 * gradient)
        return right

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(run, range(16)))


META = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [1, 1, 64, 64], "fp4_padded": False}


@pytest.mark.skipif(
    not version("triton").startswith(KNOWN_VERSIONS), reason="the library is used with other versions of Triton"
)
def test_descriptors_are_encoded_as_triton_encodes_them(calls, fake, monkeypatch) -> None:
    """The description of a launch, through the library, against the arguments of Triton's own function."""
    given: list[tuple[Any, ...]] = []
    utils = SimpleNamespace(fill_tma_descriptor=lambda *arguments: given.append(arguments))
    utils.fill_tma_descriptor_tiled = utils.fill_tma_descriptor  # its name in Triton 3.7
    monkeypatch.setattr("triton.runtime.driver._active", SimpleNamespace(utils=utils))
    window = Window.of(1, (2, 1, 100, 64), (12800, 5, 128, 1), (1, 1, 64, 64), offset=64)
    nvidia.make_tensordesc_arg(launching._Place(window, 4096 + 128), META)
    ((address, swizzle, size, kind, block, shape, strides, padding),) = given
    assert padding == 0
    signature = {
        "window": "tensordesc<bf16[1, 1, 64, 64]>", "source": "*bf16", "strides": ("i64", "constexpr"), "count": "i32",
        "scale": "fp32", "CAUSAL": "constexpr",
    }  # fmt: skip
    metadata = SimpleNamespace(tensordesc_meta=[META])
    compiled = SimpleNamespace(
        function=5, packed_metadata=(4, 1, 1000), metadata=metadata, src=SimpleNamespace(signature=signature)
    )  # fmt: skip
    launcher = SimpleNamespace(launch_cooperative_grid=False, launch_pdl=True)
    tensors = [torch.empty(1, dtype=torch.bfloat16)] * 2
    arguments = window, Address(0, 3), (640, 1), -1, 0.5, True
    direct = launching._Direct(compiled, launcher, None, arguments, 9, tensors)
    described = direct.described((6, 2))
    first, *rest = described["parameters"]
    assert first == ("window", 2, 128, kind, swizzle, window.shape, [size * one for one in strides], block)
    numbers = [("value", number) for number in (*window.shape, *window.strides)]
    half = int.from_bytes(ctypes.c_float(0.5), "little")
    assert rest == [
        *numbers, ("address", 6, 6), ("value", 640), ("value", 2**64 - 1), ("value", half)
    ]  # fmt: skip
    assert described | {"parameters": 0} == {
        "function": 5, "grid": 9, "threads": 128, "shared_bytes": 1000, "overlaps": True, "parameters": 0
    }  # fmt: skip
    q = torch.empty(SHAPE)
    kernel = described | {"parameters": [("window", 0, address - 4096, *first[3:])], "grid": 0}
    calls.learn_forward(q, q, q, True, kernel | {"function": function(fake, "prepare_function")})
    assert native.attend(q, q, q, True) is not None
    axes = zip(
        reversed(shape), reversed(block), [1] * 4, [*(size * one for one in reversed(strides[:-1])), 0], strict=True
    )  # fmt: skip
    expected = f"map {q.data_ptr() + 128} type {kind} swizzle 3 rest 0 2 0: " + " ".join(
        "/".join(map(str, axis)) for axis in axes
    )
    assert expected in fake.asked().decode().splitlines()


def test_a_call_works_without_a_learned_plan(calls, fake, monkeypatch, caplog) -> None:
    monkeypatch.setattr(native, "_failed", False)
    q, k, v = (one.detach() for one in draw())
    shifted = torch.randn(NUMBERS + 1)[1:].view(SHAPE)
    calls.learn_backward(q, q, k, v, shifted, q.new_empty(SHAPE[:3]), True, 4, True, backward_kernels(fake))
    assert calls.known() == (0, 0)

    def private_parts_changed(_places: Any) -> Any:
        raise KeyError("elem_size")

    asked = SimpleNamespace(direct=SimpleNamespace(described=private_parts_changed))
    native.learn_forward(q, k, v, True, asked)  # type: ignore[arg-type]
    assert "elem_size" in caplog.text
    caplog.clear()
    native.learn_forward(q, k, v, True, asked)  # type: ignore[arg-type]
    assert not caplog.text, "it is not asked again"


def test_a_host_that_cannot_build_it_warns_once(monkeypatch, tmp_path, caplog) -> None:
    monkeypatch.setattr(native, "LIBRARY", replace(native.LIBRARY, name="flopwatch_never_built"))
    monkeypatch.setattr(native, "_loaded", None)
    monkeypatch.setattr(native, "_failed", False)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    direct = SimpleNamespace(described=lambda _places: {"grid": 1})
    launch = SimpleNamespace(direct=direct)
    q, k, v = draw()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            native.learn_forward(q, k, v, True, launch)  # type: ignore[arg-type]
            assert native.attend(q, k, v, True) is None
    (record,) = caplog.records
    assert "no compiler 'no-such-compiler'" in record.getMessage()
