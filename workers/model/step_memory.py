"""Plays one step of `workers.model.transformer` with sizes in place of numbers, to find its peak of memory. No torch.

The play follows the code of the model, the loss and the optimizer, line by line. An operation allocates its result and
what it needs meanwhile; autograd keeps what `workers.model.accounting` lists; the backward pass runs in autograd's
order, from the newest operation to the oldest, and holds an operation's incoming gradient until it is done; memory is
free when the last reference is gone, as in torch. So the peak is the largest of all moments, and nothing is fitted to
measurements. `tests/workers/model/test_step_memory.py` compares it with them.

It leaves out: the rounding of a GPU's allocator, tensors that grow with none of D, F, V and T², and all that a compiler
changes.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

from workers.model.accounting import Shape, StepMemory, takes_mask

PARTS = ("parameters", "gradients", "optimizer state", "weight copies", "activations", "workspaces")
"""What memory is used for. Temporaries and gradients of activations count as activations."""
WORKSPACE_BYTES = 32 * 2**20
"""Memory that cuBLAS takes on a GPU in each thread that multiplies matrices: the forward pass's, and autograd's for the
backward pass (torch's default for compute capability 9.0; a quarter of it before)."""
CHUNK_BYTES, MIN_CHUNK_ROWS = 2**30, 128
"""Those of `kernels.chunked_cross_entropy`, which imports torch; a test compares them."""
TILE = 128
"""Queries and keys of a tile of attention that is computed tile by tile (`kernels.attention.tiled`)."""

PLAYED_LAYERS = 3
"""Blocks of the model that is played in place of a deeper one. From three blocks on, each moment's highest use grows by
the same tensors with each block, so that a deeper model's follows from this one and one that is a block deeper."""
FIRST, LAST = "embedding, first block", "last block"
Axes = tuple[str, ...]
ONE: Axes = ()
BT, BTD, BTF, BTV, BHT, BHTT = (tuple(axes) for axes in ("BT", "BTD", "BTF", "BTV", "BHT", "BHTT"))


class Size(NamedTuple):
    """Bytes of a tensor: a number of bytes times the product of some axes, given by their symbols."""

    bytes: int
    axes: Axes


@dataclass(frozen=True)
class Moment:
    """The highest use of memory within a part of the step."""

    name: str
    total: int
    """Bytes."""
    held: Mapping[tuple[str, str, Size], int]
    """How many tensors are there, by part, name and size."""
    symbols: Mapping[str, float]
    factors: Mapping[str, Fraction]
    """The share of each part that a device has; 1 if it is not there."""

    @cached_property
    def _parts(self) -> Counter[str]:
        total = Counter[str]()
        for key in self.held:
            total[key[0]] += self.bytes_of(key)
        return total

    def part(self, part: str) -> int:
        """Return the bytes of one of PARTS."""
        return self._parts[part]

    def bytes_of(self, key: tuple[str, str, Size]) -> int:
        return self.held[key] * share_of(key, self.symbols, self.factors)

    @property
    def formula(self) -> str:
        """The total as text, for one device that shares nothing."""
        terms: Counter[Axes] = Counter()
        for (_, _, size), count in self.held.items():
            terms[size.axes] += count * size.bytes
        return " + ".join(
            " * ".join([str(number), *(f"{axis}**{power}" if power > 1 else axis for axis, power in powers(axes))])
            for axes, number in sorted(terms.items(), key=lambda term: -bytes_of(Size(term[1], term[0]), self.symbols))
        )


def powers(axes: Axes) -> list[tuple[str, int]]:
    """Return each axis with the number of times that it is there."""
    return list(Counter(axes).items())


def bytes_of(size: Size, symbols: Mapping[str, float]) -> int:
    return math.prod((int(symbols[axis]) for axis in size.axes), start=size.bytes)


def share_of(key: tuple[str, str, Size], symbols: Mapping[str, float], factors: Mapping[str, Fraction]) -> int:
    """Return the bytes of a tensor that one device has."""
    factor, whole = factors.get(key[0], 1), bytes_of(key[2], symbols)
    return whole if factor == 1 else math.ceil(whole * factor)


@dataclass(frozen=True)
class Sharing:
    """How devices share a step."""

    parameters: int = 1
    """Number of shards of parameters and gradients: with more than one, units are gathered when they are used."""
    optimizer: int = 1
    """Number of shards of the optimizer's state."""
    gathered_in_16_bits: bool = True
    """Whether weights are gathered in the 16 bits of the products, so that autocast has nothing to copy."""
    activations: Fraction = Fraction(1)
    """The part of the activations that a device has."""


class Storage:
    """Memory on the tape, until the last reference to it is gone."""

    __slots__ = ("key", "size", "tape")

    def __init__(self, tape: Tape, key: tuple[str, str, Size], size: int) -> None:
        self.tape, self.key, self.size = tape, key, size

    def __del__(self) -> None:
        self.tape.release(self)


class Tape:
    """Counts the memory in use, and keeps the highest use within each moment."""

    def __init__(self, symbols: Mapping[str, float], factors: Mapping[str, Fraction]) -> None:
        self.symbols, self.factors = symbols, factors
        self.total, self.moments = 0, dict[str, Moment]()
        self._held: Counter[tuple[str, str, Size]] = Counter()
        self._sizes: dict[tuple[str, str, Size], int] = {}
        self.name, self._highest = "", 0
        self._rising = False

    def moment(self, name: str) -> None:
        """Begin, or go on with, a part of the step."""
        self._look()
        self.name = name
        self._highest = self.moments[name].total if name in self.moments else 0
        self._rising = self.total > self._highest

    def take(self, part: str, what: str, size: Size) -> Storage:
        key = part, what, size
        known = self._sizes.get(key)
        if known is None:
            known = share_of(key, self.symbols, self.factors)
            self._sizes[key] = known
        self._held[key] += 1
        self.total += known
        self._rising = self._rising or self.total > self._highest
        return Storage(self, key, known)

    def release(self, storage: Storage) -> None:
        """Free it. The highest use is looked at when it ends."""
        self._look()
        self._held[storage.key] -= 1
        self.total -= storage.size

    def rename(self, storage: Storage, part: str, what: str) -> None:
        """Count a tensor as something else from now on."""
        self._look()
        self._held[storage.key] -= 1
        storage.key = part, what, storage.key[2]
        self._held[storage.key] += 1

    def finish(self) -> list[Moment]:
        """Return the highest uses, in the order of the step."""
        self._look()
        return [*self.moments.values()]

    def _look(self) -> None:
        if self._rising and self.name:
            self._highest, self._rising = self.total, False
            held = {key: count for key, count in self._held.items() if count}
            self.moments[self.name] = Moment(self.name, self.total, held, self.symbols, self.factors)


class Unit:
    """Parameters that a fully sharded model gathers, reduces and frees together."""

    def __init__(self) -> None:
        self.parameters: list[Parameter] = []
        self.whole: list[Storage] = []
        self.gradients: list[Storage] = []
        self.place = 0


class Parameter:
    """A parameter, its gradient, and where autocast keeps its copy until the forward pass ends."""

    def __init__(self, axes: Axes, unit: Unit) -> None:
        self.axes, self.unit = axes, unit
        self.gradient: Storage | None = None
        self.copy: Tensor | None = None
        unit.parameters.append(self)


class Node:
    """An operation that autograd will differentiate: what it saves, and the sizes of its gradients."""

    numbers = itertools.count()

    def __init__(self, inputs: Sequence[Node | Parameter | None], back: Back, saved: Sequence[Storage]) -> None:
        self.number = next(self.numbers)
        self.inputs, self.back, self.saved = list(inputs), back, list(saved)
        self.unit: Unit | None = None
        self.moment = ""

    def __lt__(self, other: Node) -> bool:
        return self.number > other.number


@dataclass(slots=True)
class Tensor:
    """A tensor: its memory, which others may share, and the operation that made it."""

    storage: Storage
    source: Node | Parameter | None = None

    @property
    def size(self) -> Size:
        return self.storage.key[2]


Back = Callable[[Storage], Sequence[Storage | None]]
"""The gradients of an operation's inputs, from that of its output."""
SAME = None
"""In place of the size of a gradient: it is the incoming one itself."""


@dataclass(frozen=True)
class Choices:
    """What a step does, beside `StepMemory`: the fields of training specs of these names."""

    mode: str = "train_step"
    optimizer: str = "adamw"
    master_weights: bool = False
    fused_linear_cross_entropy: bool = False


@dataclass
class Play:
    """One step, played."""

    shape: Shape
    step: StepMemory
    choices: Choices = Choices()
    sharing: Sharing = Sharing()
    tape: Tape = field(init=False)

    def __post_init__(self) -> None:
        symbols = {"E": self.shape.d_model, **self.shape.symbols, **self.step.symbols}
        of_parameters = Fraction(1, self.sharing.parameters)
        factors = {
            "parameters": of_parameters,
            "gradients": of_parameters,
            "optimizer state": Fraction(1, max(self.sharing.parameters, self.sharing.optimizer)),
            "activations": self.sharing.activations,
        }
        self.tape = Tape(symbols, factors)
        self.saves = self.choices.mode != "forward"
        self.wide = max(4, self.step.parameter_bytes)
        self.number = self.step.compute_bytes
        self.kept: list[Storage] = []
        """What is there from step to step."""
        self.layout()

    # The model's parameters, and what is there before the step.

    def layout(self) -> None:
        """Make the parameters, in the order of the model's, and the state of the step before."""
        width = ("E", "D") if "E" in self.shape.symbols else ("D", "D")
        square = ("D", "D")
        self.embedding = Parameter(("V", "D"), Unit())
        self.blocks: list[tuple[Unit, dict[str, Parameter]]] = []
        for _ in range(self.shape.num_layers):
            unit = Unit()
            axes = {"ln1": ("D",), "q": square, "k": width, "v": width, "o": square, "ln2": ("D",)}
            axes |= {"w1": ("F", "D"), "w2": ("D", "F"), "w3": ("F", "D")}
            self.blocks.append((unit, {name: Parameter(one, unit) for name, one in axes.items()}))
        self.norm, self.head = Parameter(("D",), Unit()), Parameter(("V", "D"), Unit())
        self.parameters = [
            self.embedding, *(one for _, block in self.blocks for one in block.values()), self.norm, self.head,
        ]  # fmt: skip
        each, take = self.step.parameter_bytes, self.tape.take
        shards = self.sharing.parameters
        if shards > 1:
            self.units = [self.embedding.unit, *(unit for unit, _ in self.blocks), self.norm.unit, self.head.unit]
            self.reducing: list[Storage] = []
            self.whole: list[Unit] = []
            for place, unit in enumerate(self.units):
                unit.place = place
        for parameter in self.parameters:
            self.kept.append(take("parameters", "parameters", Size(each, parameter.axes)))
            if self.choices.mode == "train_step":
                self.kept += [take("optimizer state", what, Size(size, parameter.axes)) for what, size in self.state()]
        threads = 0 if not self.step.on_gpu else 2 if self.saves else 1
        self.kept += [take("workspaces", "cuBLAS's workspaces", Size(WORKSPACE_BYTES, ONE)) for _ in range(threads)]
        self.ids = take("activations", "token ids and targets", Size(8, BT))
        if takes_mask(self.shape, self.step):
            self.kept.append(take("activations", "attention: mask", Size(1, ("T", "T"))))

    def state(self) -> list[tuple[str, int]]:
        """Return what the optimizer keeps of each parameter: names, and bytes of a number."""
        each = 4 if self.choices.master_weights else self.step.parameter_bytes
        moments = [("first moment", each), ("second moment", each)]
        return [*moments, ("master weights", 4)] if self.choices.master_weights else moments

    # Operations.

    def take(self, what: str, size: Size) -> Storage:
        return self.tape.take("activations", what, size)

    def operate(
        self, what: str, size: Size, inputs: Sequence[Tensor | Parameter], gradients: Sequence[Size | None], *,
        saved: Sequence[Storage] = (), saves_output: bool = False,
        meanwhile: Sequence[Size] = (), meanwhile_back: Sequence[Size] = (),
    ) -> Tensor:  # fmt: skip
        """Play an operation.

        Args:
            what: Names its output.
            size: Its output's.
            gradients: The size of each input's gradient, or SAME.
            saved: What autograd saves for the backward pass.
            saves_output: Whether it saves the output, too.
            meanwhile, meanwhile_back: What it allocates and frees again, in the forward and in the backward pass.
        """
        temporary = [self.take(f"temporary of {what}", one) for one in meanwhile]
        out = Tensor(self.take(what, size))
        del temporary
        if not self.saves:
            return out

        def back(incoming: Storage) -> list[Storage | None]:
            held = [self.take(f"temporary of {what}, backward", one) for one in meanwhile_back]
            made: list[Storage | None] = [
                incoming if one is SAME else self.take(f"gradient of {what}", one) for one in gradients
            ]
            del held
            return made

        sources = [one if isinstance(one, Parameter) else one.source for one in inputs]
        out.source = self.node(sources, back, [*saved, *([out.storage] if saves_output else [])])
        return out

    def node(self, sources: Sequence[Node | Parameter | None], back: Back, saved: Sequence[Storage] = ()) -> Node:
        """Return a node of the graph, of the unit at work."""
        made = Node(sources, back, saved)
        made.unit, made.moment = self.at_work, self.backward
        return made

    causal, splits_heads, autocasts = True, True, True
    """What the model does: it hides later tokens, takes heads out of rows of d_model numbers, and uses autocast."""
    at_work: Unit | None = None
    backward: str = ""
    """The moment in which operations of now will be differentiated."""

    def cast(self, tensor: Tensor, number: int, what: str) -> Tensor:
        """Play `tensor.to(dtype)` for a dtype of so many bytes."""
        if tensor.size.bytes == number:
            return tensor
        return self.operate(what, Size(number, tensor.size.axes), [tensor], [tensor.size])

    def linear(self, x: Tensor, weight: Parameter, axes: Axes, what: str) -> Tensor:
        """Play x Wᵀ. Autocast copies the input each time, and the weight once."""
        x = self.cast(x, self.number, f"16-bit input of {what}") if self.step.casts_weights else x
        narrow = Size(self.number, weight.axes)
        gradients = [Size(self.number, x.size.axes), narrow]
        inputs: list[Tensor | Parameter] = [x, weight]
        saved = [x.storage]
        if self.copies_weights:
            if weight.copy is None:
                weight.copy = Tensor(self.tape.take("weight copies", "16-bit copies of weights", narrow))
                wide = Size(self.step.parameter_bytes, weight.axes)
                if self.saves:
                    back: Back = lambda _: [self.take("gradient of a weight", wide)]  # noqa: E731
                    weight.copy.source = self.node([weight], back)
            inputs[1] = weight.copy
            saved.append(weight.copy.storage)
        return self.operate(what, Size(self.number, axes), inputs, gradients, saved=saved)

    @property
    def copies_weights(self) -> bool:
        gathered_so = self.sharing.parameters > 1 and self.sharing.gathered_in_16_bits
        return self.step.casts_weights and not gathered_so

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """Play x + y, whose result has the wider dtype. A CPU first makes the narrower one wide."""
        meanwhile = [x.size] if y.size.bytes != x.size.bytes and not self.step.on_gpu else []
        back = [SAME, SAME if y.size == x.size else y.size]
        return self.operate("residual stream", x.size, [x, y], back, meanwhile=meanwhile)

    def rms_norm(self, x: Tensor, weight: Parameter, of: str) -> Tensor:
        """Play `RMSNorm`, which is written out."""
        full, row, narrow = Size(4, BTD), Size(4, BT), x.size.bytes
        wide = self.cast(x, 4, f"{of} norm: input in float32")
        squares = self.operate(
            f"{of} norm: squares", full, [wide], [full], saved=[wide.storage], meanwhile_back=[full, full]
        )
        scale = self.operate(f"{of} norm: 1 / rms", row, [squares], [full], saves_output=True)
        del squares
        unit = self.operate(
            f"{of} norm: normalised", full, [wide, scale], [full, row],
            saved=[wide.storage, scale.storage], meanwhile_back=[full],
        )  # fmt: skip
        del wide, scale
        out = self.operate(
            f"{of} norm: output", full, [unit, weight], [full, Size(4, ("D",))],
            saved=[unit.storage], meanwhile_back=[full],
        )  # fmt: skip
        del unit
        return self.cast(out, narrow, f"{of} norm: output")

    def rotate(self, x: Tensor) -> Tensor:
        """Play the rotary embedding: four half products in float32, two of them at a time, then all in one tensor."""
        wide, number = Size(self.wide, x.size.axes), x.size.bytes
        halves = [Size(self.wide // 2, x.size.axes)] * (2 if number == self.wide or self.step.on_gpu else 3)
        out = self.operate("rotated", wide, [x], [x.size], meanwhile=halves, meanwhile_back=[*halves, *halves])
        return self.cast(out, number, "queries, keys")

    # Attention.

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Play the attention of one block; returns (batch, heads, tokens, head_dim)."""
        if self.step.attention != "eager":
            return self.attend_fused(q, k, v)
        number, full = self.number, Size(self.number, BTD)
        scores = Size(number, BHTT)
        mask = self.take("attention: causal mask", Size(1, ("T", "T"))) if self.causal else None
        if k.size.axes != BTD:
            k, v = (self.operate("repeated keys, values", full, [one], [one.size]) for one in (k, v))
        elif self.splits_heads and self.step.batch_size > 1 and self.shape.num_heads > 1:
            # The transposed values are copied when their heads are put in a row with the batch.
            v = self.operate("queries, keys, values", full, [v], [SAME])
        raw = self.operate("scores", scores, [q, k], [full, full], saved=[q.storage, k.storage])
        scaled = self.operate("scores", scores, [raw], [scores])
        del raw
        if mask is not None:
            scaled = self.operate("masked scores", scores, [scaled], [scores], saved=[mask])
        weights = self.softmax(scaled)
        weights = self.cast(weights, number, "attention: 16-bit softmax")
        return self.operate("attention: output", full, [weights, v], [scores, full], saved=[weights.storage, v.storage])

    def softmax(self, scores: Tensor) -> Tensor:
        """Play the softmax, which autocast computes in float32 on a GPU."""
        narrow, wide = scores.size, Size(4, BHTT)
        if not self.step.on_gpu or not self.autocasts or narrow.bytes == 4:
            more = [narrow] if self.step.on_gpu else []
            return self.operate(
                "attention: softmax", narrow, [scores], [narrow], saves_output=True, meanwhile_back=more
            )
        if self.step.precision == "fp16":  # torch has a kernel that reads fp16 and writes float32
            return self.operate(
                "attention: softmax", wide, [scores], [narrow], saves_output=True, meanwhile_back=[wide]
            )
        scores = self.cast(scores, 4, "scores in float32")
        return self.operate("attention: softmax", wide, [scores], [wide], saves_output=True, meanwhile_back=[wide])

    def attend_fused(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Play attention that keeps its output and the log-sum-exp of each query."""
        forth: list[Size] = []
        back = [Size(4, BHT)]
        if self.step.attention == "tiled":
            forth, back = self.tiles()
            if k.size.axes != BTD:
                k, v = (self.operate("repeated keys, values", q.size, [one], [one.size]) for one in (k, v))
        saved = [q.storage, k.storage, v.storage, self.take("attention: log-sum-exp", Size(4, BHT))]
        if takes_mask(self.shape, self.step):
            saved.append(self.take("attention: mask", Size(self.number, ("T", "T"))))
        return self.operate(
            "attention: output", q.size, [q, k, v], [q.size, k.size, v.size],
            saved=saved, saves_output=True, meanwhile=forth, meanwhile_back=back,
        )  # fmt: skip

    def tiles(self) -> tuple[list[Size], list[Size]]:
        """Return what `kernels.attention.tiled` allocates and frees again: its variables, those of the tile before,
        and the gradient of the queries, which it sums in float32; before that, what the rows' sums are made of."""
        side = min(TILE, self.step.context_length)
        scores, vectors = Size(4 * side * side, ("B", "H")), Size(4 * side, ("B", "D"))
        several = side < self.step.context_length
        copied = self.number < 4  # tiles of queries, keys and values are views of float32 inputs
        forth = [scores] * (4 if several else 3) + [vectors] * (6 if copied else 3)
        back = [*[scores] * (6 if several else 5), *[vectors] * (6 if copied else 2)]
        back += [Size(4, BTD)] * copied  # float32 ones are the queries' gradient
        sums = [Size(4, BTD)] * (1 if self.number == 4 else 3)
        return forth, max(back, sums, key=lambda sizes: sum(bytes_of(one, self.tape.symbols) for one in sizes))

    def attention_layer(self, x: Tensor, block: Mapping[str, Parameter]) -> Tensor:
        keys = ("B", "T", "E") if "E" in self.shape.symbols else BTD
        q = self.rotate(self.split(self.linear(x, block["q"], BTD, "projection")))
        k = self.rotate(self.split(self.linear(x, block["k"], keys, "projection")))
        v = self.split(self.linear(x, block["v"], keys, "queries, keys, values"))
        out = self.attend(q, k, v)
        merged = out
        if self.shape.num_heads > 1 and self.step.merges_heads:
            merged = self.operate("input of output projection", out.size, [out], [out.size])
        return self.linear(merged, block["o"], BTD, "projection")

    def split(self, x: Tensor) -> Tensor:
        """Play the division into heads: a view, whose gradient is copied back into rows."""
        if not self.saves:
            return x
        size = x.size
        back: Back = lambda _: [self.take("gradient of heads", size)]  # noqa: E731
        return Tensor(x.storage, self.node([x.source], back))

    # The model.

    def feed_forward(self, x: Tensor, block: Mapping[str, Parameter]) -> Tensor:
        hidden = Size(self.number, BTF)
        gate = self.linear(x, block["w1"], BTF, "w1 x")
        gate = self.operate("silu(w1 x)", hidden, [gate], [hidden], saved=[gate.storage])
        up = self.linear(x, block["w3"], BTF, "w3 x")
        both = self.operate("their product", hidden, [gate, up], [hidden] * 2, saved=[gate.storage, up.storage])
        del gate, up
        return self.linear(both, block["w2"], BTD, "output of the feed-forward layer")

    def block(self, x: Tensor, block: Mapping[str, Parameter]) -> Tensor:
        x = self.add(x, self.attention_layer(self.rms_norm(x, block["ln1"], "attention"), block))
        return self.add(x, self.feed_forward(self.rms_norm(x, block["ln2"], "feed-forward"), block))

    def checkpointed(self, x: Tensor, unit: Unit, block: Mapping[str, Parameter]) -> Tensor:
        """Play a block that keeps its input only, and is computed again in the backward pass."""
        self.saves = False
        out = self.block(x, block)
        self.saves = True

        def back(incoming: Storage) -> list[Storage | None]:
            found: list[Storage] = []

            def keep(gradient: Storage) -> list[Storage | None]:
                found.append(gradient)
                return []

            self.at_work = unit
            again = self.block(Tensor(x.storage, self.node([], keep)), block)
            self.drop_copies(block.values())
            source, again = again.source, None  # type: ignore[assignment]
            assert isinstance(source, Node)
            self.differentiate(source, incoming)
            return [found.pop()]

        out.source = self.node([x.source, *()], back, [x.storage])
        return out

    def forward(self) -> Tensor:
        tape, residual = self.tape, Size(self.step.parameter_bytes, BTD)
        tape.moment(f"forward: {FIRST}")
        self.backward = f"backward: {FIRST}"
        self.enter(self.embedding.unit)
        x = self.operate("residual stream", residual, [self.embedding], [Size(self.step.parameter_bytes, ("V", "D"))])
        for number, (unit, block) in enumerate(self.blocks):
            place = FIRST if number == 0 else LAST if number + 1 == len(self.blocks) else "other blocks"
            tape.moment(f"forward: {place}")
            self.backward = f"backward: {place}"
            self.enter(unit)
            if self.step.activation_checkpointing and self.saves:
                x = self.checkpointed(x, unit, block)
            else:
                x = self.block(x, block)
        tape.moment("forward: output layer and loss")
        self.backward = "backward: output layer and loss"
        self.enter(self.norm.unit)
        x = self.rms_norm(x, self.norm, "final")
        self.enter(self.head.unit)
        loss = self.loss_in_chunks(x) if self.choices.fused_linear_cross_entropy else self.loss(x)
        self.drop_copies(self.parameters)
        return loss

    def drop_copies(self, parameters: Iterable[Parameter]) -> None:
        """Play the end of autocast, which forgets its copies of weights."""
        for parameter in parameters:
            parameter.copy = None

    def loss(self, x: Tensor) -> Tensor:
        """Play the output layer and `workers.model.loss.cross_entropy`.

        torch's log-sum-exp makes a tensor like the logits meanwhile. Its gradient, grad · exp(logits − lse), is one
        expression, whose three results are there until its end, beside the logits.
        """
        wide, row = Size(self.wide, BTV), Size(4, BT)
        logits = self.cast(self.linear(x, self.head, BTV, "logits"), self.wide, "logits")
        del x
        target = self.operate("loss", row, [logits], [wide], saved=[logits.storage])
        lse = self.operate(
            "log-sum-exp of logits", row, [logits], [wide],
            saved=[logits.storage], saves_output=True, meanwhile=[wide], meanwhile_back=[wide, wide],
        )  # fmt: skip
        del logits
        return self.operate("loss", row, [lse, target], [SAME, row])

    def loss_in_chunks(self, x: Tensor) -> Tensor:
        """Play `kernels.chunked_cross_entropy`, which makes the gradients in the forward pass, chunk by chunk."""
        rows = self.step.batch_size * self.step.context_length
        vocabulary, number = self.shape.vocab_size, self.number
        fitting = max(1, CHUNK_BYTES // (vocabulary * number))
        chunk = min(rows, max(MIN_CHUNK_ROWS, 2 ** (fitting.bit_length() - 1)))
        weight = ("V", "D")
        narrow, matrix = Size(number, BTD), Size(number, weight)
        made: list[Storage] = []
        copies = [self.take("hidden vectors in 16 bits", narrow)] if x.size.bytes != number else []
        if self.step.parameter_bytes != number:
            copies.append(self.take("output layer in 16 bits", matrix))
        if self.saves:
            made.append(self.take("gradient of the loss's input", narrow))
            made.append(self.take("gradient of the output layer, in float32", Size(4, weight)))
        # softmax_gradient: logits (twice if they are cast), a mask, and three results in float32.
        each = 4 + 1 + 3 * 4 + (number if number < 4 else 0)
        work = self.take("logits of a chunk", Size(chunk * each, ("V",)))
        del work
        if self.saves and number < 4 and not self.step.on_gpu:  # a CPU rounds the product, and casts it to be added
            sizes = matrix, Size(4, weight), Size(chunk * number, ("V",))
            product = [self.take("product of a chunk", one) for one in sizes]
            del product
        del copies
        out = Tensor(self.take("loss", Size(4, ONE)))
        if self.saves:
            wide_x, each_weight = x.size, Size(self.step.parameter_bytes, weight)

            def back(_: Storage) -> list[Storage | None]:
                scaled = self.take("gradient of the loss's input", narrow)
                of_x = scaled if wide_x == narrow else self.take("gradient of the loss's input", wide_x)
                if each_weight.bytes < 4 and not self.step.on_gpu:  # a CPU multiplies in float32, and then rounds
                    _product = self.take("gradient of the output layer, in float32", Size(4, weight))
                return [of_x, self.take("gradient of the output layer", each_weight)]

            out.source = self.node([x.source, self.head], back, made)
        return out

    # The backward pass.

    def differentiate(self, source: Node, gradient: Storage) -> None:
        """Play the backward pass from one node on, the newest first. Gradients of parameters are kept at once."""
        ready, incoming = [source], {source: gradient}
        waiting = Counter(_edges(source))
        del gradient
        while ready:
            node = heapq.heappop(ready)
            self.tape.moment(node.moment)
            if node.unit is not None:
                self.enter(node.unit, backward=True)
            gradients = list(node.back(incoming.pop(node)))
            node.saved.clear()
            node.back = _done
            for source_of, made in zip(node.inputs, gradients, strict=False):
                if isinstance(source_of, Parameter) and made is not None:
                    self.keep_gradient(source_of, made)
            edges = [(one, made) for one, made in zip(node.inputs, gradients, strict=False) if isinstance(one, Node)]
            del gradients
            while edges:
                one, made = edges.pop(0)
                if one not in incoming and made is not None:
                    incoming[one] = made
                waiting[one] -= 1
                if not waiting[one]:
                    heapq.heappush(ready, one)
            made = None

    def keep_gradient(self, parameter: Parameter, made: Storage) -> None:
        """Play autograd's accumulation: the first gradient is taken as it is."""
        if self.sharing.parameters == 1:
            self.tape.rename(made, "gradients", "gradients")
            parameter.gradient = made
            return
        unit = parameter.unit
        unit.gradients.append(made)
        if len(unit.gradients) == len(unit.parameters):
            self.reducing, unit.gradients = unit.gradients, []
            unit.whole.clear()
            for one in unit.parameters:
                size = Size(self.step.parameter_bytes, one.axes)
                one.gradient = self.tape.take("gradients", "gradients", size)

    def enter(self, unit: Unit, *, backward: bool = False) -> None:
        """Gather a unit's parameters, and those of the next one."""
        self.at_work = unit
        if self.sharing.parameters == 1:
            return
        wanted = [unit, *self.next_units(unit, backward=backward)]
        for one in self.whole:
            if one not in wanted:
                one.whole.clear()
        number = self.number if self.sharing.gathered_in_16_bits else self.step.parameter_bytes
        for one in wanted:
            if not one.whole and not (backward and one.parameters[0].gradient):
                one.whole = [
                    self.tape.take("weight copies", "gathered weights", Size(number, parameter.axes))
                    for parameter in one.parameters
                ]
        self.whole = wanted

    def next_units(self, unit: Unit, *, backward: bool) -> list[Unit]:
        """Return the unit that will run after this one, if there is one."""
        place = unit.place + (-1 if backward else 1)
        return self.units[place : place + 1] if place >= 0 else []

    # The step.

    def optimize(self) -> None:
        self.tape.moment("optimizer")
        name, each = self.choices.optimizer, self.state()[0][1]
        if name in ("torch_fused_adamw", "triton_adamw"):
            return  # kernels that need nothing more
        if name == "torch_adamw" and self.step.on_gpu:
            _roots = [self.optimizing("roots of the second moments", one, each) for one in self.parameters]
            return
        gradient = root = None
        for parameter in self.parameters:
            if self.choices.master_weights:
                gradient = self.optimizing("gradient in float32", parameter, 4)
            if name == "torch_adamw":
                first = self.optimizing("root of a second moment", parameter, each)
                root = self.optimizing("root of a second moment", parameter, each)
                del first
            else:
                root = self.optimizing("root of a second moment", parameter, each)
        del gradient, root

    def optimizing(self, what: str, parameter: Parameter, number: int) -> Storage:
        """Allocate a temporary of the optimizer, which has the size of its share."""
        return self.tape.take("optimizer state", what, Size(number, parameter.axes))

    def run(self) -> list[Moment]:
        loss = self.forward()
        if self.saves:
            source, loss = loss.source, None  # type: ignore[assignment]
            assert isinstance(source, Node)
            self.differentiate(source, self.take("gradient of the loss", Size(4, BT)))
            if self.choices.mode == "train_step":
                self.optimize()
        return self.tape.finish()


def moments(shape: Shape, step: StepMemory, choices: Choices = Choices(), sharing: Sharing = Sharing()) -> list[Moment]:
    """Return the highest use of memory within each part of a step, in the order of the step."""
    more = shape.num_layers - PLAYED_LAYERS
    if more <= 1:
        return Play(shape, step, choices, sharing).run()
    shallow, deeper = (
        Play(replace(shape, num_layers=layers), step, choices, sharing).run()
        for layers in (PLAYED_LAYERS, PLAYED_LAYERS + 1)
    )
    found = []
    for one, other in zip(shallow, deeper, strict=True):  # `other` is of a model one block deeper
        held = {key: one.held.get(key, 0) + more * (size - one.held.get(key, 0)) for key, size in other.held.items()}
        found.append(Moment(one.name, one.total + more * (other.total - one.total), held, one.symbols, one.factors))
    return found


def _edges(source: Node) -> Iterator[Node]:
    """Yield each node once for each operation that uses its result."""
    seen, found = {source}, [source]
    while found:
        for one in found.pop().inputs:
            if isinstance(one, Node):
                yield one
                if one not in seen:
                    seen.add(one)
                    found.append(one)


def _done(_: Storage) -> Sequence[Storage | None]:
    raise AssertionError("an operation is differentiated once")
