"""Formulas of parallel training: bytes on each device, and the batch at which computation hides communication.

A formula is stored as text, and its value is computed exactly from this text, so the shown formula is the computed one.
Its symbols are:

- P, G, O: bytes of parameters, gradients and optimizer state of one replica; K: bytes of the 16-bit copies of the
  weights that autocast keeps; A: bytes saved for the backward pass.
- X, Y: devices along the data-parallel and along the tensor-parallel axis of the mesh; Mx, My: links of a device that
  serve each axis; W: bytes per second of one link; C: FLOP per second of one device.
- f: share of the activations that is sharded; s: 1 if sharded weights travel in more than 16 bits, so that autocast
  keeps its copies of them, else 0; R, M: bytes of one device.
- k: FLOP per token of a block's forward pass; g: bytes of a block's weights, as devices send them; m: bytes per token
  that tensor parallelism exchanges for a block's forward pass.

It assumes equal shards, and rings of many devices: N devices move (N - 1) / N of the bytes that the formulas count.
Communication is that of the forward pass, which has the most of it per FLOP. No torch here.

Sources:

- ZeRO: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, section 5.
- Megatron: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, section 4.2.2.
- Scaling book: Austin et al., "How to Scale Your Model", 2025, part 5, "How to Parallelize a Transformer for Training".
- CS336: Stanford CS336, assignment 2, problem communication_accounting.
"""

import ast
import functools
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

OPERATORS: Final[Mapping[type, Callable[[Fraction, Fraction], Fraction]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: lambda base, exponent: Fraction(base**exponent),
}
FUNCTIONS: Final[Mapping[str, Callable[..., Fraction]]] = {
    "floor": lambda number: Fraction(math.floor(number)),
    "max": max,
}


def evaluate(text: str, symbols: Mapping[str, float]) -> Fraction:
    """Compute the value of a formula exactly. A float counts as the decimal number that it is written as.

    Args:
        text: Numbers, symbols, + - * / **, parentheses, floor(…) and max(…, …).

    Raises:
        ValueError: the text has something else in it, or a symbol without a value.
        ZeroDivisionError: a divisor is 0.
    """

    def value(node: ast.expr) -> Fraction:
        match node:
            case ast.Constant(value=int() | float() as number):
                return _exact(number)
            case ast.Name(id=name) if name in symbols:
                return _exact(symbols[name])
            case ast.BinOp(left=left, op=operation, right=right) if type(operation) in OPERATORS:
                return OPERATORS[type(operation)](value(left), value(right))
            case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in FUNCTIONS:
                return FUNCTIONS[name](*map(value, arguments))
        raise ValueError(f"{text!r} is no formula of {', '.join(symbols)}: {ast.unparse(node)!r}")

    return value(_parsed(text))


@functools.cache
def _parsed(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _exact(number: float) -> Fraction:
    return Fraction(number) if isinstance(number, int) else Fraction(repr(float(number)))


def pretty(text: str) -> str:
    """Write a formula for people: 2 * V * D**2 becomes 2·V·D²."""
    return text.replace(" * ", "·").replace("**2", "²")


@dataclass(frozen=True)
class Formula:
    """One quantity: its formula, its unit, and where the formula comes from."""

    quantity: str
    text: str
    unit: str
    source: str

    def value(self, symbols: Mapping[str, float]) -> Fraction:
        """Compute the quantity from the values of its symbols; see `evaluate`."""
        return evaluate(self.text, symbols)


DATA_PARALLEL = Formula("data parallelism: bytes per device", "P + G + O + K + A", "bytes", "ZeRO, figure 1")
"""Each device has a whole replica, and a batch of its own (ZeRO, figure 1, baseline)."""

SHARDED_OPTIMIZER = Formula(
    "data parallelism, sharded optimizer: bytes per device", "P + G + O / X + K + A", "bytes", "ZeRO, section 5.1"
)
"""Each device keeps the optimizer state of its share of the parameters (ZeRO stage 1, section 5.1, P_os)."""

FULLY_SHARDED = Formula(
    "fully sharded data parallelism: bytes per device", "(P + G + O) / X + s * K + A", "bytes", "ZeRO, section 5.3"
)
"""Parameters, gradients and optimizer state are sharded (ZeRO stage 3, section 5.3, P_os+g+p). Weights that are sent in
16 bits (s = 0) leave autocast nothing to copy. Those of the block at work, which are gathered for it, come on top."""

SHARDED_ACTIVATIONS = Formula(
    "fully sharded, and f of the activations: bytes per device",
    "(P + G + O) / X + s * K + (1 - f) * A + f * A / X",
    "bytes",
    "CS336 (b)",
)
"""As fully sharded, with the share f of the activations sharded, too (CS336, part b, has f = 1/2)."""

TENSOR_PARALLEL = Formula(
    "tensor parallelism: bytes per device", "(P + G + O + K + A) / Y", "bytes", "Megatron, eq. 4; Scaling book, part 5"
)
"""Each device has a share of every matrix, and of every activation: inside of attention and feed-forward layer by heads
and by d_ff, between them by sequence (Megatron, section 4.2.2, equation 4) or by d_model (Scaling book, In[B, D_Y])."""

MESH = Formula(
    "mesh, X-way fully sharded × Y-way tensor: bytes per device",
    "((P + G + O) / X + s * K + A) / Y",
    "bytes",
    "ZeRO, section 5.3; Megatron, eq. 4",
)
"""Both at once: each tensor-parallel share of a replica is fully sharded over X devices (Scaling book, part 5,
W_in[D_X, F_Y])."""

STRATEGIES: Final[Mapping[str, Formula]] = {
    "data": DATA_PARALLEL,
    "sharded_optimizer": SHARDED_OPTIMIZER,
    "fully_sharded": FULLY_SHARDED,
    "sharded_activations": SHARDED_ACTIVATIONS,
    "tensor": TENSOR_PARALLEL,
    "mesh": MESH,
}
"""Bytes per device, by strategy."""

REPLICA_DEVICES = Formula("devices whose memory one replica equals", "(P + G + O + K + A) / R", "devices", "CS336 (a)")
"""Memory of one replica, counted in devices of R bytes (CS336, part a)."""

FEWEST_SHARDS = Formula(
    "fewest shards that keep a device under M bytes",
    "floor((P + G + O + f * A) / (M - s * K - (1 - f) * A)) + 1",
    "devices",
    "CS336 (b)",
)
"""The least whole X for which `SHARDED_ACTIVATIONS` is less than M (CS336, part b), solved for X. There is none unless
M is greater than s · K + (1 - f) · A, which no shard makes smaller."""

SAVED_BY_SHARDING = Formula(
    "bytes saved per device by sharding f of the activations", "f * A - f * A / X", "bytes", "CS336 (b)"
)
"""`FULLY_SHARDED` less `SHARDED_ACTIVATIONS`."""

FSDP_TOKENS = Formula(
    "fully sharded alone: tokens per device", "g * C / (k * W * Mx)", "tokens", "Scaling book, part 5, FSDP"
)
"""Least tokens per device at which computing a block, t · k / C seconds for t tokens, takes as long as gathering its
weights, g / (W · Mx). For two matrices of D × F in 16 bits, g = k = 4·D·F: t = C / (W · Mx), as in the scaling book.
Data parallelism alone has the same: its all-reduce moves twice the bytes, and a backward pass has twice the FLOPs."""

MOST_TENSOR = Formula(
    "tensor alone: most devices", "k * W * My / (C * m)", "devices", "Scaling book, part 5, tensor parallelism"
)
"""Most tensor-parallel devices at which computing a block, t · k / (Y · C) seconds for t tokens of the group, takes as
long as exchanging its activations, t · m / (W · My). For two matrices, m = 4·D: Y = F · My · W / C, as in the scaling
book. It depends on no batch."""

SUMMED_TOKENS = Formula(
    "mesh, one after the other: tokens per device",
    "g / (Y * W * Mx) / (k / C - Y * m / (W * My))",
    "tokens",
    "Scaling book, part 5, first edition",
)
"""Least tokens per device t at which t · k / C = g / (Y · W · Mx) + t · Y · m / (W · My): computing a block takes as
long as gathering its weights and exchanging its activations together. The batch of the whole mesh is t · X · Y tokens,
of which a tensor-parallel group exchanges t · Y. The first edition of the scaling book (February 2025) adds the two
times: T_FSDP + T_MP = T_math. With one device along the tensor axis nothing is exchanged, and `FSDP_TOKENS` holds."""

OVERLAPPED_TOKENS = Formula(
    "mesh, at the same time: tokens per device",
    "g * C / (k * Y * W * Mx)",
    "tokens",
    "Scaling book, part 5, combined FSDP and TP",
)
"""The same if the two axes communicate at the same time, over links of their own: max(T_FSDP, T_TP) = T_math, as in the
later editions of the scaling book. It holds up to `MOST_TENSOR` devices along the tensor axis."""

BEST_TOKENS = Formula(
    "best mesh, at the same time: tokens per device",
    "g * m * C**2 / (k**2 * W**2 * Mx * My)",
    "tokens",
    "Scaling book, part 5, combined FSDP and TP",
)
"""`OVERLAPPED_TOKENS` at the largest tensor axis, `MOST_TENSOR`, whole or not: fewer tokens per device hide
communication on no mesh with these links. For two matrices: C² / (W² · Mx · My · F), as in the scaling book."""


def why_no_shards(symbols: Mapping[str, float]) -> str | None:
    """Say why no number of shards keeps a device under M bytes; None if there is such a number."""
    kept = evaluate("s * K + (1 - f) * A", symbols)
    if kept < _exact(symbols["M"]):
        return None
    return (
        f"what every device keeps, {float(kept) / 1e9:.4g} GB, reaches the limit however many shards there are: shard "
        "more of the activations, take a smaller batch, or checkpoint"
    )


def why_not_hidden(symbols: Mapping[str, float]) -> str | None:
    """Say why no batch hides the mesh's communication, or why every batch does; None if there is a least batch."""
    if symbols["Y"] > 1 and symbols["Y"] >= (most := MOST_TENSOR.value(symbols)):
        return (
            f"at any batch, tensor parallelism over {symbols['Y']} devices exchanges activations for as long as it "
            f"computes: take {f'a mesh.tensor below {float(most):.4g}' if most > 2 else 'mesh.tensor=1'}"
        )
    if symbols["X"] == 1:
        return "one device along the fsdp axis gathers no weights: every batch hides communication"
    return None
