"""What keeps growing from step to step: the memory alive after each of several steps, by the code that made it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from workers.measure.allocations.categories import UNKNOWN
from workers.measure.allocations.ledger import WORKSPACE, Allocation
from workers.measure.allocations.stacks import short_stack

Place = tuple[str | None, str | None]
"""A tensor's name with a star for each number, and the stack that made it."""

RISING = 0.75
"""The least share of pairs of steps whose later one has more, of memory that keeps growing."""


@dataclass
class Held:
    """The allocations of one place that are alive after a step."""

    size: int = 0
    """In bytes."""
    count: int = 0
    example: Allocation | None = None
    """One of them, of a known category if there is one."""


@dataclass(frozen=True)
class Growth:
    """A place whose allocations are more or larger after the last step than after the first."""

    place: Place
    sizes: Sequence[int]
    """Bytes after each step."""
    counts: tuple[int, int]
    """Allocations after the first step and after the last one."""
    example: Allocation

    @property
    def size(self) -> int:
        """Bytes that the last step has more than the first."""
        return self.sizes[-1] - self.sizes[0]

    @property
    def continues(self) -> bool:
        """Return True if it still grows: the least of each third of the steps exceeds that of the third before, and of
        the pairs of steps after the first third, in RISING the later one has more.

        A cache that has filled grows no longer, and what differs from step to step as often shrinks.
        """
        first, middle, last = self._thirds
        pairs = [one < other for one, other in combinations([*middle, *last], 2)]
        rises = sum(pairs) >= RISING * len(pairs)
        return bool(first) and rises and min(first) < min(middle) < min(last)

    @property
    def may_continue(self) -> bool:
        """Return True if the steps do not show whether it still grows: it has more than doubled or never
        shrunk, and still changed after the second third of the steps."""
        _, middle, last = self._thirds
        rose = self.sizes[-1] > 2 * self.sizes[0] or [*self.sizes] == sorted(self.sizes)
        return not self.continues and rose and len({*middle[-1:], *last}) > 1

    @property
    def _thirds(self) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
        begin, end = len(self.sizes) // 3, len(self.sizes) - (len(self.sizes) + 1) // 3
        return self.sizes[:begin], self.sizes[begin:end], self.sizes[end:]


@dataclass
class AfterSteps:
    """The memory alive after each of several steps in a row."""

    steps: list[dict[Place, Held]] = field(default_factory=list)

    def add(self, alive: Iterable[Allocation]) -> None:
        held: dict[Place, Held] = {}
        for one in alive:
            # Which of several blocks of a workspace's size is one is a guess.
            name = None if one.name == WORKSPACE else pattern(one.name)
            of_place = held.setdefault((name, short_stack(one.frames)), Held())
            of_place.size += one.size
            of_place.count += 1
            if of_place.example is None or of_place.example.category == UNKNOWN:
                of_place.example = one
        self.steps.append(held)

    def growths(self) -> list[Growth]:
        """Return the places that grew, those that still do first, then the largest first."""
        found = []
        for place, last in self.steps[-1].items() if self.steps else ():
            each = [step.get(place, Held()) for step in self.steps]
            if last.example is not None and last.size > each[0].size:
                found.append(Growth(place, [one.size for one in each], (each[0].count, last.count), last.example))
        return sorted(found, key=lambda one: (not one.continues, -one.size))


def pattern(name: str | None) -> str | None:
    """Return a tensor's name with a star for each number, so that corresponding tensors of all layers have the same
    name."""
    if name is None:
        return None
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
