"""The tables, as SQLModel classes. migrations/ builds them; only app.store reads and writes them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, ClassVar, Final

from sqlalchemy import (
    JSON,
    Column,
    DateTime,
    Dialect,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    String,
    Table,
    Text,
    TypeDecorator,
    text,
)
from sqlmodel import Field, SQLModel


def utc_now() -> datetime:
    """The wall clock, for people to read; no lease is judged by it."""
    return datetime.now(UTC)


class UtcDateTime(TypeDecorator[datetime]):
    """Aware UTC times, also on SQLite, which keeps none."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError("times in the database are aware: use utc_now()")
        utc = value.astimezone(UTC)
        return utc.replace(tzinfo=None) if dialect.name == "sqlite" else utc

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


def _json(*, nullable: bool = True) -> Any:
    return Column(JSON(none_as_null=True), nullable=nullable)


def _time(*, nullable: bool = True) -> Any:
    return Column(UtcDateTime(), nullable=nullable)


def _id() -> Any:
    # BIGINT would not be SQLite's rowid; sqlite_autoincrement below keeps ids from being reused.
    return Column(Integer, primary_key=True, autoincrement=True)


def _job_id(*, index: bool = True) -> Any:
    return Column(Integer, ForeignKey("job.id", ondelete="CASCADE"), nullable=False, index=index)


_NO_REUSE = {"sqlite_autoincrement": True}
_CLAIMABLE = text("state = 'queued'")
_RUNNING = text("state = 'running'")


class Sweep(SQLModel, table=True):
    """A grid of jobs submitted together."""

    __table_args__: ClassVar[Any] = (_NO_REUSE,)

    id: int | None = Field(default=None, sa_column=_id())
    name: str | None = None
    labels: dict[str, str] = Field(sa_column=_json(nullable=False))
    base: dict[str, Any] = Field(sa_column=_json(nullable=False))
    grid: dict[str, Any] = Field(sa_column=_json(nullable=False))
    exclude: list[Any] = Field(sa_column=_json(nullable=False))
    created_at: datetime = Field(sa_column=_time(nullable=False))


class Job(SQLModel, table=True):
    """One job. `state` and `attempt` change only in queue.py."""

    __table_args__: ClassVar[Any] = (
        Index("ix_job_state_id", "state", "id"),
        Index("ix_job_kind_id", "kind", "id"),
        _NO_REUSE,
    )

    id: int | None = Field(default=None, sa_column=_id())
    kind: str
    name: str | None = None
    labels: dict[str, str] = Field(sa_column=_json(nullable=False))
    state: str
    """queued | running | succeeded | failed | cancelled"""
    spec: dict[str, Any] = Field(sa_column=_json(nullable=False))
    priority: int
    attempt: int
    """Attempts counted so far; a job that a worker gives back on shutdown is not counted."""
    max_attempts: int
    timeout_s: float | None = None
    device_type: str
    devices: int
    exclusive_host: bool
    requirements: list[str] = Field(sa_column=_json(nullable=False))
    progress: dict[str, Any] = Field(sa_column=_json(nullable=False))
    error: dict[str, Any] | None = Field(default=None, sa_column=_json())
    worker_id: str | None = None
    sweep_id: int | None = Field(
        default=None, sa_column=Column(Integer, ForeignKey("sweep.id", ondelete="SET NULL"), nullable=True, index=True)
    )
    environment: dict[str, Any] | None = Field(default=None, sa_column=_json())
    validity: dict[str, Any] | None = Field(default=None, sa_column=_json())
    version: int
    """Grows with every change; the job's ETag."""
    created_at: datetime = Field(sa_column=_time(nullable=False))
    started_at: datetime | None = Field(default=None, sa_column=_time())
    finished_at: datetime | None = Field(default=None, sa_column=_time())
    cancel_requested_at: datetime | None = Field(default=None, sa_column=_time())


class JobLabel(SQLModel, table=True):
    """A job's labels again, one row each, so that a list filtered by label is answered from an index."""

    __tablename__ = "job_label"
    __table_args__: ClassVar[Any] = (Index("ix_job_label_key_value", "key", "value", "job_id"),)

    job_id: int = Field(
        sa_column=Column(Integer, ForeignKey("job.id", ondelete="CASCADE"), primary_key=True, autoincrement=False)
    )
    key: str = Field(sa_column=Column(String, primary_key=True))
    value: str


class Attempt(SQLModel, table=True):
    """One claim of a job by a worker: the fence (job, number, token) that every later write is conditional on."""

    __table_args__: ClassVar[Any] = (
        Index("ix_attempt_job_number", "job_id", "number"),
        Index("ix_attempt_running", "id", sqlite_where=_RUNNING, postgresql_where=_RUNNING),
        _NO_REUSE,
    )

    id: int | None = Field(default=None, sa_column=_id())
    job_id: int = Field(sa_column=_job_id(index=False))
    number: int
    token: str
    """Random; known to the claiming worker alone."""
    worker_id: str
    state: str
    """running | succeeded | failed | cancelled | lost | given_back"""
    beat: int
    """Heartbeat counter; watchers judge its silence on their own monotonic clock."""
    error: dict[str, Any] | None = Field(default=None, sa_column=_json())
    log: str | None = Field(default=None, sa_column=Column(Text, nullable=True))
    """Head and tail of the output, written at the end; while running the `log` events hold it."""
    started_at: datetime = Field(sa_column=_time(nullable=False))
    finished_at: datetime | None = Field(default=None, sa_column=_time())


class Measurement(SQLModel, table=True):
    """One metric of one case; tidy. Values are null, never 0, where `outcome` is not "ok"."""

    __table_args__: ClassVar[Any] = (_NO_REUSE,)

    id: int | None = Field(default=None, sa_column=_id())
    job_id: int = Field(sa_column=_job_id())
    attempt: int
    case: dict[str, Any] = Field(sa_column=_json(nullable=False))
    """The case's coordinates, flat."""
    phase: str | None = None
    metric: str
    unit: str
    outcome: str
    """ok | oom | unsupported | skipped | …"""
    reason: str | None = None
    """Why a value is null."""
    partial: bool
    """Committed although the job failed or was cancelled."""
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
    samples: bytes | None = Field(default=None, sa_column=Column(LargeBinary, nullable=True))
    """Raw samples: little-endian float64, zlib."""


class Artifact(SQLModel, table=True):
    """A file of a job; the bytes lie content-addressed on disk."""

    __table_args__: ClassVar[Any] = (Index("ix_artifact_job_name", "job_id", "name", unique=True), _NO_REUSE)

    id: int | None = Field(default=None, sa_column=_id())
    job_id: int = Field(sa_column=_job_id(index=False))
    attempt: int
    name: str
    kind: str
    media_type: str
    size: int
    """Bytes."""
    sha256: str = Field(index=True)
    created_at: datetime = Field(sa_column=_time(nullable=False))


class Event(SQLModel, table=True):
    """What happened to a job, in order: state, progress, log, done."""

    __table_args__: ClassVar[Any] = (Index("ix_event_job_id", "job_id", "id"), _NO_REUSE)

    id: int | None = Field(default=None, sa_column=_id())
    job_id: int = Field(sa_column=_job_id(index=False))
    attempt: int
    type: str
    data: dict[str, Any] = Field(sa_column=_json(nullable=False))
    created_at: datetime = Field(sa_column=_time(nullable=False))


class Worker(SQLModel, table=True):
    """A worker agent and what it can run."""

    id: str = Field(primary_key=True)
    hostname: str
    pid: int
    state: str
    """active | draining | stopped | lost"""
    kinds: list[str] = Field(sa_column=_json(nullable=False))
    capabilities: list[str] = Field(sa_column=_json(nullable=False))
    """Names it has, as "family:name"."""
    devices: list[Any] = Field(sa_column=_json(nullable=False))
    versions: dict[str, Any] = Field(sa_column=_json(nullable=False))
    beat: int
    registered_at: datetime = Field(sa_column=_time(nullable=False))
    last_seen_at: datetime = Field(sa_column=_time(nullable=False))


class IdempotencyKey(SQLModel, table=True):
    """The first answer to a request with an Idempotency-Key."""

    __tablename__ = "idempotency_key"

    key: str = Field(primary_key=True)
    route: str = Field(primary_key=True)
    digest: str
    """SHA-256 of the request's canonical body."""
    resource_id: int
    """The job or sweep that was made."""
    response: dict[str, Any] = Field(sa_column=_json(nullable=False))
    created_at: datetime = Field(sa_column=_time(nullable=False))


_tables = SQLModel.metadata.tables

sweep: Final[Table] = _tables["sweep"]
job: Final[Table] = _tables["job"]
job_label: Final[Table] = _tables["job_label"]
attempt: Final[Table] = _tables["attempt"]
measurement: Final[Table] = _tables["measurement"]
artifact: Final[Table] = _tables["artifact"]
event: Final[Table] = _tables["event"]
worker: Final[Table] = _tables["worker"]
idempotency_key: Final[Table] = _tables["idempotency_key"]

# Here, because a class has no columns yet where its other indexes are.
Index("ix_job_claimable", job.c.priority.desc(), job.c.id, sqlite_where=_CLAIMABLE, postgresql_where=_CLAIMABLE)
