"""Checks that the replicates of one case agree, each a process, or in `flopwatch run` a repetition: check `replicates`.

A median of processes of 550, 635, 15.5 and 18.5 ms is 284 ms, a time that none of them took.
"""

import statistics

from app.metrics import TIMES, column_name, headline
from app.store.records import MeasurementRecord
from flopwatch.text.numbers import number
from workers.measure.check import Check

MOST, MOST_ON_GPU = 2.0, 1.1
"""Largest ratio of two processes' medians. A GPU works alone; on a CPU others' work lengthens some processes by half
and more."""
FEWEST_TO_CUT = 6
"""Of so many processes or more, only the slowest and the fastest are named."""


class Replicates:
    """The medians of the times that each process measured, by case and side of a comparison."""

    def __init__(self) -> None:
        self._medians: dict[tuple[str, str, str | None], dict[str, dict[int, float]]] = {}

    def add(self, record: MeasurementRecord, side: str | None) -> None:
        if record.unit in TIMES and record.median is not None:
            of_case = self._medians.setdefault((record.case_key, record.device_key, side), {})
            of_case.setdefault(column_name(record.metric, record.phase), {})[record.unit_index] = record.median

    def so_far(self) -> str:
        """Say what both sides of a comparison of one case took so far, as medians of the processes' medians, where the
        result may take their fastest samples: "so far median step_ms 1.57 → 0.264, 3 and 4 processes"; nothing without
        both."""
        sides = {side: metrics for (_, _, side), metrics in self._medians.items()}
        if len(self._medians) != 2 or not {"baseline", "candidate"} <= sides.keys():
            return ""
        name = headline(list(sides["baseline"]))
        both = [list(sides[side].get(name or "", {}).values()) for side in ("baseline", "candidate")]
        if not all(both):
            return ""
        before, after = (number(float(f"{statistics.median(values):.3g}")) for values in both)
        return f"so far median {name} {before} → {after}, {len(both[0])} and {len(both[1])} processes"

    def checks(self, device_type: str) -> dict[tuple[int, str], Check]:
        """Return a failed check for each case on whose main time its processes disagree, by its first unit and key."""
        most = MOST_ON_GPU if device_type == "cuda" else MOST
        found = {}
        for (case_key, _, _), metrics in self._medians.items():
            name = headline(list(metrics))
            medians = metrics[name] if name is not None else {}
            values = list(medians.values())
            if len(values) < 2 or min(values) <= 0 or max(values) <= most * min(values):
                continue
            named = ", ".join(f"{value:.4g}" for value in values)
            if len(values) >= FEWEST_TO_CUT:
                named = f"{min(values):.4g} to {max(values):.4g}"
            detail = f"{name} of {len(values)} replicates: {named}; they differ by more than a factor of {most:g}"
            found[min(medians), case_key] = Check("replicates", False, detail)
        return found
