"""Shares devices among users: whose job is next among those of equal priority, and how much each has used.

Next is the user who had the least device time lately: a decayed sum of the device seconds of attempts that ended, in
which those of one half-life ago count half (Slurm's fair share without its tree of accounts), plus those of attempts
that run. How a user cuts work into jobs does not matter, and who deletes jobs gains nothing.

Users are told apart by the names of their tokens. Without tokens anybody could send any name, so all are one user. An
attempt that a worker gives back is not charged: it was stopped for the worker's sake. Of users with the same device
time that one is next whose jobs hold fewer devices; those that wait in a cluster's queue hold some and use no time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, bindparam, insert, literal_column, select, true, update

from app.specs._base import NODES
from app.store import service_settings, tables
from app.store.database.engine import Database
from app.store.tables import utc_now

_SETTING = "sharing"
CPU = "CPU"
NOBODY = ""
"""Stands for jobs of nobody that is known, where a name is stored."""

_job, _attempt, _worker = tables.job.c, tables.attempt.c, tables.worker.c
_use, _share = tables.device_use.c, tables.fair_share.c

# One statement reads it all, since each takes a tenth of a millisecond or more of a claim on PostgreSQL.
_SHARES = select(
    select(tables.api_token.c.id).limit(1).scalar_subquery().label("token"),
    select(tables.setting.c.value).where(tables.setting.c.name == _SETTING).scalar_subquery().label("policy"),
    _share.submitted_by,
    _share.device_s,
    _share.summed_at,
).select_from(select(literal_column("1")).subquery().outerjoin(tables.fair_share, true()))
_OF_JOB = (_job[name] for name in ("submitted_by", "kind", "device_type", "devices", "requirements", "started_at"))
_ATTEMPTS = (
    select(*_OF_JOB, _worker.devices.label("worker_devices"), _worker.last_seen_at)
    .join_from(tables.attempt, tables.job, _attempt.job_id == _job.id)
    .outerjoin(tables.worker, _attempt.worker_id == _worker.id)
)
# The jobs that are claimed, with those that wait in a cluster's queue.
_RUNNING = _ATTEMPTS.where(_attempt.state == literal_column("'running'"))
_ENDED = _ATTEMPTS.where(_attempt.id == bindparam("attempt_id"))
_OF_ROW = tuple(_use[name] == bindparam(f"of_{name}") for name in ("hour", "submitted_by", "kind", "device"))
_ADD_USE = (
    update(tables.device_use)
    .where(*_OF_ROW)
    .values(
        attempts=_use.attempts + 1,
        ran_s=_use.ran_s + bindparam("more_s"),
        device_s=_use.device_s + bindparam("more_device_s"),
    )
)
_SHARE = select(tables.fair_share).where(_share.submitted_by == bindparam("of"))
_CHANGE_SHARE = update(tables.fair_share).where(_share.submitted_by == bindparam("of"))


@dataclass(frozen=True)
class Policy:
    """How devices are shared; the server stores its own when it starts, and workers read it."""

    half_life_s: float = 3600.0
    most_devices: int | None = None
    """Most devices that the running jobs of one user hold; None: no limit."""


@dataclass(frozen=True)
class Shares:
    """What each user has used lately, and uses now."""

    used_s: Mapping[str, float]
    """Device seconds."""
    devices: Mapping[str, int]
    """Devices that running jobs hold."""
    most_devices: int | None
    are_several: bool
    """False if nobody vouches for the users' names: then all are one."""

    def rank(self, user: str | None) -> tuple[float, int]:
        """Return what orders the users: the least is next."""
        return self.of(user), self.devices.get(user or NOBODY, 0)

    def of(self, user: str | None) -> float:
        """Return the device seconds that count against this user."""
        return self.used_s.get(user or NOBODY, 0.0)

    def is_full(self, user: str | None, job: Mapping[Any, Any]) -> bool:
        """Return True if the user may not hold this job's devices now, beside those of the running jobs."""
        if self.most_devices is None or job["device_type"] == "none":
            return False
        return self.devices.get(user or NOBODY, 0) + number_of_devices(job) > self.most_devices


def agree(database: Database, policy: Policy) -> None:
    """Make this the way in which all processes of the database share devices."""
    service_settings.keep(database, _SETTING, asdict(policy))


def policy_of(connection: Connection) -> Policy:
    return _policy(service_settings.get(connection, _SETTING))


def _policy(stored: Any) -> Policy:
    return Policy(stored["half_life_s"], stored["most_devices"]) if isinstance(stored, dict) else Policy()


def hour_of(moment: datetime) -> datetime:
    """Return the hour to which what was used at a moment counts."""
    return moment.replace(minute=0, second=0, microsecond=0)


def shares(connection: Connection) -> Shares | None:
    """Return the users' shares; None if all are one user."""
    rows = connection.execute(_SHARES).all()
    return None if rows[0].token is None else _shares(connection, rows)


def named_shares(connection: Connection) -> Shares:
    """Return the shares of users by name, also if nobody vouches for the names."""
    return _shares(connection, connection.execute(_SHARES).all())


def _shares(connection: Connection, rows: Sequence[Any]) -> Shares:
    now = utc_now()
    policy = _policy(rows[0].policy)
    used = {
        row.submitted_by: row.device_s * _decay(row.summed_at, now, policy)
        for row in rows
        if row.submitted_by is not None
    }
    devices: dict[str, int] = {}
    for row in connection.execute(_RUNNING):
        user = row.submitted_by or NOBODY
        number = number_of_devices(row._mapping)
        used[user] = used.get(user, 0.0) + number * _seconds(row.started_at, now)
        devices[user] = devices.get(user, 0) + number
    return Shares(used, devices, policy.most_devices, rows[0].token is not None)


def charge(connection: Connection, attempt_id: int, *, is_lost: bool = False) -> None:
    """Charge an attempt, which ends now, to its job's user, unless it has only waited in a cluster's queue. A lost one
    is charged until its worker's last heartbeat."""
    row, now = connection.execute(_ENDED, {"attempt_id": attempt_id}).one(), utc_now()
    if row.started_at is None:
        return
    user = row.submitted_by or NOBODY
    ran_s = _seconds(row.started_at, min(now, row.last_seen_at or now) if is_lost else now)
    device_s = ran_s * number_of_devices(row._mapping)
    key = {
        "hour": hour_of(now),
        "submitted_by": user,
        "kind": row.kind,
        "device": _device_name(row.device_type, row.worker_devices),
    }
    of_row = {f"of_{name}": value for name, value in key.items()}
    if connection.execute(_ADD_USE, {**of_row, "more_s": ran_s, "more_device_s": device_s}).rowcount == 0:
        used = {"attempts": 1, "ran_s": ran_s, "device_s": device_s}
        connection.execute(insert(tables.device_use), {**key, **used})
    share = connection.execute(_SHARE, {"of": user}).one_or_none()
    if share is None:
        connection.execute(insert(tables.fair_share), {"submitted_by": user, "device_s": device_s, "summed_at": now})
    else:
        left_s = share.device_s * _decay(share.summed_at, now, policy_of(connection))
        connection.execute(_CHANGE_SHARE, {"of": user, "device_s": left_s + device_s, "summed_at": now})


def number_of_devices(job: Mapping[Any, Any]) -> int:
    """Return how many devices a job holds; one on the CPU counts as one, as it has its host's for itself.

    The devices of its worker, `worker_devices`, tell whether a job of type "auto" has GPUs; without them it may.
    """
    if job["device_type"] == "none":
        return 0
    if job["device_type"] == "cpu":
        return 1
    if (
        job["device_type"] == "auto"
        and job.get("worker_devices")
        and _device_name("auto", job["worker_devices"]) == CPU
    ):
        return 1
    nodes = (name.partition(f"{NODES}:")[2] for name in job["requirements"])
    return max(1, int(job["devices"])) * next((int(number) for number in nodes if number.isdecimal()), 1)


def _decay(then: datetime, now: datetime, policy: Policy) -> float:
    return float(0.5 ** (_seconds(then, now) / policy.half_life_s))


def _seconds(start: datetime | None, end: datetime) -> float:
    return 0.0 if start is None else max(0.0, (end - start).total_seconds())


def _device_name(device_type: str, worker_devices: Any) -> str:
    if device_type in ("cpu", "none"):
        return CPU if device_type == "cpu" else "none"
    found = [one for one in worker_devices or () if isinstance(one, dict) and one.get("type") in ("cuda", "slurm")]
    return str(found[0].get("name") or "GPU") if found else CPU
