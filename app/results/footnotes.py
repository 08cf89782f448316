"""Footnotes of a table of measurements: which rows are not valid or only partial, which cells are empty, and why."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.specs import Scalar
from flopwatch.text.cases import MAX_LISTED, case_text

DAGGER, PARTIAL, NOISY = "†", "*", "‡"
MAX_NOISE = 0.05
"""Largest spread of a median, as a share of it, that is not called noisy; what comparisons look for."""
MAX_GROUPS = 9
"""Largest number of reasons with a sign of their own; all other rows that are not valid share one sign."""
MAX_DETAIL = 160
"""Most characters of a check's detail in a footnote. JSON and CSV have all of it."""
MAX_NAMED = 5
"""Most jobs that a footnote names."""

NOT_MEASURED = "measured"
"""The check that fails if a cell has no times, for which the cell shows its outcome (`wrong`, `crashed`)."""

Doubt = tuple[str, str]
"""A check that was not passed, and its detail."""


def doubts_of(validity: Mapping[str, Any] | None, case_key: str | None) -> list[Doubt]:
    """Return the failed checks of a unit's or a job's verdict that concern one of its cases.

    A check without a `case_key` belongs to a unit with a single case, or to all its cases; notes are left out.
    """
    checks = [check for check in (validity or {}).get("checks") or () if isinstance(check, dict)]
    return [
        (str(check.get("name")), str(check.get("detail") or ""))
        for check in checks
        if not check.get("ok")
        and check.get("severity") != "note"
        and check.get("case_key", None if "case" in check else case_key) == case_key
    ]


def doubts_text(doubts: Sequence[Doubt]) -> str | None:
    """Write checks with their details: "variation: coefficient of variation 26.4%; host_load: …"; None if none."""
    return "; ".join(": ".join(filter(None, doubt)) for doubt in doubts) or None


@dataclass
class _Group:
    """The rows that are not valid for the same checks."""

    verdict: str
    doubts: Sequence[Doubt]
    rows: int = 0

    def text(self, mark: str) -> str:
        if not self.doubts:
            why = "the checks of its job say why" if self.rows == 1 else "the checks of their jobs say why"
        elif self.rows == 1:
            why = "; ".join(f"{name}: {_short(detail)}" if detail else name for name, detail in self.doubts)
        else:
            name, detail = self.doubts[0]
            of = "" if len(self.doubts) == 1 else f"{name}: "
            first = f" (of the first: {of}{_short(detail)})" if detail else ""
            why = f"{', '.join(name for name, _ in self.doubts)}{first}"
        count = "" if self.rows == 1 else f" ({self.rows} cases)"
        return f"{mark} {self.verdict}{count}: {why}{'' if why.endswith('…') else '.'}"


@dataclass
class Footnotes:
    """Assigns signs to rows while a table is made, and then writes the notes that explain them."""

    reasons: bool = True
    """False: the notes have no reasons, because the reader sees the checks beside the table."""
    groups: dict[tuple[str, tuple[str, ...]], _Group] = field(default_factory=dict)
    noise: list[tuple[float, str]] = field(default_factory=list)
    """The noise of each row that is valid, but noisy, and the column that has it."""
    stopped: dict[str, set[int]] = field(default_factory=dict)
    """The jobs that ended early, by the code of their end."""

    def count(self, verdict: str | None, doubts: Sequence[Doubt]) -> None:
        """Count a row that is not valid; others are ignored, and rows that were not measured: their cells say so."""
        if _needs_no_sign(verdict, doubts):
            return
        doubts = doubts if self.reasons else ()
        group = self.groups.setdefault(_key(str(verdict), doubts), _Group(str(verdict), _each_once(doubts)))
        group.rows += 1

    def count_noisy(self, noise: float, column: str) -> None:
        """Count a valid row whose noisiest median, of this column, is known to this share of it only."""
        self.noise.append((noise, column))

    def count_partial(self, job: int | None, code: str) -> None:
        """Count a row that was measured before its job ended without success."""
        self.stopped.setdefault(code, set()).update(() if job is None else (job,))

    def mark(self, verdict: str | None, doubts: Sequence[Doubt], *, partial: bool) -> str:
        """Return the signs of a row; every row must have been counted before."""
        signs = PARTIAL if partial else ""
        if _needs_no_sign(verdict, doubts):
            return signs
        if len(self.groups) == 1:
            return DAGGER + signs
        place = list(self.groups).index(_key(str(verdict), doubts if self.reasons else ()))
        return (f"{DAGGER}{place + 1}" if place < MAX_GROUPS else DAGGER) + signs

    def notes(self) -> list[str]:
        """Return a sentence for each sign."""
        groups = list(self.groups.values())
        several = len(groups) > 1
        notes = [
            group.text(f"{DAGGER}{number}" if several else DAGGER)
            for number, group in enumerate(groups[:MAX_GROUPS], start=1)
        ]
        if rest := groups[MAX_GROUPS:]:
            rows = sum(group.rows for group in rest)
            verdicts = " or ".join(dict.fromkeys(group.verdict for group in rest))
            notes.append(f"{DAGGER} {verdicts} ({rows} cases): the checks of their jobs say why.")
        if self.noise:
            noisy = f"{len(self.noise)} row{'s' if len(self.noise) > 1 else ''}"
            most, column = max(self.noise)
            notes.append(
                f"{NOISY} noisy ({noisy}): medians uncertain by up to ±{most:.0%}, that of {column}; use replicates, a "
                "sweep over seed or `flopwatch compare` to detect small differences."
            )
        if self.stopped:
            codes = "; ".join(code + named(jobs) for code, jobs in self.stopped.items())
            notes.append(f"{PARTIAL} partial: measured before the job ended without success: {codes}.")
        return notes


def _needs_no_sign(verdict: str | None, doubts: Sequence[Doubt]) -> bool:
    return verdict in (None, "valid") or {name for name, _ in doubts} == {NOT_MEASURED}


def _key(verdict: str, doubts: Iterable[Doubt]) -> tuple[str, tuple[str, ...]]:
    return verdict, tuple(dict.fromkeys(name for name, _ in doubts))


def _each_once(doubts: Iterable[Doubt]) -> list[Doubt]:
    details: dict[str, str] = {}
    for name, detail in doubts:
        details.setdefault(name, detail)
    return list(details.items())


def _short(text: str) -> str:
    if len(text) <= MAX_DETAIL:
        return text
    cut = text[: MAX_DETAIL - 1]
    return f"{(cut.rpartition(' ')[0] or cut).rstrip(',;:')} …"


def named(jobs: Iterable[int]) -> str:
    """Write jobs in brackets: " (jobs 7, 8)"; nothing if there are none."""
    numbers = sorted(jobs)
    if not numbers:
        return ""
    shown = ", ".join(map(str, numbers[:MAX_NAMED]))
    more = f" and {len(numbers) - MAX_NAMED} more" if len(numbers) > MAX_NAMED else ""
    return f" ({'job' if len(numbers) == 1 else 'jobs'} {shown}{more})"


MAX_REASONS = 100


@dataclass(frozen=True)
class Gap:
    """A metric that has no number in one case, which is counted from 0."""

    case: int
    metric: str
    outcome: str
    reason: str


def reasons(cases: Sequence[Mapping[str, Scalar]], measured: Collection[int], gaps: Iterable[Gap]) -> list[str]:
    """Return one line for each reason, at most MAX_REASONS: its cases and their number, their outcome, the reason. A
    line names the coordinates that distinguish its cases, and its metrics only if those cases have other numbers.
    `measured` are the cases that have a number, `gaps` the metrics that have none in a case."""
    groups: dict[tuple[bool, str, str], list[Gap]] = {}
    for gap in gaps:
        groups.setdefault((gap.case in measured, gap.outcome, gap.reason), []).append(gap)
    # This is counted once, and not again for each reason: a job may have thousands of cases, each with its own reason.
    variety = {
        has_numbers: _variety([case for number, case in enumerate(cases) if not has_numbers or number in measured])
        for has_numbers in {has_numbers for has_numbers, _, _ in groups}
    }
    lines = []
    # Cases without any number come first.
    in_order = sorted(groups.items(), key=lambda item: item[0][0])
    for (has_numbers, outcome, reason), group in in_order[:MAX_REASONS]:
        of_group = {gap.case for gap in group}
        words = [_particular(variety[has_numbers], [cases[number] for number in sorted(of_group)])]
        if has_numbers:
            metrics = list(dict.fromkeys(gap.metric for gap in group))
            words.append(", ".join(metrics) if len(metrics) <= MAX_LISTED else f"{len(metrics)} metrics")
        where = ", ".join(filter(None, words))
        count = f"all {len(of_group)} cells" if len(of_group) == len(cases) else f"{len(of_group)} cells"
        if len(of_group) > 1:
            where = f"{where} ({count})" if where else count
        lines.append(": ".join(filter(None, (where, outcome, " ".join(reason.split())))))
    if len(in_order) > MAX_REASONS:
        lines.append(f"and {len(in_order) - MAX_REASONS} more reasons; each measurement has its own")
    return lines


def _particular(variety: Mapping[str, int], group: Sequence[Mapping[str, Scalar]]) -> str:
    """Return, in words, the coordinates that take fewer values in `group` than in all cases (`variety`)."""
    particular: dict[str, Scalar] = {}
    for name in dict.fromkeys(name for case in group for name in case):
        values = _values(group, name)
        if len(values) <= MAX_LISTED and len(values) < variety[name]:
            particular[name] = values[0] if len(values) == 1 else "/".join(map(str, values))
    return case_text(particular)


def _variety(cases: Sequence[Mapping[str, Scalar]]) -> dict[str, int]:
    names = dict.fromkeys(name for case in cases for name in case)
    return {name: len(_values(cases, name)) for name in names}


def _values(cases: Iterable[Mapping[str, Scalar]], name: str) -> list[Scalar]:
    # Values are compared as JSON text, since in Python 1 equals True.
    return list({repr(case.get(name)): case.get(name) for case in cases}.values())
