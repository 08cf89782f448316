"""Spans, each of the numbers from its begin to its end: of times in ns, or of addresses."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

Span = tuple[int, int]


def merged(spans: Iterable[Span], gap: int = 0) -> list[Span]:
    """Return the union of spans, in order; spans that are at most `gap` apart become one."""
    union: list[Span] = []
    for first, last in sorted(spans):
        if union and first <= union[-1][1] + gap:
            union[-1] = (union[-1][0], max(union[-1][1], last))
        else:
            union.append((first, last))
    return union


def without(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """Return the parts of the spans that are in none of the others; both are in order and without overlaps."""
    remaining: list[Span] = []
    index = 0
    for first, last in spans:
        at = first
        while index < len(others) and others[index][1] <= at:
            index += 1
        place = index
        while place < len(others) and others[place][0] < last:
            if others[place][0] > at:
                remaining.append((at, others[place][0]))
            at = max(at, others[place][1])
            place += 1
        if at < last:
            remaining.append((at, last))
    return remaining


def total_ms(spans: Iterable[Span]) -> float:
    """Return the length of spans that do not overlap, in ms."""
    return 1e-6 * sum(last - first for first, last in spans)


def at_most(spans: Sequence[Span], most: int) -> list[Span]:
    """Return at most `most` spans: those with the smallest gaps between them become one. For pictures only."""
    if len(spans) <= most:
        return list(spans)
    gaps = sorted(after[0] - before[1] for before, after in pairwise(spans))
    return merged(spans, gaps[len(spans) - most - 1])
