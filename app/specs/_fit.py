"""The search for the largest value of a field that still fits into memory: `fit` of a sweep.

It tries `start`, doubles the value until one does not fit, and then bisects between the largest that fitted and the
smallest that did not, until they are neighbours among the multiples of `step`; without a `step`, until they differ by
a sixteenth, since jobs near the limit take longest. It assumes that memory grows with the value: it tries nothing above
a value that did not fit. Each value is a job of its own, so it runs in fresh processes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Self

from pydantic import Field, StringConstraints, model_validator

from app.specs._base import StrictModel, field_error, with_paths

MAX_SEARCHES = 100
"""Largest number of searches of one sweep, one for each point of its grid. Each takes some tens of jobs at most."""
MAX_VALUE = 2**40
COARSE = 16
"""A coarse search ends where what fits and what does not differ by one part in so many of what fits."""
COARSE_BISECTIONS = 5
"""As many as lead from a factor of two to that."""

GridPath = Annotated[str, StringConstraints(max_length=200, pattern=r"^[a-z_][a-z0-9_]*(\.[a-z_][a-z0-9_]*)*$")]


class FitBody(StrictModel):
    """A search for the largest value of a field, up to a limit, with which the job does not run out of memory."""

    axis: GridPath
    """Dotted path of the field: `context_length`, `batch_size`, `model.num_layers`, or an argument of a step of one's
    own, `arguments.context`. An integer, or a list of integers, which then has one value in each job."""
    upto: int = Field(ge=1, le=MAX_VALUE)
    """The largest value to try."""
    step: int | None = Field(default=None, ge=1, le=MAX_VALUE)
    """Only multiples of this are tried, and the answer is exact to one step. Null: any value, and the answer is exact
    below 32, or of kind `estimate`, else to 6 %, which takes fewer jobs."""
    start: int | None = Field(default=None, ge=1, le=MAX_VALUE)
    """The value to try first; null: the value in `base`, or the field's default."""

    @model_validator(mode="after")
    def _something_to_try(self) -> Self:
        if self.step is not None and self.upto < self.step:
            raise field_error("upto", f"no multiple of step ({self.step}) is so small")
        if self.start is not None and self.start > self.upto:
            raise field_error("start", f"must not exceed upto ({self.upto})")
        return self


@dataclass(frozen=True)
class Fit:
    """A search, with every default filled in; values are multiples of `step`."""

    axis: str
    upto: int
    step: int
    start: int
    lowest: int
    """The smallest value that the field takes, as a multiple of `step`."""
    in_a_list: bool = False
    """True if the field is a list."""
    coarse: bool = False
    """True if it ends where what fits and what does not differ by a sixteenth."""

    @classmethod
    def of(cls, body: FitBody, present: Any, least: int, *, coarse: bool = True) -> Fit:
        """Fill in the defaults; `present` is the field's value in the base. `coarse`: without a step, end where what
        fits and what does not differ by a sixteenth."""
        in_a_list = isinstance(present, list)
        step = body.step or 1
        first = body.start or (present[0] if in_a_list and present else present) or step
        lowest = max(-(-least // step), 1) * step
        highest = body.upto // step * step
        start = min(max(first // step * step, lowest), highest)
        return cls(body.axis, highest, step, start, min(lowest, highest), in_a_list, coarse and body.step is None)

    def as_json(self) -> dict[str, Any]:
        """Return the search as it is stored."""
        return asdict(self)

    def spec(self, base: Mapping[str, Any], value: int) -> dict[str, Any]:
        """Return the base with a value on the axis."""
        return with_paths(base, {self.axis: [value] if self.in_a_list else value})

    @property
    def most_jobs(self) -> int:
        """The largest number of jobs that the search may take: the first, the doublings, and the bisection."""
        values, first = self.upto // self.step, self.start // self.step
        doublings = (-(-values // first) - 1).bit_length()
        most = 1 + doublings + (values - 1).bit_length()
        return min(most, 1 + max(doublings + COARSE_BISECTIONS, first.bit_length())) if self.coarse else most

    def next_value(self, fitted: Collection[int], too_large: Collection[int]) -> int | None:
        """Return the value to try next; None if the search is at its end."""
        high = min(too_large, default=None)
        low = max((value for value in fitted if high is None or value < high), default=None)
        if low is None and high is None:
            return self.start
        if high is None:
            assert low is not None
            return None if low >= self.upto else min(2 * low, self.upto)
        if low is None:
            return None if high <= self.lowest else max(self._whole(high // 2), self.lowest)
        gap = max(self.step, low // COARSE) if self.coarse else self.step
        return None if high - low <= gap else low + self._whole((high - low) // 2)

    def _whole(self, value: int) -> int:
        """Return the largest multiple of `step` that is no larger; at least `step`."""
        return max(value // self.step, 1) * self.step
