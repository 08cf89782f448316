"""The spool: the agent keeps a running job's results here until it commits them with the final state.

The agent numbers the units, and does not trust their messages: `messages.parse` has checked each, and the spool bounds
the sizes of all together. Nothing can check measured values: they are taken as the unit reports them.
"""

import json
import re
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from app.store.records import MeasurementRecord, StoredArtifact, TableRecord, UnitRecord
from workers.agent.log import CappedLog
from workers.agent.measurements import record_of
from workers.agent.replicates import Replicates
from workers.agent.verdicts import TABLE, CaseVerdict, checks_table, summed_up
from workers.measure.check import Check
from workers.measure.table import UNIT_COLUMN, Column, Table, TooLarge
from workers.messages import Environment, Measured, TableMade, Validity, case_bytes, cut
from workers.outcome import Cancelled, Failed, Outcome, UnfitResult

MAX_MEASUREMENTS = 200_000
"""As many as one table of results shows."""
MAX_MEASUREMENT_BYTES = 512 << 20
"""Largest size in bytes of all measurements of one job: their texts, and eight bytes for each sample."""
MAX_TABLES = 2000
"""Most tables of one job. Tables of one name in two units count as two."""
MAX_TABLES_ROWS = 200_000
"""Most rows of all tables of one job together: the server reads tables of one name into memory to sort and render."""
MAX_TABLES_BYTES = 32 << 20
"""Most bytes of all tables of one job together, as JSON."""
MAX_CHECK_ROWS = 20_000
"""Most rows of a unit's table of checks: of 800 bytes each, they are within the bounds of a table."""
ARTIFACT_NAME = re.compile(r"[\w-][\w.-]{0,199}", re.ASCII)
MAX_ARTIFACTS = 10_000
FAILURES = ("crashed", "failed", "invalid_environment")
ANSWERS = ("ok", "oom", "wrong")
"""Outcomes of cases; others, such as "unsupported", are neither."""
MAX_VERDICT_BYTES = 64 << 20
"""Most bytes of all verdicts of one job."""


@dataclass
class _UnitResults:
    """A unit that runs or has run."""

    index: int
    title: str
    side: str | None
    outcome: str = "crashed"
    reason: str | None = None
    environment: dict[str, Any] | None = None
    verdicts: dict[str | None, CaseVerdict] = field(default_factory=dict)
    """Verdicts by case key; the key None has the verdict on the unit's other cases."""
    kept: set[tuple[str, str | None, str]] = field(default_factory=set)
    """(case key, phase, metric) of the measurements that crashed processes sent: later processes do not replace
    them."""
    outcomes: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    """Outcome and reason of each case that has measurements, by its key."""
    judged: set[str] = field(default_factory=set)
    """Keys of the cases on which those processes gave a verdict."""


class Spool:
    """Measurements, tables, artifacts, units and log of one attempt. Results belong to the unit that began last.
    `neighbours`: ids of the jobs that ran on this host when the job began; they become part of each environment."""

    def __init__(self, neighbours: Sequence[int] = ()) -> None:
        self.log = CappedLog()
        self._neighbours = list(neighbours)
        self._tables: list[TableRecord] = []
        self.artifacts: list[StoredArtifact] = []
        self._measurements: list[MeasurementRecord] = []
        self._units: list[_UnitResults] = []
        self.replicates = Replicates()
        self._columns: dict[str, tuple[str, list[Column]]] = {}
        """Columns of the tables so far, by table name, after the title of the first unit that reported one."""
        self._table_bytes = self._table_rows = self._verdict_bytes = self._measurement_bytes = 0
        self._names: dict[str, tuple[int, str]] = {}
        """Public names of artifacts so far, with their units' titles and own names."""

    def begin_unit(self, index: int, title: str, side: str | None = None) -> None:
        """Begin a unit of the plan. All results that follow belong to it."""
        self._units.append(_UnitResults(index, cut(title), side))

    def continue_after_crash(self, reason: str) -> None:
        """Record that the unit crashed, for the given `reason`, and continues in a fresh process.

        Results that the spool already has are kept: the fresh process reports the cell in which the earlier one ended
        as crashed, although the earlier process may have sent that cell's results.
        """
        unit = self._unit
        unit.reason = cut(reason)
        unit.kept |= {
            (record.case_key, record.phase, record.metric)
            for record in self._measurements
            if record.unit_index == unit.index
        }
        unit.judged |= {key for key in unit.verdicts if key is not None}

    def end_unit(self, outcome: Outcome) -> None:
        unit = self._unit
        if isinstance(outcome, Failed):
            unit.outcome, unit.reason = outcome.code, cut(outcome.detail + outcome.where)
        elif isinstance(outcome, Cancelled):
            unit.outcome = "cancelled"
        else:
            unit.outcome = "succeeded"

    @property
    def _unit(self) -> _UnitResults:
        return self._units[-1]

    def add(self, message: Measured | TableMade | Environment | Validity) -> None:
        """Add a result of the unit. Raises ValueError: its parts do not agree; TooLarge: it, or all results of its kind
        of this job, exceed a limit; UnfitResult: it does not fit to an earlier result."""
        match message:
            case Measured():
                self._add_measurement(message)
            case TableMade():
                self._add_table(message)
            case Environment():
                # The first one counts, since a unit stays on its devices; a later one adds what was not known then.
                known = self._unit.environment or {}
                self._unit.environment = {**message.environment, "neighbours": self._neighbours, **known}
            case Validity():
                self._add_validity(message)

    def failure(self) -> str | None:
        """Return why the job has failed although its units have not: no case has an answer, and some failed. None if
        that is not so; a lack of memory and a wrong result are answers."""
        outcomes = [each for unit in self._units for each in unit.outcomes.values()]
        reasons = [reason for outcome, reason in outcomes if outcome in FAILURES]
        counts = Counter(outcome for outcome, _ in outcomes)
        if not reasons or counts.keys() & ANSWERS:
            return None
        each = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
        return f"no case was measured ({each}): {reasons[0]}"

    def _add_measurement(self, message: Measured) -> None:
        record = record_of(message, self._unit.index)
        self._measurement_bytes += case_bytes(record.case) + 8 * (record.n or 0) + len(record.reason or "")
        count = len(self._measurements) + 1
        if count > MAX_MEASUREMENTS or self._measurement_bytes > MAX_MEASUREMENT_BYTES:
            raise TooLarge(
                f"this job has {count} measurements of {self._measurement_bytes} bytes; {MAX_MEASUREMENTS} measurements"
                f" and {MAX_MEASUREMENT_BYTES} bytes of them are kept: split the job"
            )
        if (record.case_key, record.phase, record.metric) not in self._unit.kept:
            self._measurements.append(record)
            known, _ = self._unit.outcomes.get(record.case_key, ("", None))
            if _weight(record.outcome) > _weight(known):
                self._unit.outcomes[record.case_key] = record.outcome, record.reason
            self.replicates.add(record, self._unit.side)

    def _add_table(self, message: TableMade) -> None:
        table = Table(message.name, message.columns, message.rows)
        unit = self._unit
        if table.name == TABLE:
            raise UnfitResult(
                f"unit {unit.index} ({unit.title}) reports a table named {TABLE!r}: that name is reserved for the "
                "checks of its cases; choose another"
            )
        if any(other.name == table.name and other.unit_index == unit.index for other in self._tables):
            raise UnfitResult(f"unit {unit.index} ({unit.title}) reports two tables named {table.name!r}")
        first, columns = self._columns.setdefault(table.name, (unit.title, list(table.columns)))
        if list(table.columns) != columns:
            raise UnfitResult(
                f"table {table.name!r} of unit {unit.index} ({unit.title}) has other columns than that of {first!r}: "
                f"{_listed(table.columns)}, not {_listed(columns)}"
            )
        rows = table.to_json()
        self._table_bytes += len(rows)
        self._table_rows += len(table.rows)
        if (
            len(self._tables) >= MAX_TABLES
            or self._table_rows > MAX_TABLES_ROWS
            or self._table_bytes > MAX_TABLES_BYTES
        ):
            raise TooLarge(
                f"this job has {len(self._tables) + 1} tables of {self._table_bytes} bytes and {self._table_rows} rows "
                f"with table {table.name!r} of unit {unit.index} ({unit.title}); {MAX_TABLES} tables of "
                f"{MAX_TABLES_BYTES} bytes and {MAX_TABLES_ROWS} rows are kept: report the top rows"
            )
        self._tables.append(_stored(table, rows, unit.index))

    def name_artifact(self, name: str) -> str:
        """Reserve and return the public name of the unit's artifact `name`. No other artifact of the job can get it.
        Raises ValueError: `name` is not a valid artifact name; UnfitResult: another artifact has this name, or the
        public name that follows from it; TooLarge: this job exceeds the limit of artifacts."""
        if not ARTIFACT_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no artifact's name: letters, digits, '.', '_', '-'; at most 200")
        unit = self._unit
        if len(self._names) >= MAX_ARTIFACTS:
            raise TooLarge(
                f"artifact {name!r} of unit {unit.index} ({unit.title}) is one too many: the worker keeps "
                f"{MAX_ARTIFACTS} of a job"
            )
        public = public_name(name, unit.index)
        if public in self._names:
            index, other = self._names[public]
            if index == unit.index:
                raise UnfitResult(f"unit {index} ({unit.title}) reports two artifacts named {name!r}")
            raise UnfitResult(
                f"artifact {name!r} of unit {unit.index} ({unit.title}) would be called {public!r}, "
                f"as {other!r} of unit {index} is"
            )
        self._names[public] = unit.index, name
        return public

    def add_artifact(self, public: str, kind: str, media_type: str, size: int, sha256: str) -> None:
        """Take a stored file of the unit, with a name from `name_artifact`."""
        self.artifacts.append(StoredArtifact(self._unit.index, public, kind, media_type, size, sha256))

    def _add_validity(self, message: Validity) -> None:
        unit, checks, key = self._unit, message.checks, message.case_key
        self._verdict_bytes += sum(8 + len(check.name) + len(check.detail) for check in checks)
        self._verdict_bytes += len(message.title) + len(key or "")
        if self._verdict_bytes > MAX_VERDICT_BYTES:
            raise TooLarge(
                f"this job's verdicts have {self._verdict_bytes} bytes; {MAX_VERDICT_BYTES} are kept: "
                "report fewer or shorter checks"
            )
        if key in unit.judged:
            return
        verdict = CaseVerdict(
            unit_title=unit.title, case_key=key, title=message.title, verdict=message.verdict, checks=checks
        )
        earlier = unit.verdicts.get(key)
        unit.verdicts[key] = verdict if earlier is None else earlier.joined(verdict)

    @property
    def measurements(self) -> list[MeasurementRecord]:
        """Return the measurements, each with the verdict on its case in its unit: the case's own, else the unit's."""
        disagreements = self._disagreements()
        verdicts = {unit.index: _joined(unit, disagreements) for unit in self._units}
        return [
            replace(record, validity=_verdict_on(verdicts[record.unit_index], record)) for record in self._measurements
        ]

    @property
    def tables(self) -> list[TableRecord]:
        """Return the tables that units reported, and a table of all checks for each unit with several cases."""
        # Each unit's checks get a share, so that tables of that name together stay within the job's bounds.
        rows = min(MAX_CHECK_ROWS, MAX_TABLES_ROWS // max(1, len(self._units)))
        verdicts = self._verdicts()
        tables = [(unit, checks_table(verdicts[unit.index], max_rows=rows)) for unit in self._units]
        checks = [_stored(table, table.to_json(), unit.index) for unit, table in tables if table is not None]
        return [*self._tables, *checks]

    def rows(self) -> dict[str, list[dict[str, Any]]]:
        """Return the rows of the tables that units reported, by the table's name, each with its unit's index."""
        found: dict[str, list[dict[str, Any]]] = {}
        for table in self._tables:
            names = [column["name"] for column in table.columns]
            of_unit = json.loads(zlib.decompress(table.rows))
            found.setdefault(table.name, []).extend(
                {**dict(zip(names, row, strict=True)), UNIT_COLUMN: table.unit_index} for row in of_unit
            )
        return found

    @property
    def units(self) -> list[UnitRecord]:
        verdicts = self._verdicts()
        return [
            UnitRecord(
                unit_index=unit.index,
                title=unit.title,
                outcome=unit.outcome,
                side=unit.side,
                reason=unit.reason,
                environment=unit.environment,
                validity=summed_up(verdicts[unit.index]),
            )
            for unit in self._units
        ]

    @property
    def environment(self) -> dict[str, Any] | None:
        """Return the first unit's environment, which represents the job: all its units run on the same devices."""
        return self._units[0].environment if self._units else None

    @property
    def validity(self) -> dict[str, Any] | None:
        """Return the sum of all units' verdicts (see `summed_up`)."""
        return summed_up([verdict for of_unit in self._verdicts().values() for verdict in of_unit])

    def _verdicts(self) -> dict[int, list[CaseVerdict]]:
        """Return the verdicts of each unit, by its index, each with the number of cases that it covers. The verdict on
        the other cases covers the measured cases that have no verdict of their own."""
        disagreements, found = self._disagreements(), {}
        for unit in self._units:
            verdicts = _joined(unit, disagreements)
            others, alone = len(unit.outcomes.keys() - verdicts.keys()), len(verdicts) == 1
            found[unit.index] = [
                verdict if key is not None else replace(verdict, cases=max(others, 1) if alone else others)
                for key, verdict in verdicts.items()
            ]
        return found

    def _disagreements(self) -> dict[tuple[int, str], Check]:
        device = (self.environment or {}).get("device")
        return self.replicates.checks(str(device.get("type")) if isinstance(device, dict) else "")

    def forget_results(self) -> None:
        """Forget everything except the log."""
        self._tables, self.artifacts, self._measurements, self._units = [], [], [], []
        self.replicates = Replicates()


def public_name(name: str, unit_index: int) -> str:
    """Return an artifact's name in its job: unit 0 has `trace.json.gz`, unit 1 `trace-unit-1.json.gz`."""
    stem, dot, suffixes = name.partition(".")
    return name if unit_index == 0 else f"{stem}-unit-{unit_index}{dot}{suffixes}"


def _weight(outcome: str) -> int:
    """Return which outcome of its metrics is a case's: a failure, or else an answer, or else any."""
    return 3 if outcome in FAILURES else 2 if outcome in ANSWERS else 1 if outcome else 0


def _stored(table: Table, rows: bytes, unit_index: int) -> TableRecord:
    columns = [asdict(column) for column in table.columns]
    return TableRecord(unit_index, table.name, columns, len(table.rows), zlib.compress(rows))


def _joined(unit: _UnitResults, disagreements: Mapping[tuple[int, str], Check]) -> dict[str | None, CaseVerdict]:
    """Return a unit's verdicts by case key, with the checks that compare it with later units."""
    verdicts = dict(unit.verdicts)
    for (index, case_key), check in disagreements.items():
        if index != unit.index:
            continue
        key = None if case_key not in verdicts and None in verdicts and len(unit.outcomes) == 1 else case_key
        earlier = verdicts.get(key) or verdicts.get(None)
        of_check = CaseVerdict(unit.title, key, "", "suspect", [check])
        verdicts[key] = of_check if earlier is None else replace(earlier.joined(of_check), case_key=key)
    return verdicts


def _verdict_on(verdicts: Mapping[str | None, CaseVerdict], record: MeasurementRecord) -> str | None:
    verdict = verdicts.get(record.case_key) or verdicts.get(None)
    return None if verdict is None else verdict.verdict


def _listed(columns: Sequence[Column]) -> str:
    return ", ".join(f"{column.name} ({column.type}, {column.unit})" for column in columns)
