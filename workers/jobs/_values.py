"""A runner's results for one case: samples of each metric, or an outcome and the reason why there are none."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from app.specs import Case
from workers.measure.measurement import Measurement
from workers.reporter import Reporter

FAULTS = ("crashed", "failed", "invalid_environment", "wrong")
"""Outcomes that are a fault of the implementation or of this host. "unsupported" and "oom" are not faults: the case was
measured as far as possible."""

GPU_ONLY = "known on GPUs only"


@dataclass(frozen=True)
class Metric:
    """A metric's name, the phase that it belongs to, and its unit.

    (name, phase) names the column of tables. A rate or a peak without a phase covers the mode's whole measured work.
    """

    name: str
    phase: str | None
    unit: str


class Values:
    """The results of each metric of a case."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self.metrics = metrics
        self._results: dict[tuple[str, str | None], tuple[str, str | None, Sequence[float] | None]] = {}

    def set(self, name: str, phase: str | None, samples: Sequence[float] | None, reason: str = "") -> None:
        """Set a metric's samples, or None and the reason why they are unknown. Only declared metrics are reported."""
        self._results[name, phase] = ("unknown", reason, None) if samples is None else ("ok", None, samples)

    def set_missing(self, outcome: str, reason: str, of: Iterable[Metric] | None = None) -> None:
        """Give this outcome to every metric that has no result yet; `of` limits it to these metrics."""
        for metric in self.metrics if of is None else of:
            self._results.setdefault((metric.name, metric.phase), (outcome, reason, None))

    def samples(self, name: str, phase: str | None) -> Sequence[float] | None:
        """Return a metric's samples; None if it has none or no result yet."""
        return self._results.get((name, phase), ("", None, None))[2]

    def overrule(self, reason: str, but: Iterable[str] = ()) -> None:
        """Make every metric wrong, also those with samples; metrics named `but` keep their results."""
        kept = set(but)
        for metric in self.metrics:
            if metric.name not in kept:
                self._results.pop((metric.name, metric.phase), None)
        self.set_missing("wrong", reason)

    @property
    def outcome(self) -> str:
        """The case's outcome: the first fault among its metrics, or the outcome of its first metric."""
        return self._first[0]

    @property
    def reason(self) -> str | None:
        """The reason for the case's outcome; None if it is "ok"."""
        return self._first[1]

    @property
    def _first(self) -> tuple[str, str | None]:
        outcomes = [self._result(metric)[:2] for metric in self.metrics]
        return next(((outcome, reason) for outcome, reason in outcomes if outcome in FAULTS), outcomes[0])

    def _result(self, metric: Metric) -> tuple[str, str | None, Sequence[float] | None]:
        """Return a metric's outcome, its reason and samples. Raises RuntimeError: the runner declared it and gave it no
        result."""
        key = metric.name, metric.phase
        if key not in self._results:
            raise RuntimeError(f"metric {key} was declared and not set; set are {', '.join(map(str, self._results))}")
        return self._results[key]

    def headline(self) -> str:
        """Return the first metric's median, or the reason why the case has none, in a few words."""
        metric = self.metrics[0]
        samples = self.samples(metric.name, metric.phase)
        if self.outcome == "ok" and samples:
            return f"{metric.name} {statistics.median(samples):.4g}"
        return ": ".join(filter(None, (self.outcome, self.reason)))

    def report(self, case: Case, device_key: str, report: Reporter) -> None:
        """Report one measurement per metric."""
        for metric in self.metrics:
            outcome, reason, samples = self._result(metric)
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
