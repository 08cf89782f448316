"""The samples of one metric of some jobs, case by case, for plots of distributions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from app.store.database.engine import Database
from app.store.reading import measurements
from flopwatch.text.cases import case_text


@dataclass(frozen=True)
class CaseSamples:
    """The samples of a case in one job, of all processes, in the order of the processes."""

    job: int
    side: str | None
    """Its side in a job of kind `compare`; None in other jobs."""
    case: str
    """The case in words."""
    unit: str
    values: Sequence[float]


def samples_of(database: Database, jobs: Sequence[int], metric: str, coordinates: Sequence[str]) -> list[CaseSamples]:
    """Return the samples of a metric, named as its column, in each case of these jobs.

    `coordinates`: the coordinates that distinguish the cases; `case` names them.
    """
    with database.read() as snapshot:
        rows = measurements.samples(snapshot, jobs, metric)
    values: dict[tuple[int, str | None, str], list[float]] = {}
    units: dict[tuple[int, str | None, str], str] = {}
    for row in rows:
        case = case_text({name: row.case[name] for name in coordinates if row.case.get(name) is not None})
        key = (row.job_id, row.side, case)
        values.setdefault(key, []).extend(row.samples)
        units[key] = row.unit
    in_order = sorted(values, key=lambda key: (jobs.index(key[0]), key[1] or ""))  # drawn turns begin with either side
    return [CaseSamples(*key, unit=units[key], values=values[key]) for key in in_order if values[key]]
