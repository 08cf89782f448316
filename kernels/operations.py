"""Operations other than attention, each with its plain PyTorch, as `kernel` jobs measure them.

`liger` is Liger-Kernel's function, where that is installed.
"""

import functools
import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from . import liger
from .registry import DEVICES, DTYPES, Implementation, Kernel, Vary

_PACKAGE: Any = importlib.import_module(__name__.rpartition(".")[0])
"""It imports its functions on first use."""
EPSILON = 1e-5
HEAD_DIM = 64
"""Size of a head in `rope`."""
THETA = 10_000.0
VOCABULARY = 10_000
"""Size of the vocabulary in `linear_cross_entropy`: that of most model presets."""
GOLDEN_RATIO = 0.6180339887498949
EVERYWHERE = dict.fromkeys(DEVICES, DTYPES)
OF_LIGER = {"cuda": DTYPES - {"float64"}}
Function = Callable[..., Tensor]


def _implementations(
    name: str, by_compiler: Function, triton: Function | None = None, liger: Function | None = None
) -> list[Implementation]:
    """Return the plain PyTorch compiled, our kernel, and Liger-Kernel's."""
    found = [
        Implementation("compiled", by_compiler, EVERYWHERE, of=name),
        Implementation("triton", triton or _ours(name), {"cuda": DTYPES}, of=name),
    ]
    if liger is not None:
        found.append(Implementation("liger", liger, OF_LIGER, of=name))
    return found


def _ours(name: str) -> Function:
    """Return the kernel of this name, which is imported when it is called."""
    return lambda *inputs: getattr(_PACKAGE, name)(*inputs)


def compiled(function: Function) -> Function:
    """Return the function through torch.compile, anew for each size."""

    def call(*inputs: Tensor) -> Tensor:
        from . import compiling

        with compiling.each_size_compiled():
            out: Tensor = compiling.compiled(function)(*inputs)
        return out

    return call


def _of_all_sizes(first: int, last: int) -> Vary:
    """Give the rows of the first input sizes of 2^first to 2^last; a single row is small."""

    def vary(x: Tensor, *others: Tensor) -> Sequence[Tensor]:
        # Multiples of the golden ratio fill an interval evenly, however many they are.
        places = (torch.arange(len(x), device=x.device, dtype=torch.float64) * GOLDEN_RATIO + 0.12) % 1
        return x * torch.exp2(first + (last - first) * places).float().unsqueeze(-1), *others

    return vary


def _plain_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight, EPSILON)


rms_norm = Kernel(
    "rms_norm",
    lambda rows, columns: ((rows, columns), (columns,)),
    _plain_rms_norm,
    kernels=_implementations(
        "rms_norm",
        compiled(_plain_rms_norm),
        lambda x, weight: _PACKAGE.rms_norm(x, weight, EPSILON),
        lambda x, weight: liger.rms_norm(x, weight, EPSILON),
    ),
    # For rows of size 2^-8, the mean square is EPSILON.
    variations={"rows of all sizes": _of_all_sizes(-10, 4)},
)
"""x (rows, columns) divided by the root of its rows' mean squares, times weight (columns)."""


def _plain_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


swiglu = Kernel(
    "swiglu",
    lambda rows, columns: ((rows, columns), (rows, columns)),
    _plain_swiglu,
    kernels=[
        Implementation("compiled", compiled(_plain_swiglu), EVERYWHERE, of="swiglu"),
        Implementation("liger", liger.swiglu, OF_LIGER, of="swiglu", has_backward=False),
    ],
    variations={"rows of all sizes": _of_all_sizes(-4, 5)},
)
"""silu(gate) times up, both (rows, columns). Liger-Kernel's has no backward pass that leaves its inputs as they are.
There is none of ours, since torch.compile's is as fast as a copy."""


def rotary_angles(context_length: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of position * theta^(-2i / head_dim), each (context_length, head_dim / 2), float32."""
    # In float64: a float32 product loses the angle at long contexts.
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(context_length, dtype=torch.float64), frequencies)
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x[2i], x[2i+1]) by its position's angle; x is (…, sequence, head_dim)."""
    even, odd = x[..., 0::2], x[..., 1::2]
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return rotated.flatten(-2).to(x.dtype)


@functools.lru_cache(maxsize=4)
def _angles(positions: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    cos, sin = rotary_angles(positions, head_dim, THETA)
    return cos.to(device), sin.to(device)


def _rope(turn: Function) -> Function:
    """The operation on x (positions, heads, head_dim), in whose memory a position's heads follow each other."""
    # squeeze, not [0]: the gradient of an index is a copy into zeros, which takes longer than the kernel.
    return lambda x: turn(x.transpose(0, 1)[None], *_angles(len(x), x.shape[-1], x.device)).squeeze(0).transpose(0, 1)


rope = Kernel(
    "rope",
    lambda rows, columns: ((rows, columns, HEAD_DIM),),
    _rope(rotate),
    kernels=_implementations("rope", _rope(compiled(rotate)), _rope(_ours("rope"))),
    reads_inputs_backward=False,
    # Models compute angles in float32, which rounds them in proportion to the position, at the 4096th by up to 2e-4.
    rounding_of_position=1 / 500,
)
"""Rotary embedding of x (rows: positions, columns: heads, HEAD_DIM)."""


@functools.lru_cache(maxsize=4)
def _targets(rows: int, vocabulary: int, device: torch.device) -> Tensor:
    return torch.arange(rows, device=device) * 7919 % vocabulary


def _scaled(loss: Function) -> Function:
    """The mean loss times a scale."""

    def scaled(hidden: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        targets = _targets(len(hidden), len(weight), hidden.device)
        return (loss(hidden, weight, targets) * scale).to(hidden.dtype)

    return scaled


def _plain_linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = hidden @ weight.T
    return functional.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets)


def _chunked_linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    from .chunked_cross_entropy import linear_cross_entropy

    return linear_cross_entropy(hidden, weight, targets)


def _confident(hidden: Tensor, weight: Tensor, scale: Tensor) -> Sequence[Tensor]:
    """Give most of the probability to the target, and half of the rest to the last words of the vocabulary.

    Normal inputs make the softmax one-hot at another word than the target: the loss is the difference of two logits.
    Here it is about 0.1, and a hundredth of the probability a tenth of it.
    """
    vocabulary, columns = weight.shape
    last = max(1, vocabulary // 32)
    weight /= math.sqrt(columns)
    targets = weight[_targets(len(hidden), vocabulary, hidden.device)]
    hidden += targets * (11.0 / targets.square().sum(-1, keepdim=True))
    hidden[:, 0] = 4.0
    weight[:, 0] = 0.0
    weight[-last:, 0] = math.log(31) / 4.0
    return hidden, weight, scale


def _large_logits(hidden: Tensor, weight: Tensor, scale: Tensor) -> Sequence[Tensor]:
    """Let exp overflow unless the maximum is subtracted."""
    return hidden * (60 / math.sqrt(hidden.shape[-1])), weight, scale


linear_cross_entropy = Kernel(
    "linear_cross_entropy",
    lambda rows, columns: ((rows, columns), (VOCABULARY, columns), (1,)),
    _scaled(_plain_linear_cross_entropy),
    kernels=[
        Implementation("chunked", _scaled(_chunked_linear_cross_entropy), EVERYWHERE, of="linear_cross_entropy"),
        *_implementations(
            "linear_cross_entropy",
            _scaled(compiled(_plain_linear_cross_entropy)),
            _scaled(_ours("linear_cross_entropy")),
            _scaled(liger.linear_cross_entropy),
        ),
    ],
    variations={"probable targets": _confident, "large logits": _large_logits},
    slope=4e-4,  # probabilities are exponentials of rounded logits, as attention's weights are
)
"""scale times the mean cross-entropy of hidden (rows, columns) times weightᵀ (VOCABULARY, columns)."""


def _plain_weighted_sum(x: Tensor, weight: Tensor) -> Tensor:
    return (x * weight).sum(-1)


weighted_sum = Kernel(
    "weighted_sum",
    lambda rows, columns: ((rows, columns), (columns,)),
    _plain_weighted_sum,
    kernels=_implementations("weighted_sum", compiled(_plain_weighted_sum)),
)
"""x (rows, columns) times weight (columns), summed over columns."""
