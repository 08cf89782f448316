"""The reporter of a running unit: it makes a message of each report, and sends it."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from workers import messages
from workers.measure.measurement import Measurement
from workers.measure.table import Column, Scalar, Table


class Reporter:
    """Takes the reports of a running unit, and sends each to the agent at once. `scratch`: the folder that only this
    unit uses; the agent removes it after the unit. `ceilings`: the folder of this host's measured ceilings
    (workers.measure.ceilings.Ceilings)."""

    def __init__(self, send: Callable[[messages.Message], None], *, scratch: Path, ceilings: Path) -> None:
        self.send = send
        self.scratch = scratch
        self.ceilings = ceilings

    def progress(self, done: int, total: int, message: str) -> None:
        """Report that `done` of `total` steps of this unit are done."""
        self.send(messages.Progress(done, total, message))

    def finished(self, done: int, total: int, *, title: str, outcome: str, headline: str, seconds: float) -> None:
        """Report that a cell is finished, after `seconds`, as number `done` of `total`.

        Every finished cell is shown, in order, whereas only the newest `progress` is. The headline is the cell's first
        number, or the reason why it has none.
        """
        self.send(messages.CellFinished(done, total, title, outcome, headline, seconds))

    def cursor(self, position: int) -> None:
        """Report that the unit now works on step `position`, counted from 0; `Resumable.resume` gets the position if
        this process dies."""
        self.send(messages.Cursor(position))

    def measure(self, measurement: Measurement) -> None:
        """Report one metric of one finished case; the agent keeps it even if the unit fails later."""
        self.send(messages.Measured(**measurement.to_wire()))

    def table(self, name: str, columns: Sequence[Column], rows: Sequence[Sequence[Scalar]]) -> None:
        """Report a finished table, whose name is new in this unit. Several units may report tables of one name, if
        their columns are the same. Raises ValueError: it is not a valid table, or is too large
        (workers.measure.table.TooLarge)."""
        table = Table(name, columns, rows)
        self.send(messages.TableMade(table.name, list(table.columns), [list(row) for row in table.rows]))

    def artifact(self, path: Path, *, name: str, kind: str, media_type: str) -> None:
        """Report a finished file below `scratch`; the agent moves it into the store under `name`, which is new in this
        unit."""
        self.send(messages.ArtifactMade(str(path.absolute()), name, kind, media_type))

    def environment(self, fingerprint: Mapping[str, Any]) -> None:
        """Report the environment in which this unit measured; a later one adds keys that the first one lacks."""
        self.send(messages.Environment(dict(fingerprint)))

    def validity(self, verdict: Mapping[str, Any], case_key: str | None = None, title: str = "") -> None:
        """Report a verdict, {"verdict", "checks"}, on one case or, without a key, on all other cases of the unit.
        `verdict`: the return value of workers.measure.validity.verdict. `title`: the case, for people."""
        self.send(messages.Validity(verdict["verdict"], verdict["checks"], case_key, title))
