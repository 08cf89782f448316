"""Comparisons in turns, for a check of jobs that ran at different times, and could not tell or found a slowdown."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

FEWEST, MOST = 8, 40
"""Processes of each side. More than MOST would take hours, and a host that needs more is too noisy."""
OF_THE_RUN = ("replicates", "seed")
"""Fields in which jobs of one baseline may differ; a comparison has replicates of its own."""


def comparisons(
    baseline: Iterable[Mapping[str, Any]], candidate: Iterable[Mapping[str, Any]]
) -> tuple[list[dict[str, Any]], bool]:
    """Return the specs, without replicates, of the comparisons of a baseline's jobs with those of a candidate: of each
    two specs that name different versions of one's code and are otherwise the same. The second value is True if that is
    all of the candidate's work."""
    before = [job["spec"] for job in baseline]
    after = {_work(job["spec"]): job["spec"] for job in candidate}
    pairs = []
    for work, spec in after.items():
        # A release's specs lack the fields that came later.
        same = next((one for one in ({**spec, **former} for former in before) if _work(one) == work), spec)
        if versions(same) != versions(spec):
            pairs.append({"kind": "compare", "baseline": of_side(same), "candidate": of_side(spec)})
    return pairs, len(pairs) == len(after)


def replicates(comparison: Mapping[str, Any], percent: float) -> int:
    """Return how many processes of each side would find a difference of so many percent in what the gate judges, within
    FEWEST and MOST; of single processes, whose spread is unknown, FEWEST. Cases that were slower are measured again, as
    those that were inconclusive."""
    limits = [number for number in (1, 3, 5) if number <= percent]
    column = f"replicates_for_{max(limits, default=1)}_percent"
    judged = [row for row in comparison["rows"] if row.get("metric") in comparison["gate"]["metrics"]]
    undecided = [row for row in judged if row["finding"] in ("inconclusive", "worse")]
    needed = [row[column] or MOST for row in undecided if row["spread_percent"] is not None]
    return min(MOST, max([FEWEST, *needed]))


def versions(spec: Mapping[str, Any]) -> list[str]:
    """Return the hashes of the uploaded code that a spec names."""
    return [code["sha256"] for code in spec.values() if _is_code(code)]


def _is_code(value: object) -> bool:
    return isinstance(value, Mapping) and "sha256" in value


def of_side(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return a spec as a side of a comparison, which has no replicates of its own; of a diagnosis its step."""
    of = spec["step"] if spec["kind"] == "diagnosis" else spec
    return {name: value for name, value in of.items() if name != "replicates"}


def _work(spec: Mapping[str, Any]) -> str:
    kept = {
        name: {part: value[part] for part in ("function", "file") if part in value} if _is_code(value) else value
        for name, value in spec.items()
        if name not in OF_THE_RUN
    }
    return json.dumps(kept, sort_keys=True)
