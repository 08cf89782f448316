"""The C++ attention: any sizes and tiles, extreme numbers, gradients, memory, and how it is loaded."""

import math
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.attention import cpu
from kernels.attention.cpu import accessors, operations
from kernels.attention.reference import attention

FUNCTIONS = [cpu.naive, cpu.blocked, cpu.fused, cpu.flash]
AssertClose = Callable[[Tensor, Tensor], None]


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def drawn(
    queries: int, keys: int, head_dim: int, seed: int, batch: int = 2, heads: int = 3, shared: int = 1
) -> list[Tensor]:
    """q, k and v; `shared` heads of queries share keys and values."""
    sizes = (heads * shared, queries), (heads, keys), (heads, keys)
    return [draw(batch, *size, head_dim, seed=seed + at) for at, size in enumerate(sizes)]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_all_agree_with_the_oracle_for_random_sizes(function, is_causal, rng, assert_close) -> None:
    for _ in range(6):
        queries, keys, head_dim = rng.randint(1, 150), rng.randint(1, 150), rng.randint(1, 90)
        tensors = drawn(queries, keys, head_dim, rng.randrange(2**32), heads=2, shared=rng.randint(1, 3))
        oracle = attention(*[tensor.double() for tensor in tensors], is_causal)
        assert_close(function(*tensors, is_causal), oracle)


@pytest.mark.parametrize(("br", "bc"), [(1, 1), (1, 200), (5, 7), (16, 64), (48, 1), (70, 200), (128, 7)])
def test_flash_takes_any_tiles_forward_and_backward(br, bc, is_causal, rng, assert_close) -> None:
    seed = rng.randrange(2**32)
    inputs = drawn(rng.randint(2, 131), rng.randint(2, 131), 20, seed, heads=2, shared=1 + br % 2)
    tensors = [tensor.requires_grad_() for tensor in inputs]
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    oracle = attention(*exact, is_causal)
    grad = draw(*oracle.shape, seed=seed + 3)
    out = cpu.flash(*tensors, is_causal, br=br, bc=bc)
    assert_close(out.detach(), oracle.detach())
    out.backward(grad)
    oracle.backward(grad.double())
    for tensor, reference in zip(tensors, exact, strict=True):
        assert_close(tensor.grad, reference.grad)


def test_four_indices_find_a_number_and_no_other(rng: random.Random) -> None:
    for _ in range(20):
        shape = [rng.randint(1, 6) for _ in range(4)]
        tensor = draw(*shape, seed=rng.randrange(2**32))
        at = tuple(rng.randrange(size) for size in shape)
        assert cpu.read(tensor, at) == tensor[at].item() == tensor.flatten()[accessors.offset(shape, at)].item()
        before = tensor.clone()
        cpu.write(tensor, at, 2.5)
        before[at] = 2.5
        assert torch.equal(tensor, before)


@pytest.mark.parametrize(
    ("tensor", "at", "error"),
    [
        (torch.zeros(2, 3, 4, 5), (0, 0, 4, 0), IndexError),
        (torch.zeros(2, 3, 4, 5), (0, -1, 0, 0), IndexError),
        (torch.zeros(2, 3, 4, 5), (0, 0, 0), ValueError),
        (torch.zeros(3, 4, 5), (0, 0, 0, 0), ValueError),
        (torch.zeros(2, 3, 4, 5).transpose(2, 3), (0, 0, 0, 0), ValueError),
        (torch.zeros(2, 3, 4, 5, dtype=torch.float64), (0, 0, 0, 0), TypeError),
        (torch.zeros(2, 3, 4, 5, device="meta"), (0, 0, 0, 0), TypeError),
    ],
    ids=str,
)
def test_no_accessor_leaves_its_tensor(tensor: Tensor, at: tuple[int, ...], error: type[Exception]) -> None:
    with pytest.raises(error):
        cpu.read(tensor, at)
    with pytest.raises(error):
        cpu.write(tensor, at, 1.0)


def test_autograd_knows_of_a_write() -> None:
    weight = torch.ones(1, 1, 2, 2, requires_grad=True)
    with pytest.raises(RuntimeError, match="needs a gradient"):
        cpu.write(weight, (0, 0, 0, 0), 3.0)
    with torch.no_grad():
        cpu.write(weight, (0, 0, 0, 0), 3.0)
    saved = torch.ones(1, 1, 2, 2)
    product = (weight * saved).sum()
    cpu.write(saved, (0, 0, 0, 0), 3.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.parametrize("block", [1, 3, 32, 1000])
def test_blocked_takes_any_block(block: int, assert_close: AssertClose) -> None:
    tensors = drawn(45, 67, 33, seed=1)
    assert_close(cpu.blocked(*tensors, True, block=block), attention(*[tensor.double() for tensor in tensors], True))


def test_flash_is_reproducible_bit_for_bit() -> None:
    q, k, v = (tensor.requires_grad_() for tensor in drawn(150, 150, 32, seed=2))
    strided = [tensor.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for tensor in (q, k, v)]
    assert not strided[0].is_contiguous()
    results, threads = [], torch.get_num_threads()
    for count, tensors in ((1, (q, k, v)), (2, (q, k, v)), (3, strided)):
        torch.set_num_threads(count)
        try:
            out = cpu.flash(*tensors, True, br=16, bc=32)
            results.append([out, *torch.autograd.grad(out.square().sum(), tensors)])
        finally:
            torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_large_scores_do_not_overflow(function: Callable[..., Tensor], assert_close: AssertClose) -> None:
    q, k, v = drawn(60, 200, 16, seed=4)
    # Powers of two, so that scores are exact: equal ones, and there are some at the top, must stay equal.
    q, k = torch.sign(q) * 2**20, torch.sign(k) * 2**20
    assert_close(function(q, k, v), attention(q.double(), k.double(), v.double()))


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_scores_of_minus_infinity_weigh_nothing(function: Callable[..., Tensor], assert_close: AssertClose) -> None:
    q, k, v = drawn(33, 300, 8, seed=5)
    q[..., 0] = 1
    k[..., :270, 0] = -math.inf
    assert_close(function(q, k, v), attention(q.double(), k[..., 270:, :].double(), v[..., 270:, :].double()))
    assert torch.isnan(function(q, k[..., :200, :], v[..., :200, :])).all()  # as softmax of nothing but -infinity


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_nan_and_infinity_are_the_references(function: Callable[..., Tensor], bad: float) -> None:
    for at in range(3):
        q, k, v = drawn(70, 70, 16, seed=6)
        q[..., 0] = 1
        (q, k, v)[at][0, 1, 3, 0] = bad
        assert torch.equal(torch.isfinite(function(q, k, v)), torch.isfinite(attention(q, k, v))), "qkv"[at]


def test_memory_is_what_is_allocated() -> None:
    tensors = drawn(1024, 1024, 32, seed=7, batch=1, heads=4)
    threads = torch.get_num_threads()
    expected = {
        "naive": 4 * 2**20,
        "blocked": 4 * 2**20,
        "fused": threads * 1024 * 4,
        "flash": threads * (2 * 32 + 128 + 3) * 32 * 4,
    }
    for function in FUNCTIONS:
        name = function.__name__
        memory = cpu.memory(name, 1, 4, 1024, 1024, 32)
        assert memory == cpu.ForwardMemory(working=expected[name], output=2**19)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            function(*tensors)
        taken = [event.self_cpu_memory_usage for event in profile.events() if event.self_cpu_memory_usage > 0]
        # flash's output comes with its log-sum-exp, one number per query
        assert sum(taken) == memory.total + (4 * 4 * 1024 if name == "flash" else 0)
    assert cpu.memory("naive", 1, 4, 1024, 1024, 32).total == cpu.memory("blocked", 1, 4, 1024, 1024, 32).total
    assert cpu.memory("naive", 1, 4, 1024, 1024, 32).total == 4.5 * 2**20
    assert cpu.memory("flash", 1, 4, 1024, 1024, 32).working == cpu.memory("flash", 1, 4, 8192, 8192, 32).working


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of the copies that torch 2.14 checks with
def test_flash_is_a_well_formed_operation_of_torch() -> None:
    tensors = [tensor.requires_grad_() for tensor in drawn(20, 30, 16, seed=8)]
    torch.library.opcheck(operations._flash, (*tensors, True, 16, 16))
    torch.library.opcheck(operations._blocked, (*[tensor.detach() for tensor in tensors], True, 8))


def test_flash_compiles_without_a_graph_break() -> None:
    tensors = [tensor.requires_grad_() for tensor in drawn(20, 20, 16, seed=10)]
    compiled = torch.compile(lambda q, k, v: 2 * cpu.flash(q, k, v, True), backend="aot_eager", fullgraph=True)
    out, expected = compiled(*tensors), 2 * cpu.flash(*tensors, True)
    assert torch.equal(out, expected)
    gradients = [torch.autograd.grad(result.square().sum(), tensors) for result in (out, expected)]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_tiles_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="br must be at least 1, not 0"):
        cpu.flash(*drawn(8, 8, 4, seed=9), br=0)
    with pytest.raises(ValueError, match="k must be \\(batch"):
        cpu.naive(*drawn(8, 0, 4, seed=9))
