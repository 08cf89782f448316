"""Every exported operation has the right derivative or refuses it, in every mode: none is silently zero.

Operations are found by walking the exports, so a new one without an entry in INPUTS fails.
"""

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional

pytest.importorskip("triton")

import kernels
from kernels import chunked_cross_entropy, operations
from kernels.attention import cpu
from kernels.attention.reference import attention
from kernels.derivatives import NoDerivative
from kernels.registry import ATTENTION, KERNELS

Function = Callable[..., Tensor]
ROWS, COLUMNS, VOCABULARY = 3, 8, 11
QKV = ((1, 1, 3, 16),) * 3
NO_OPERATIONS = {"BuildError", "CompilerMissing", "ForwardMemory", "memory", "read", "write"}
"""Exports that compute nothing of tensors, or one number as `Tensor.item` does (tests/kernels/attention/cpu)."""
THEIRS = {"compiled", "flash_attn", "flash_attn_3", "flash_attn_4", "flex", "liger"}
"""Implementations whose derivatives are those of torch.compile or of other libraries."""


def targets(device: str) -> Tensor:
    return torch.arange(ROWS, device=device)


def whole(hidden: Tensor, weight: Tensor) -> Tensor:
    return functional.cross_entropy(hidden @ weight.T, targets(str(hidden.device)))


def in_chunks(hidden: Tensor, weight: Tensor) -> Tensor:
    return chunked_cross_entropy.linear_cross_entropy(hidden, weight, targets(str(hidden.device)))


def turned(function: Function) -> Function:
    def turn(x: Tensor) -> Tensor:
        cos, sin = (table.to(x.device) for table in operations.rotary_angles(ROWS, COLUMNS, 10.0))
        return function(x, cos, sin)

    return turn


INPUTS: dict[str, tuple[tuple[tuple[int, ...], ...], Callable[[Function], Function], Function]] = {
    "linear_cross_entropy": (
        ((ROWS, COLUMNS), (VOCABULARY, COLUMNS)),
        lambda function: lambda hidden, weight: function(hidden, weight, targets(str(hidden.device))),
        whole,
    ),
    "rms_norm": (
        ((ROWS, COLUMNS), (COLUMNS,)),
        lambda function: function,
        lambda x, weight: functional.rms_norm(x, weight.shape, weight, 1e-5),
    ),
    "rope": (((ROWS, COLUMNS),), turned, turned(operations.rotate)),
    "weighted_sum": (((ROWS, COLUMNS), (COLUMNS,)), lambda function: function, lambda x, weight: x @ weight),
    **{
        name: (QKV, lambda function: function, attention)
        for name in ("flash_attention", "naive", "blocked", "fused", "flash")
    },
    **{
        name: (QKV, lambda function: function.apply, attention)
        for name in ("TiledFlashAttention2", "TritonFlashAttention2")
    },
}
"""The shapes of an operation's inputs, how it is called with them, and its plain PyTorch; all of which are tested."""


def exports(module: types.ModuleType) -> Iterator[tuple[str, Any]]:
    for name in module.__all__:
        exported = getattr(module, name)
        if not isinstance(exported, types.ModuleType):
            yield name, exported
        elif exported.__name__ != "kernels.registry":  # whose exports are its registries
            yield from exports(exported)


def walked(device: str) -> Iterator[tuple[str, tuple[tuple[int, ...], ...], Function, Function]]:
    """Name, shapes, function and plain function of every operation, both of the exports and of the registries."""
    for name, exported in exports(kernels):
        if name in NO_OPERATIONS or name == "adamw" or (exported in vars(cpu).values() and device != "cpu"):
            continue
        assert name in INPUTS, (
            f"{name} is exported: add it to INPUTS, and see that its derivatives are right or refused"
        )
        shapes, called, plain = INPUTS[name]
        yield name, shapes, called(exported), plain
    yield "chunked", INPUTS["linear_cross_entropy"][0], in_chunks, whole
    for name in ATTENTION.names():
        one = ATTENTION.load(name)
        if name not in THEIRS and runs(one, device):
            yield f"attention {name}", QKV, functools.partial(one.function, is_causal=True), causal
    for name in KERNELS.names():
        kernel = KERNELS.load(name)
        for one in kernel.kernels:
            if one.name not in THEIRS:
                yield f"{name} {one.name}", kernel.shapes(ROWS, COLUMNS), one.function, kernel.plain


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, True)


def runs(one: Any, device: str) -> bool:
    """Also in Triton's interpreter, and only if torch has its kernel."""
    if device not in one.dtypes and one.name != "triton":
        return False
    try:
        one.function(*(torch.ones(shape, device=device, dtype=dtype_of(one.name, device)) for shape in QKV), True)
    except (RuntimeError, ValueError) as error:
        if "No available kernel" in str(error) or "cannot take these inputs" in str(error):
            return False
        raise
    return True


def dtype_of(name: str, device: str) -> torch.dtype:
    half = device == "cuda" and name.removeprefix("attention ") in {"hopper", "sdpa_flash", "sdpa_cudnn"}
    return torch.bfloat16 if half else torch.float32


def along(function: Function, inputs: list[Tensor], moved: list[int]) -> Function:
    """The function on a line through the inputs of these indices."""
    generator = torch.Generator().manual_seed(1)
    ways = [torch.randn(one.shape, generator=generator, dtype=torch.float64).to(one) for one in inputs]

    def on_line(t: Tensor) -> Tensor:
        return function(
            *(one + t * way if n in moved else one for n, (one, way) in enumerate(zip(inputs, ways, strict=True)))
        )

    return on_line


def penalty(function: Function, inputs: list[Tensor], moved: list[int], loss: Function) -> list[Tensor]:
    """The gradients of the loss, plus a penalty on its gradients."""
    leaves = [one.detach().requires_grad_(n in moved) for n, one in enumerate(inputs)]
    of = [leaf for leaf in leaves if leaf.requires_grad]
    value = loss(function(*leaves))
    gradients = torch.autograd.grad(value, of, create_graph=True)
    return list(torch.autograd.grad(value + sum(one.square().sum() for one in gradients), of))


def batched(function: Function, inputs: list[Tensor], moved: list[int]) -> list[Tensor]:
    """Two backward passes at once, as `torch.autograd.functional.jacobian(…, vectorize=True)` makes them."""
    leaves = [one.detach().requires_grad_(n in moved) for n, one in enumerate(inputs)]
    out = function(*leaves)
    weights = torch.stack([torch.ones_like(out), torch.linspace(-1, 1, out.numel()).to(out).view(out.shape)])
    return list(torch.autograd.grad(out, [one for one in leaves if one.requires_grad], weights, is_grads_batched=True))


def dual(line: Function, t: Tensor) -> Tensor:
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(line(forward_ad.make_dual(t, torch.ones_like(t)))).tangent
        return torch.zeros(()) if tangent is None else tangent


def of_line(mode: Callable[[Function, Tensor], Any]) -> Callable[..., list[Tensor]]:
    def derivative(function: Function, inputs: list[Tensor], moved: list[int]) -> list[Tensor]:
        t = torch.tensor(0.3, dtype=inputs[0].dtype, device=inputs[0].device)
        result = mode(along(function, inputs, moved), t)
        return list(result) if isinstance(result, tuple) else [result]

    return derivative


def total(line: Function) -> Function:
    return lambda t: line(t).float().square().sum()


MODES: dict[str, Callable[..., list[Tensor]]] = {
    "penalty": lambda *of: penalty(*of, torch.sum),
    "penalty of squares": lambda *of: penalty(*of, lambda out: out.square().sum()),
    "batched": batched,
    "forward_ad": of_line(dual),
    "jvp": of_line(lambda line, t: torch.func.jvp(line, (t,), (torch.ones_like(t),))),
    "grad": of_line(lambda line, t: torch.func.grad(total(line))(t)),
    "vmap": of_line(lambda line, t: torch.func.vmap(line)(torch.stack([t, 2 * t]))),
    "vmap of grad": of_line(lambda line, t: torch.func.vmap(torch.func.grad(total(line)))(torch.stack([t, 2 * t]))),
    "jacfwd": of_line(lambda line, t: torch.func.jacfwd(line)(t)),
    "jacrev": of_line(lambda line, t: torch.func.jacrev(lambda t: total(line)(t) * torch.ones(2).to(t))(t)),
    "hessian": of_line(lambda line, t: torch.func.hessian(total(line))(t)),
    "jvp of vmap": of_line(
        lambda line, t: torch.func.jvp(torch.func.vmap(line), (t.expand(2),), (torch.ones_like(t).expand(2),))
    ),
}


ONE_BY_ONE = ("penalty", "forward_ad")
"""Modes that are tested for each input of an export, too."""


def verdict(name: str, mode: str, function: Function, plain: Function, inputs: list[Tensor], moved: list[int]) -> str:
    """Return "right" or "refused", or how it is wrong."""
    try:
        given = MODES[mode](function, inputs, moved)
    except NoDerivative as error:
        words = {word for part in name.split() for word in (part, part.replace("chunked", "linear_cross_entropy"))}
        named = any(word in str(error) for word in words | {"flash_attention"}) and "; " in str(error)
        return "refused" if named else f"an error that does not name it: {error}"
    except (RuntimeError, NotImplementedError, SystemError) as error:
        # torch 2.14 warns of vmap's performance while the error is on its way.
        is_wrapped = "NoDerivative" in str(error) or isinstance(error.__cause__, NoDerivative)
        return "refused" if is_wrapped or name.startswith("attention sdpa") else f"an error of torch: {error}"
    right = MODES[mode](plain, [one.double() for one in inputs], moved)
    loose = {"rtol": 5e-2, "atol": 2e-2} if inputs[0].dtype == torch.bfloat16 else {"rtol": 1e-2, "atol": 1e-3}
    close = [torch.allclose(one.double(), other, **loose) for one, other in zip(given, right, strict=True)]
    return "right" if all(close) else "silently wrong"


def found(name: str, shapes: Any, function: Function, plain: Function, device: str) -> dict[tuple[Any, ...], str]:
    """The verdict on each mode, by the mode and the indices of the inputs of which derivatives are taken."""
    generator = torch.Generator().manual_seed(0)
    draws = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    inputs = [one.to(device, dtype_of(name, device)) for one in draws]
    every = list(range(len(inputs)))
    alone = [] if " " in name else [[n] for n in every]
    return {
        (mode, *moved): verdict(name, mode, function, plain, inputs, moved)
        for mode in MODES
        for moved in [every, *(alone if mode in ONE_BY_ONE else [])]
    }


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch, _small_tiles_in_the_interpreter: None) -> None:
    monkeypatch.setattr(operations, "VOCABULARY", VOCABULARY)


pytestmark = [
    # torch says so of vmap, and uses torch.jit.script in forward mode.
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
    # Its compiler does this itself.
    pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning"),
    pytest.mark.usefixtures("_small"),
]


def test_every_derivative_is_right_or_refused(device: str) -> None:
    table = {name: found(name, *of, device) for name, *of in walked(device)}
    for name, row in table.items():
        print(f"{name:29}", *(f"{mode} {word}" for (mode, *_), word in row.items()), sep=" | ")
    wrong = {(name, *key): word for name, row in table.items() for key, word in row.items()
             if word not in ("right", "refused")}  # fmt: skip
    assert not wrong
    assert {name for name, row in table.items() if set(row.values()) == {"right"}} >= {"TiledFlashAttention2"}


OF_THE_COMPILER = (
    "does not currently support double backward",
    "Trying to use forward AD with aten::copy that does not support it",
    "Attempted to wrap a dual tensor input",  # from torch 2.14 on
)
"""torch.compile's own refusals."""
COMPILED = ("chunked", "flash_attention", "linear_cross_entropy", "rms_norm", "TiledFlashAttention2")
"""One of each kind, since compiling takes long."""


@pytest.mark.long
def test_compiled_derivatives_are_right_or_refused(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch's compiler traces, without making code of it."""
    ours = {name: of for name, *of in walked(device) if name in COMPILED}
    assert len(ours) == len(COMPILED)
    wrong = {}
    for name, (shapes, function, plain) in ours.items():
        inputs = [torch.randn(shape).to(device) for shape in shapes]
        for mode in ("penalty", "forward_ad"):
            torch._dynamo.reset()
            compiled = torch.compile(lambda *of, function=function: function(*of), backend="aot_eager", fullgraph=True)
            word = verdict(name, mode, compiled, plain, inputs, list(range(len(inputs))))
            if word not in ("right", "refused") and not any(of_torch in word for of_torch in OF_THE_COMPILER):
                wrong[name, mode] = word
    torch._dynamo.reset()
    assert not wrong


def test_angles_get_no_gradient() -> None:
    """Also those that vmap hides from the forward pass."""
    cos = torch.ones(2, ROWS, COLUMNS // 2, requires_grad=True)
    with pytest.raises(ValueError, match="cos and sin get no gradient"):
        kernels.rope(torch.ones(ROWS, COLUMNS), cos[0], cos[0])
    turned = torch.func.vmap(kernels.rope)(torch.ones(2, ROWS, COLUMNS, requires_grad=True), cos, cos)
    with pytest.raises(ValueError, match="cos and sin get no gradient"):
        turned.sum().backward()


def test_updates_are_not_differentiated(device: str) -> None:
    def update(parameter: Tensor, gradient: Tensor, lr: Tensor) -> None:
        moments = torch.zeros_like(parameter).detach(), torch.zeros_like(parameter).detach()
        step = torch.zeros((), device=device)
        options = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
        kernels.adamw([parameter], [gradient], *([one] for one in moments), [step], lr, **options)

    parameter = torch.ones(20, device=device, requires_grad=True)
    lr = torch.tensor(0.1, device=device)
    (gradient,) = torch.autograd.grad(parameter.square().sum(), parameter, create_graph=True)
    words = r"adamw has no .*; torch\.optim\.AdamW\(…, differentiable=True\) has"
    for inputs in (
        (parameter, gradient, lr),
        (parameter, gradient.detach(), lr.clone().requires_grad_()),
        (2 * parameter, gradient.detach(), lr),
    ):
        with pytest.raises(NoDerivative, match=words):
            update(*inputs)
    with forward_ad.dual_level(), pytest.raises(NoDerivative, match=words):
        update(parameter, forward_ad.make_dual(gradient.detach(), parameter), lr)
    with pytest.raises(NoDerivative, match=words):
        torch.func.grad(lambda lr: (update(parameter, gradient.detach(), lr), lr)[1])(lr)
    assert parameter.eq(1).all()
    with torch.no_grad():
        update(parameter, gradient, lr)
    update(parameter, gradient.detach(), lr)
    assert parameter.lt(1).all()
