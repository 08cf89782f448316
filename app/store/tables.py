"""The tables, as SQLModel classes. migrations/ builds them; only app.store reads and writes them."""

from datetime import datetime
from typing import Any, ClassVar, Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    String,
    Table,
    Text,
    false,
    text,
)
from sqlmodel import Field, SQLModel

from app.store.column_types import StoredJson, UtcDateTime
from flopwatch.text.times import current_time


def utc_now() -> datetime:
    """Return the time by the database's clock, for people to read. No lease depends on it."""
    return current_time()


def _json(shape: type = dict, *, nullable: bool = True) -> Any:
    return Column(StoredJson(shape), nullable=nullable)


def _time(*, nullable: bool = True) -> Any:
    return Column(UtcDateTime(), nullable=nullable)


_ID = BigInteger().with_variant(Integer(), "sqlite")
"""An id with 64 bits on every database. On SQLite it is INTEGER, since only INTEGER can be the rowid."""


def _id() -> Any:
    # sqlite_autoincrement below keeps ids from being reused.
    return Column(_ID, primary_key=True, autoincrement=True)


def _refers(to: str = "job.id", ondelete: str = "CASCADE", **options: Any) -> Any:
    return Column(_ID, ForeignKey(to, ondelete=ondelete), **{"nullable": False, **options})


def _flag() -> Any:
    return Column(Boolean, nullable=False, default=False, server_default=false())


def _index(name: str, *columns: Any, where: Any, **options: Any) -> Index:
    """Make an index of the rows that meet a condition."""
    return Index(name, *columns, sqlite_where=where, postgresql_where=where, **options)


_NO_REUSE = {"sqlite_autoincrement": True}
_CLAIMABLE = text("state = 'queued'")
_DEVICELESS = text("state = 'queued' AND device_type = 'none'")
_RUNNING = text("state = 'running'")
HOLDS_ITS_KEY = text("state IN ('queued', 'running') AND unique_key IS NOT NULL")
"""The condition for jobs of which no two share a unique key. Queries must use the same words, or SQLite does not use
the index."""
_STAGED = text("staged")
IS_BEING_DELETED = text("deleting")
"""The condition for jobs whose deletion has begun. Queries must use the same word, or SQLite does not use the index."""
_IN_SWEEP = text("sweep_id IS NOT NULL")
IS_OPEN = text("state IN ('waiting', 'pending')")
"""The condition for webhooks that are not done; queries must use the same words."""


class Sweep(SQLModel, table=True):
    """A grid of jobs submitted together."""

    __table_args__: ClassVar[Any] = (_NO_REUSE,)

    id: int | None = Field(default=None, sa_column=_id())
    name: str | None = None
    labels: dict[str, str] = Field(sa_column=_json(nullable=False))
    base: dict[str, Any] = Field(sa_column=_json(nullable=False))
    grid: dict[str, Any] = Field(sa_column=_json(nullable=False))
    exclude: list[Any] = Field(sa_column=_json(list, nullable=False))
    options: dict[str, Any] = Field(sa_column=_json(nullable=False))
    """The options that all its jobs share: priority, timeout_s, max_attempts, submitted_by. Resuming the sweep needs
    them."""
    fit: dict[str, Any] | None = Field(default=None, sa_column=_json())
    """The search for the largest value that fits: axis, upto, step, start (see fitting.py); None for a plain grid."""
    created_at: datetime = Field(sa_column=_time(nullable=False))


class Job(SQLModel, table=True):
    """One job. `state` and `attempt` change only in queue/transitions.py."""

    __table_args__: ClassVar[Any] = (
        Index("ix_job_state_id", "state", "id"),
        Index("ix_job_kind_id", "kind", "id"),
        Index("ix_job_submitted_by_id", "submitted_by", "id"),
        _index("ix_job_unique_key", "unique_key", where=HOLDS_ITS_KEY, unique=True),
        _index("ix_job_deleting", "id", where=IS_BEING_DELETED),
        Index("ix_job_finished_at", "finished_at"),
        Index("ix_job_created_at", "created_at"),
        _index("ix_job_sweep_point", "sweep_id", "point", where=_IN_SWEEP),
        _NO_REUSE,
    )

    id: int | None = Field(default=None, sa_column=_id())
    kind: str
    name: str | None = None
    labels: dict[str, str] = Field(sa_column=_json(nullable=False))
    note: str | None = None
    """A text for people, written after the submission."""
    submitted_by: str | None = None
    """The user who submitted it, as the client said; null if it said nothing."""
    state: str
    """queued | running | succeeded | failed | cancelled"""
    spec: dict[str, Any] = Field(sa_column=_json(nullable=False))
    summary: dict[str, Any] = Field(sa_column=_json(nullable=False))
    """The part of the spec that lists show, as SpecBase.summary gave it at submission."""
    priority: int
    attempt: int
    """Attempts counted so far. An attempt that a worker gives back on shutdown does not count."""
    max_attempts: int
    timeout_s: float | None = None
    device_type: str
    devices: int
    exclusive_host: bool
    requirements: list[str] = Field(sa_column=_json(list, nullable=False))
    progress: dict[str, Any] = Field(sa_column=_json(nullable=False))
    error: dict[str, Any] | None = Field(default=None, sa_column=_json())
    worker_id: str | None = None
    waiting_reason: str | None = None
    """What a queued job waits for that a worker has claimed and not begun: a cluster's queue. No other worker claims
    it."""
    sweep_id: int | None = Field(default=None, sa_column=_refers("sweep.id", "SET NULL", nullable=True, index=True))
    point: dict[str, int] | None = Field(default=None, sa_column=_json())
    """In a job of a sweep: the index of its value on each path of the grid; on the axis of a search, the value."""
    environment: dict[str, Any] | None = Field(default=None, sa_column=_json())
    """Environment of the job's first unit. The table `unit` has the environment of each unit."""
    validity: dict[str, Any] | None = Field(default=None, sa_column=_json())
    """Validity of all units together: the worst verdict, and the number of cases with each verdict."""
    metrics: dict[str, float] | None = Field(default=None, sa_column=_json())
    """Of a job with one case: the value of each metric that the last attempt with results measured, as tables show it.
    Lists of jobs are sorted by it. Null for a job with several cases."""
    unique_key: str | None = None
    """Of the jobs with this key, at most one is queued or running."""
    deleting: bool = Field(default=False, sa_column=_flag())
    """True once its deletion has begun, which retention completes if nobody else does (see deleting.py)."""
    version: int
    """Grows with every change; the job's ETag."""
    created_at: datetime = Field(sa_column=_time(nullable=False))
    started_at: datetime | None = Field(default=None, sa_column=_time())
    finished_at: datetime | None = Field(default=None, sa_column=_time())
    cancel_requested_at: datetime | None = Field(default=None, sa_column=_time())


class JobLabel(SQLModel, table=True):
    """A second copy of a job's labels, one row each, so that an index answers lists filtered by label."""

    __tablename__ = "job_label"
    __table_args__: ClassVar[Any] = (Index("ix_job_label_key_value", "key", "value", "job_id"),)

    job_id: int = Field(sa_column=_refers(primary_key=True, autoincrement=False))
    key: str = Field(sa_column=Column(String, primary_key=True))
    value: str


class CodeFile(SQLModel, table=True):
    """A Python file that a user has uploaded; the bytes lie content-addressed on disk, as those of artifacts do."""

    __tablename__ = "code_file"

    sha256: str = Field(primary_key=True)
    size: int
    """Bytes."""
    put_at: datetime = Field(sa_column=_time(nullable=False))
    """The last time that somebody has uploaded it."""


class JobCode(SQLModel, table=True):
    """An uploaded file that a job's spec names. The file stays as long as there is such a job."""

    __tablename__ = "job_code"

    job_id: int = Field(sa_column=_refers(primary_key=True, autoincrement=False))
    sha256: str = Field(sa_column=Column(String, ForeignKey("code_file.sha256"), primary_key=True, index=True))


class Attempt(SQLModel, table=True):
    """One claim of a job by a worker. Every later write must match its fence (job, number, token)."""

    __table_args__: ClassVar[Any] = (
        Index("ix_attempt_job_number", "job_id", "number"),
        _index("ix_attempt_running", "id", where=_RUNNING),
        _index("ix_attempt_staged", "id", where=_STAGED),
        _NO_REUSE,
    )

    id: int | None = Field(default=None, sa_column=_id())
    job_id: int = Field(sa_column=_refers())
    number: int
    token: str
    """A random text that only the claiming worker knows."""
    worker_id: str
    state: str
    """running | succeeded | failed | cancelled | lost | given_back"""
    beat: int
    """Heartbeat counter; watchers judge its silence on their own monotonic clock."""
    error: dict[str, Any] | None = Field(default=None, sa_column=_json())
    log: str | None = Field(default=None, sa_column=Column(Text, nullable=True))
    """Head and tail of the output, written at the end. While the attempt runs, the `log` events have the output."""
    staged: bool = Field(default=False, sa_column=_flag())
    """True while there are results that count only once the attempt has ended with them (see staging.py)."""
    started_at: datetime = Field(sa_column=_time(nullable=False))
    finished_at: datetime | None = Field(default=None, sa_column=_time())


class Measurement(SQLModel, table=True):
    """One metric of one case. Values are null, never 0, if `outcome` is not "ok"."""

    __table_args__: ClassVar[Any] = (Index("ix_measurement_case", "case_key", "metric", "phase"), _NO_REUSE)

    id: int | None = Field(default=None, sa_column=_id())
    job_id: int = Field(sa_column=_refers(index=True))
    attempt: int
    unit_index: int
    case: dict[str, Any] = Field(sa_column=_json(nullable=False))
    """The case's coordinates, flat: its identity and labels for people."""
    case_key: str
    """The case's key. Equal work has equal keys; see app/specs/_identity.py."""
    device_key: str
    """The devices that it ran on: "1x NVIDIA H200"."""
    validity: str | None = None
    """Verdict on this case in this unit: valid | suspect | invalid | wrong"""
    phase: str | None = None
    metric: str
    unit: str
    outcome: str
    """ok | oom | unsupported | skipped | …"""
    reason: str | None = None
    """Why a value is null."""
    partial: bool
    """True if it was committed although the job failed or was cancelled."""
    n: int | None = None
    mean: float | None = None
    std: float | None = None
    median: float | None = None
    min: float | None = None
    max: float | None = None
    p05: float | None = None
    p25: float | None = None
    p75: float | None = None
    p95: float | None = None
    median_low: float | None = None
    """The interval of the median; null for fewer than six samples."""
    median_high: float | None = None
    samples: bytes | None = Field(default=None, sa_column=Column(LargeBinary, nullable=True))
    """Raw samples: little-endian float64, zlib."""


class Unit(SQLModel, table=True):
    """One unit of an attempt: the work that one fresh process measured, and its environment."""

    __table_args__: ClassVar[Any] = (
        Index("ix_unit_job_attempt_index", "job_id", "attempt", "unit_index", unique=True),
        _NO_REUSE,
    )

    id: int | None = Field(default=None, sa_column=_id())
    job_id: int = Field(sa_column=_refers())
    attempt: int
    unit_index: int
    """Position in the runner's plan, from 0."""
    title: str
    side: str | None = None
    """The side of a comparison, baseline | candidate; null in other jobs."""
    outcome: str
    """The code of how it ended: "succeeded", or the code of a failure."""
    reason: str | None = None
    partial: bool
    environment: dict[str, Any] | None = Field(default=None, sa_column=_json())
    validity: dict[str, Any] | None = Field(default=None, sa_column=_json())


class ResultTable(SQLModel, table=True):
    """A table that a unit reported, whole: its rows are read together, sorted and paged in memory."""

    __tablename__ = "result_table"
    __table_args__: ClassVar[Any] = (
        Index("ix_result_table_job_name", "job_id", "attempt", "name", "unit_index", unique=True),
        _NO_REUSE,
    )

    id: int | None = Field(default=None, sa_column=_id())
    job_id: int = Field(sa_column=_refers())
    attempt: int
    unit_index: int
    name: str
    columns: list[Any] = Field(sa_column=_json(list, nullable=False))
    """[{"name", "type", "unit"}]"""
    row_count: int
    partial: bool
    rows: bytes = Field(sa_column=Column(LargeBinary, nullable=False))
    """A JSON array of arrays, zlib."""


class Artifact(SQLModel, table=True):
    """A file of a job; the bytes lie content-addressed on disk."""

    __table_args__: ClassVar[Any] = (Index("ix_artifact_job_name", "job_id", "attempt", "name", unique=True), _NO_REUSE)

    id: int | None = Field(default=None, sa_column=_id())
    job_id: int = Field(sa_column=_refers())
    attempt: int
    unit_index: int
    name: str
    """The unit's own name for it. From the second unit on it includes the unit's number: `trace-unit-1.json.gz`."""
    kind: str
    media_type: str
    size: int
    """Bytes."""
    sha256: str = Field(index=True)
    created_at: datetime = Field(sa_column=_time(nullable=False))


class StoredObject(SQLModel, table=True):
    """An object on the object store, or one that is about to be there; decision 16 has its life."""

    __tablename__ = "stored_object"

    name: str = Field(primary_key=True)
    """The object's name below the database's id: a random token, which is never used again."""
    attempt_id: int | None = Field(default=None, sa_column=Column(_ID, nullable=True))
    """The attempt that holds it as long as it runs; null for uploaded code."""
    sha256: str | None = Field(default=None, index=True)
    """Null until the upload has ended."""
    size: int | None = Field(default=None, sa_column=Column(BigInteger, nullable=True))
    """Bytes; null until the upload has ended."""
    removing: bool = Field(default=False, sa_column=_flag())
    """True once nothing refers to it and its removal has begun."""
    created_at: datetime = Field(sa_column=_time(nullable=False))


class Event(SQLModel, table=True):
    """One thing that happened to a job: state, progress, log or done. Events are ordered by their ids."""

    __table_args__: ClassVar[Any] = (Index("ix_event_job_id", "job_id", "id"), _NO_REUSE)

    id: int | None = Field(default=None, sa_column=_id())
    job_id: int = Field(sa_column=_refers())
    attempt: int
    type: str
    data: dict[str, Any] = Field(sa_column=_json(nullable=False))
    created_at: datetime = Field(sa_column=_time(nullable=False))


class Worker(SQLModel, table=True):
    """A worker agent and its capabilities."""

    __table_args__: ClassVar[Any] = (
        Index("ix_worker_state", "state", "registered_at", "id"),
        Index("ix_worker_registered_at", "registered_at", "id"),
    )

    id: str = Field(primary_key=True)
    hostname: str
    pid: int
    state: str
    """active | unfit | draining | stopped | lost"""
    schema_number: int | None = None
    """Number of the specs' schema that it reads (app.specs.SCHEMA); null of a release before 0.2.0."""
    unfit: dict[str, Any] | None = Field(default=None, sa_column=_json())
    """Of an unfit worker: {"code", "reason", "since", "next_try_at"}, see workers/agent/fitness.py."""
    kinds: list[str] = Field(sa_column=_json(list, nullable=False))
    capabilities: list[str] = Field(sa_column=_json(list, nullable=False))
    """Names that the worker has, as "family:name"."""
    devices: list[Any] = Field(sa_column=_json(list, nullable=False))
    versions: dict[str, Any] = Field(sa_column=_json(nullable=False))
    readings: dict[str, Any] | None = Field(default=None, sa_column=_json())
    """The devices' readings at the last heartbeat that reported any: {"read_at", "devices": [{"type", …}],
    "held_by_others": [the UUIDs of GPUs, and "host" if no job can run alone]}."""
    beat: int
    registered_at: datetime = Field(sa_column=_time(nullable=False))
    last_seen_at: datetime = Field(sa_column=_time(nullable=False))


class Setting(SQLModel, table=True):
    """A setting of the whole service, by name: all processes that share the database have the same value."""

    name: str = Field(primary_key=True)
    value: Any = Field(sa_column=_json(object, nullable=False))


class KnownHost(SQLModel, table=True):
    """The kinds, names and devices of a worker's host at registration. The table `worker` has a row for each start of a
    worker, but few of these hosts differ, so requests are checked against this table."""

    __tablename__ = "known_host"

    key: str = Field(primary_key=True)
    """SHA-256 of the three columns that follow."""
    kinds: list[str] = Field(sa_column=_json(list, nullable=False))
    capabilities: list[str] = Field(sa_column=_json(list, nullable=False))
    gpus: int
    """The number of GPUs that one job can use."""
    last_seen_at: datetime = Field(sa_column=_time(nullable=False))
    """The last time that a worker registered with it."""


class IdempotencyKey(SQLModel, table=True):
    """The first answer to a request with an Idempotency-Key. It outlives what the request made."""

    __tablename__ = "idempotency_key"
    __table_args__: ClassVar[Any] = (Index("ix_idempotency_key_created_at", "created_at"),)

    key: str = Field(primary_key=True)
    route: str = Field(primary_key=True)
    digest: str
    """SHA-256 of the request's canonical body."""
    resource_id: int = Field(sa_column=Column(_ID, nullable=False))
    """The id of the job or sweep that the request made."""
    response: dict[str, Any] = Field(sa_column=_json(nullable=False))
    awaited: bool = Field(default=False, sa_column_kwargs={"server_default": false()})
    """The request waits for the job's end, and has not been answered yet; `response` is the queued job until then."""
    created_at: datetime = Field(sa_column=_time(nullable=False))


class Baseline(SQLModel, table=True):
    """A named set of results that later ones are compared with."""

    name: str = Field(primary_key=True)
    created_at: datetime = Field(sa_column=_time(nullable=False))
    updated_at: datetime = Field(sa_column=_time(nullable=False))
    """The last time that a job or a sweep was put into it."""
    set_by: str | None = None
    """The user who put it there, as the client said."""


class BaselineCase(SQLModel, table=True):
    """One case of a baseline, on one device, as one job measured it. Several jobs that did are independent samples."""

    __tablename__ = "baseline_case"
    __table_args__: ClassVar[Any] = (Index("ix_baseline_case_job_id", "job_id"),)

    baseline: str = Field(sa_column=Column(String, ForeignKey("baseline.name", ondelete="CASCADE"), primary_key=True))
    case_key: str = Field(sa_column=Column(String, primary_key=True))
    device_key: str = Field(sa_column=Column(String, primary_key=True))
    job_id: int = Field(sa_column=_refers(ondelete="RESTRICT", primary_key=True, autoincrement=False))
    """The job cannot be deleted while it is here (see deleting.py)."""
    title: str
    """The case in words, for people."""


class ApiToken(SQLModel, table=True):
    """An access token of a person or a program."""

    __tablename__ = "api_token"

    id: str = Field(primary_key=True)
    """The part of the token that is no secret."""
    name: str
    """Whose it is; several tokens may have one name. Jobs that it submits have it as `submitted_by`."""
    scope: str
    """read | submit | code | admin"""
    digest: str
    """SHA-256 of the whole token."""
    created_at: datetime = Field(sa_column=_time(nullable=False))
    expires_at: datetime | None = Field(default=None, sa_column=_time())
    last_used_at: datetime | None = Field(default=None, sa_column=_time())


class Tally(SQLModel, table=True):
    """A number that only grows, for /metrics: it counts jobs that were deleted since, too."""

    name: str = Field(primary_key=True)
    """claims | outcomes | lease_losses; and of the histograms `waiting` and `duration` each bucket and the sum:
    waiting_le_60, waiting_ms"""
    kind: str = Field(primary_key=True)
    outcome: str = Field(primary_key=True)
    """Of outcomes and durations: succeeded, or the error's code; else empty."""
    number: int = Field(sa_column=Column(BigInteger, nullable=False))


class DeviceUse(SQLModel, table=True):
    """The device time of attempts that ended within one hour, for reports: deleting jobs takes nothing from it."""

    __tablename__ = "device_use"

    hour: datetime = Field(sa_column=Column(UtcDateTime(), primary_key=True))
    """The beginning of the hour."""
    submitted_by: str = Field(primary_key=True)
    """Empty for jobs of nobody that is known."""
    kind: str = Field(primary_key=True)
    device: str = Field(primary_key=True)
    """The devices' name, or CPU."""
    attempts: int
    ran_s: float
    """Seconds that the attempts took."""
    device_s: float
    """The same, times the number of devices."""


class FairShare(SQLModel, table=True):
    """How much device time a user had lately (see queue/sharing.py)."""

    __tablename__ = "fair_share"

    submitted_by: str = Field(primary_key=True)
    device_s: float
    """The decayed sum of device seconds, as it was at `summed_at`."""
    summed_at: datetime = Field(sa_column=_time(nullable=False))


class Webhook(SQLModel, table=True):
    """The address that is told the end of a job, or of all jobs of a sweep, and how far that is."""

    __table_args__: ClassVar[Any] = (
        Index("ix_webhook_job_id", "job_id", unique=True),
        Index("ix_webhook_sweep_id", "sweep_id", unique=True),
        _index("ix_webhook_open", "id", where=IS_OPEN),
        _NO_REUSE,
    )

    id: int | None = Field(default=None, sa_column=_id())
    job_id: int | None = Field(default=None, sa_column=_refers(nullable=True))
    sweep_id: int | None = Field(default=None, sa_column=_refers("sweep.id", nullable=True))
    url: str
    state: str
    """waiting (for the end) | pending (to be delivered) | delivered | failed"""
    message_id: str
    """The same for every delivery of one end, so that a receiver recognises one that comes twice."""
    tries: int
    due_at: datetime | None = Field(default=None, sa_column=_time())
    """When the next try may begin. A server that begins one moves it on first, so that no other begins it, too."""


_tables = SQLModel.metadata.tables

sweep: Final[Table] = _tables["sweep"]
job: Final[Table] = _tables["job"]
job_label: Final[Table] = _tables["job_label"]
code_file: Final[Table] = _tables["code_file"]
job_code: Final[Table] = _tables["job_code"]
attempt: Final[Table] = _tables["attempt"]
measurement: Final[Table] = _tables["measurement"]
unit: Final[Table] = _tables["unit"]
result_table: Final[Table] = _tables["result_table"]
artifact: Final[Table] = _tables["artifact"]
stored_object: Final[Table] = _tables["stored_object"]
event: Final[Table] = _tables["event"]
worker: Final[Table] = _tables["worker"]
setting: Final[Table] = _tables["setting"]
known_host: Final[Table] = _tables["known_host"]
idempotency_key: Final[Table] = _tables["idempotency_key"]
baseline: Final[Table] = _tables["baseline"]
baseline_case: Final[Table] = _tables["baseline_case"]
api_token: Final[Table] = _tables["api_token"]
tally: Final[Table] = _tables["tally"]
device_use: Final[Table] = _tables["device_use"]
fair_share: Final[Table] = _tables["fair_share"]
webhook: Final[Table] = _tables["webhook"]

# Indexes for claims.py. They are declared here because the columns do not exist yet where a class declares its other
# indexes. They hold claimable jobs only: without an index, 100 000 queued jobs allow 41 claims a second, and each claim
# would step over jobs that cannot start. The columns after the order let it pass over jobs without reading their rows.
_ORDER = (job.c.priority.desc(), job.c.id, job.c.kind)
_NEEDS = (job.c.device_type, job.c.devices)
_index("ix_job_claimable", *_ORDER, *_NEEDS, where=_CLAIMABLE)
_index("ix_job_deviceless", *_ORDER, where=_DEVICELESS)
_index("ix_job_claimable_by_user", job.c.submitted_by, *_ORDER, *_NEEDS, where=_CLAIMABLE)
