"""Lists the reasons why cells of a table have no numbers, each reason once."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from app.specs import Scalar
from flopwatch.text.cases import MAX_LISTED, case_text

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
