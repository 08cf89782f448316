"""Chooses what a table of cases shows: the coordinates of its rows, and the metrics that are columns.

Rows show the coordinates that a kind asks for (`table_rows`), then all others that vary, except those that a shown
label represents and no sweep varies. If two rows still look the same, they also show the coordinates in which they
differ.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from app.errors import InvalidRequest, nearest
from app.metrics import headline
from app.results.cases import OF_THE_JOB, CaseOfJob
from app.specs import KINDS
from flopwatch.text.cases import in_use

UNKNOWN = "unknown"
WHOLE_STEPS = ("step", "first_step", "isolated_step")
"""Phases that are a whole step."""
EVERY_METRIC = "all"


def coordinates_of(
    cases: Sequence[CaseOfJob], requested: Sequence[str] | None, *, also: str | None = None, swept: Collection[str] = ()
) -> list[str]:
    """Return the coordinates that the rows show: those that were requested (None: the kind's own, except those of which
    no case has a value), and those that vary; `also` is shown elsewhere. Fields in `swept` are shown where they vary,
    although a label represents them."""
    known = known_of(cases)
    if requested is None:
        used = {name for case in cases for name, value in case.coordinates.items() if value is not None}
        chosen = [name for name in table_rows_of(cases) if name in used]
        if len({case.kind for case in cases}) > 1:
            chosen.insert(0, "kind")
    else:
        refuse_unknown("rows", requested, [*known, *OF_THE_JOB], there_is_something=bool(cases))
        chosen = list(dict.fromkeys(requested))
    if also is not None and also not in chosen:
        chosen.append(also)
    varying = [name for name in known if name not in chosen and varies(cases, name)]
    hidden = _represented_by_labels(cases, chosen) - set(swept)
    chosen += [name for name in varying if name not in hidden]
    _distinguish(cases, chosen, [*(name for name in varying if name in hidden), "job", "case_key"])
    return chosen


def varies(cases: Sequence[CaseOfJob], name: str) -> bool:
    """Return True if the cases have several values of a coordinate."""
    # A job that measured nothing lacks some columns of its case, such as the device; that does not count as a
    # difference.
    values = [case.coordinates.get(name) for case in cases if case.processes or name in case.coordinates]
    first = in_use(values[0]) if values else None
    others = (in_use(value) for value in values if value is not first)
    # Types count too: in Python, 1 equals True.
    return any(value is not first and (value != first or type(value) is not type(first)) for value in others)


def _represented_by_labels(cases: Sequence[CaseOfJob], shown: Collection[str]) -> set[str]:
    """Return the coordinates that a shown label represents, or another coordinate implies, in every case with them."""
    stand_for = [{**KINDS[kind].labels, **KINDS[kind].implied} for kind in kinds_of(cases)]
    labels = [item for its in stand_for for item in its.items() if item[0] in shown]
    return {
        name
        for label, names in labels
        for name in names
        if all(label in case.coordinates for case in cases if name in case.coordinates)
    }


def _distinguish(cases: Sequence[CaseOfJob], chosen: list[str], more: Iterable[str]) -> None:
    """Add to `chosen`, in place, the coordinates of `more` that differ between rows that look the same."""
    for name in more:
        # JSON texts distinguish 1 from true, which Python does not.
        alike: dict[str, list[CaseOfJob]] = {}
        for case in cases:
            alike.setdefault(repr([case.show(shown) for shown in chosen]), []).append(case)
        if len(alike) == len(cases):
            return
        if name not in chosen and any(
            len({repr(case.show(name)) for case in look}) > 1 for look in alike.values() if len(look) > 1
        ):
            chosen.append(name)


def metrics_of(cases: Sequence[CaseOfJob], units: Mapping[str, str], requested: Sequence[str] | None) -> list[str]:
    """Return the metrics that are columns: those asked for, or those of the kinds that were measured."""
    of_kinds = (name for kind in kinds_of(cases) for name in KINDS[kind].table_columns)
    preferred = dict.fromkeys([*_phases(cases), *of_kinds])
    every = [*(name for name in preferred if name in units), *(name for name in units if name not in preferred)]
    if requested is not None:
        offered = {name for kind in KINDS.values() for name in kind.table_columns}
        known = [EVERY_METRIC, *units, *sorted(offered - set(units))]
        refuse_unknown("columns", requested, known, there_is_something=bool(units))
        return list(dict.fromkeys(name for word in requested for name in (every if word == EVERY_METRIC else [word])))
    if not units:  # all jobs failed before they measured anything: their outcomes need a column
        return [name for name in preferred if name == headline(list(preferred))]
    # A column is left out if it is "ok" in no cell and unknown in some, even if other cells have a worse outcome.
    outcomes = _outcomes(cases)
    measured = {name for name, its in outcomes.items() if "ok" in its or UNKNOWN not in its}
    return [name for name in preferred if name in measured] or [name for name in units if name in measured] or every[:1]


def _outcomes(cases: Iterable[CaseOfJob]) -> dict[str, set[str]]:
    outcomes: dict[str, set[str]] = {}
    for case in cases:
        for name in case.processes:
            outcomes.setdefault(name, set()).add(case.outcome(name))
    return outcomes


def _phases(cases: Sequence[CaseOfJob]) -> list[str]:
    """Return the times of the phases that steps of the user's own name, which no kind knows before, in their order."""
    return [
        name
        for case in cases
        for kind in kinds_of([case])
        if KINDS[kind].has_own_phases
        for name, rows in case.processes.items()
        for row in rows[:1]
        if row.phase not in (None, *WHOLE_STEPS) and row.metric in (f"{row.phase}_ms", "unprofiled_ms")
        if name not in KINDS[kind].table_columns
    ]


def kinds_of(cases: Sequence[CaseOfJob]) -> list[str]:
    """Return the kinds that the tables of these cases follow. Kinds that this version does not know are left out."""
    return [kind for kind in dict.fromkeys(kind for case in cases for kind in case.tabled_as) if kind in KINDS]


def known_of(cases: Iterable[CaseOfJob]) -> list[str]:
    """Return the names of all coordinates, in order."""
    return list(dict.fromkeys(name for case in cases for name in case.coordinates))


def table_rows_of(cases: Sequence[CaseOfJob]) -> list[str]:
    """Return the coordinates that the kinds of these cases ask for."""
    return list(dict.fromkeys(name for kind in kinds_of(cases) for name in KINDS[kind].table_rows))


def refuse_unknown(what: str, requested: Sequence[str], known: Sequence[str], *, there_is_something: bool) -> None:
    """Raise InvalidRequest for the first name that is not known, with the nearest that is."""
    unknown = [name for name in requested if name not in known]
    if unknown and there_is_something:
        noun = "column" if what == "columns" else "coordinate"
        raise InvalidRequest.at(f"/{what}", f"These results have no {noun} {unknown[0]!r}{nearest(unknown[0], known)}")
