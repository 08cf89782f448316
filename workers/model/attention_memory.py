"""Plays one call of attention alone with sizes in place of numbers: its memory, and the length at which it runs out.

It is the attention of `workers.model.step_memory` on queries, keys and values of one data type, without a model around
it and without autocast, as kind `attention` measures it. No torch.
"""

from dataclasses import dataclass, field, replace
from typing import cast

from workers.model.accounting import Shape, StepMemory
from workers.model.step_memory import BTD, Choices, Moment, Node, Play, Sharing, Size, Storage, Tensor

FORWARD, BETWEEN, BACKWARD = "forward", "between the passes", "backward"
INPUTS = "inputs"
LONGEST = 2**40
"""The longest sequence that is looked at, in tokens."""


@dataclass
class AttentionPlay(Play):
    """One forward pass and, if `choices` has one, one backward pass. `shape`: num_heads and d_model (all heads
    together) count; the model's other sizes do not."""

    causal: bool = True
    splits_heads: bool = field(default=False, init=False)
    autocasts: bool = field(default=False, init=False)

    def layout(self) -> None:
        """Make queries, keys, values and, for a backward pass, the gradient of the output."""
        names = ["queries", "keys", "values", *(["gradient of the output"] if self.saves else [])]
        self.inputs = [self.tape.take(INPUTS, name, Size(self.number, BTD)) for name in names]

    def run(self) -> list[Moment]:
        """Play both passes; the output stays until the end, as the caller has it."""
        self.tape.moment(FORWARD)
        self.backward = BACKWARD
        # Gradients of inputs stay, too, as those of leaves.
        made: list[Storage] = []

        def keep(gradient: Storage) -> list[Storage | None]:
            made.append(gradient)
            return []

        leaves = [self.node([], keep) for _ in range(3)]
        out = self.attend(*(Tensor(storage, leaf) for storage, leaf in zip(self.inputs, leaves, strict=False)))
        self.tape.moment(BETWEEN)
        if self.saves:
            source, out.source = cast("Node", out.source), None
            self.differentiate(source, self.inputs[-1])
        return self.tape.finish()


@dataclass(frozen=True)
class AttentionMemory:
    """A call of attention alone. `step`: sequences, their length, data type (precision), implementation and device."""

    num_heads: int
    head_dim: int
    step: StepMemory
    causal: bool = False
    backward: bool = True

    def moments(self) -> dict[str, Moment]:
        """Return the highest use of each pass, and what is there between them, by name."""
        shape = Shape(1, self.num_heads * self.head_dim, 1, self.num_heads, 1)
        choices = Choices("forward_backward" if self.backward else "forward")
        play = AttentionPlay(shape, self.step, choices, Sharing(), causal=self.causal)
        return {moment.name: moment for moment in play.run()}

    def first_beyond(self, limit: int, name: str) -> int | None:
        """Return the shortest sequence whose moment of this name takes more than `limit` bytes; None if none does."""

        def exceeds(length: int) -> bool:
            longer = replace(self, step=replace(self.step, context_length=length))
            return longer.moments()[name].total > limit

        if not exceeds(LONGEST):
            return None
        low, high = 0, LONGEST
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if exceeds(middle) else (middle, high)
        return high
