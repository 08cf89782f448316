"""What a runner found for one case: samples for each metric, or an outcome and the reason why there are none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from app.specs import Case
    from workers.jobs._base import Reporter

FAULTS = ("crashed", "failed", "invalid_environment", "wrong")
"""Outcomes that are somebody's fault: of the implementation, or of this host. What is "unsupported" here, or takes more
memory than there is, was measured as well as it can be.
"""


@dataclass(frozen=True)
class Metric:
    """A metric's name, the phase that it belongs to, and its unit.

    (name, phase) names the column of tables. A rate or a peak without a phase is of the mode's whole measured work.
    """

    name: str
    phase: str | None
    unit: str


class Values:
    """What was found for each metric of a case."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self.metrics = metrics
        self._found: dict[tuple[str, str | None], tuple[str, str | None, Sequence[float] | None]] = {}

    def set(self, name: str, phase: str | None, samples: Sequence[float] | None, reason: str = "") -> None:
        """Samples; or None, and why they are unknown."""
        self._found[name, phase] = ("unknown", reason, None) if samples is None else ("ok", None, samples)

    def rest(self, outcome: str, reason: str, of: Iterable[Metric] | None = None) -> None:
        """Every metric for which nothing was found yet has this outcome; `of`: only those of these metrics."""
        for metric in self.metrics if of is None else of:
            self._found.setdefault((metric.name, metric.phase), (outcome, reason, None))

    def samples(self, name: str, phase: str | None) -> Sequence[float] | None:
        """What was found for a metric; None if nothing."""
        return self._found.get((name, phase), ("", None, None))[2]

    def overrule(self, outcome: str, reason: str, but: Iterable[str] = ()) -> None:
        """Every metric has this outcome, whatever was found; those named `but` keep what they have, if anything."""
        kept = set(but)
        for metric in self.metrics:
            if metric.name not in kept:
                self._found.pop((metric.name, metric.phase), None)
        self.rest(outcome, reason)

    @property
    def outcome(self) -> str:
        """The case's outcome: the first fault among its metrics, or else that of its first metric."""
        return self._first[0]

    @property
    def reason(self) -> str | None:
        """Why the case has that outcome; None where it is "ok"."""
        return self._first[1]

    @property
    def _first(self) -> tuple[str, str | None]:
        found = [self._found[metric.name, metric.phase][:2] for metric in self.metrics]
        return next(((outcome, reason) for outcome, reason in found if outcome in FAULTS), found[0])

    def report(self, case: Case, device_key: str, report: Reporter) -> None:
        """One measurement per metric."""
        from workers.measure.measurement import Measurement

        for metric in self.metrics:
            outcome, reason, samples = self._found[metric.name, metric.phase]
            report.measure(
                Measurement(
                    case=case.coordinates,
                    case_key=case.key,
                    device_key=device_key,
                    phase=metric.phase,
                    metric=metric.name,
                    unit=metric.unit,
                    outcome=outcome,
                    reason=reason,
                    samples=samples,
                )
            )
