"""The tree of all errors that the service raises; each has a problem type and an HTTP status (RFC 9457).

    FlopwatchError
    ├── InvalidRequest             422  a field is wrong; `errors` point at it
    │   └── IdempotencyMismatch    422  the same Idempotency-Key came with another body
    ├── Unauthorized               401
    ├── InsufficientScope          403  the token's scope does not allow it; `extensions` name the one that would
    ├── CrossSiteRequest           403  another site's page made a browser send it
    ├── NotFound                   404
    ├── Conflict                   409  the job's state does not allow it
    │   ├── KeyTaken               409  another job with its unique_key is queued or running
    │   ├── InBaseline             409  a baseline needs the job
    │   └── LeaseLost              409  this worker no longer owns the attempt; nothing was recorded
    ├── Gone                       410  it was deleted; `extensions` name it
    ├── BodyTooLarge               413
    ├── UnsupportedMediaType       415
    ├── MisdirectedRequest         421  its Host header names no host of this server
    ├── TooManyRequests            429  more requests than FLOPWATCH_REQUESTS_PER_MINUTE; try again
    │   └── QueueFull              429  its submitter has FLOPWATCH_MAX_QUEUED_JOBS queued jobs
    ├── DatabaseBusy               503  locked for longer than the timeout; try again
    ├── DiskFull                   507  reads still work
    ├── StorageFailed              503  the disk gives errors, or may not be written; reads may go on
    │   └── StoreUnreachable       503  the object store does not answer, or refuses; try again
    ├── DatabaseGone               503  the database's file was removed or replaced, or its server does not answer
    ├── Damaged                    500  a stored file is not what was stored
    ├── DatabaseFailed             500  the database's driver raised an error that has no better name
    └── CannotRunHere              500  this host, database or folder cannot be used; raised at start
        ├── DatabaseNewer               written by a newer Flopwatch
        └── NetworkFileSystem           SQLite's locks do not hold there

A job that fails raises no exception in the service: its `error` is a value, a problem that `job_problem` builds.
"""

import difflib
import errno
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

PROBLEM_PREFIX = "urn:flopwatch:problem:"

MAX_DETAIL = 4000
"""Largest number of characters of the `detail` of a job's error; a longer one is cut."""

JOB_PROBLEM_TITLES = {
    "cancelled": "The job was cancelled",
    "crashed": "The job's process died",
    "failed": "The job raised an error",
    "invalid_environment": "The worker's environment cannot run this job",
    "storage_full": "The worker ran out of disk space",
    "timeout": "The job ran longer than its timeout_s",
    "too_large": "The job's results are too large to keep",
    "unreadable": "What is stored cannot be read",
    "unsupported": "The worker does not support what the job asks for",
    "worker_lost": "The worker that ran the job was lost",
}


@dataclass(frozen=True)
class FieldError:
    """One wrong field: a JSON pointer (RFC 6901) into the body as sent, and what to do about it."""

    pointer: str
    detail: str


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """Return the known name that is like this one, as the end of a sentence; nothing if none is."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def nearest(name: str, known: Sequence[str]) -> str:
    """Return the end of a sentence about an unknown name: the one that may be meant, or all that there are."""
    return did_you_mean(name, known) or f"; there is {', '.join(known)}."


class FlopwatchError(Exception):
    """Base of every error that the service answers with."""

    code: ClassVar[str] = "internal_error"
    status: ClassVar[int] = 500
    title: ClassVar[str] = "Internal error"
    headers: Mapping[str, str] = {}
    """The response headers of this error."""
    extensions: Mapping[str, Any] = {}
    """Additional members of the problem object."""

    def __init__(self, detail: str, *, errors: tuple[FieldError, ...] = ()) -> None:
        super().__init__(detail)
        self.detail = detail
        self.errors = errors


class InvalidRequest(FlopwatchError):
    code = "invalid_request"
    status = 422
    title = "The request is not valid"

    @classmethod
    def at(cls, pointer: str, detail: str) -> Self:
        """Build the error of one wrong field."""
        return cls(detail, errors=(FieldError(pointer, detail),))


class IdempotencyMismatch(InvalidRequest):
    code = "idempotency_mismatch"
    title = "This Idempotency-Key was used with another body"


class Unauthorized(FlopwatchError):
    code = "unauthorized"
    status = 401
    title = "A valid API token is needed"
    headers: Mapping[str, str] = {"WWW-Authenticate": 'Bearer realm="flopwatch"'}


class InsufficientScope(FlopwatchError):
    code = "insufficient_scope"
    status = 403
    title = "The token's scope does not allow this"

    def __init__(self, detail: str, scope: str) -> None:
        super().__init__(detail)
        self.headers = {"WWW-Authenticate": f'Bearer realm="flopwatch", error="insufficient_scope", scope="{scope}"'}
        self.extensions = {"scope": scope}


class CrossSiteRequest(FlopwatchError):
    code = "cross_site_request"
    status = 403
    title = "Requests that change something must come from this site"


class NotFound(FlopwatchError):
    code = "not_found"
    status = 404
    title = "Not found"


class Conflict(FlopwatchError):
    code = "conflict"
    status = 409
    title = "The state does not allow this"


class KeyTaken(Conflict):
    code = "key_taken"
    title = "Another job with this unique_key is queued or running"

    def __init__(self, unique_key: str, job_id: int, state: str) -> None:
        super().__init__(f"Job {job_id} with the unique_key {unique_key!r} is {state}: wait for its end, or cancel it.")
        self.headers = {"Location": f"/jobs/{job_id}"}
        self.extensions = {"job_id": job_id}


class InBaseline(Conflict):
    code = "in_baseline"
    title = "A baseline needs this job"

    def __init__(self, job_id: int, baselines: Mapping[str, str | None]) -> None:
        """`baselines`: their names, each with the user who set it."""
        names = [name if user is None else f"{name} (set by {user})" for name, user in baselines.items()]
        named = f"baseline{'s' if len(names) > 1 else ''} {', '.join(names)}"
        super().__init__(f"Job {job_id} is in the {named}: set another job in its place, or delete the baseline first.")
        self.extensions = {"baselines": list(baselines)}


class LeaseLost(Conflict):
    code = "lease_lost"
    title = "This worker no longer owns the attempt"


class Gone(FlopwatchError):
    code = "gone"
    status = 410
    title = "It was deleted"

    def __init__(self, detail: str, extensions: dict[str, Any]) -> None:
        super().__init__(detail)
        self.extensions = extensions


class BodyTooLarge(FlopwatchError):
    code = "body_too_large"
    status = 413
    title = "The request body is too large"
    # Without this the server would read and discard whatever the client continues to send.
    headers: Mapping[str, str] = {"Connection": "close"}


class UnsupportedMediaType(FlopwatchError):
    code = "unsupported_media_type"
    status = 415
    title = "The body has another content type than the route takes"


class MisdirectedRequest(FlopwatchError):
    code = "misdirected_request"
    status = 421
    title = "This host is none of the server's"


class TooManyRequests(FlopwatchError):
    code = "too_many_requests"
    status = 429
    title = "Too many requests; try again later"

    def __init__(self, detail: str, retry_after_s: int) -> None:
        super().__init__(detail)
        self.headers = {"Retry-After": str(retry_after_s)}


class QueueFull(TooManyRequests):
    code = "queue_full"
    title = "Too many queued jobs; try again later"


class DatabaseBusy(FlopwatchError):
    code = "database_busy"
    status = 503
    title = "The database is locked; try again"
    headers: Mapping[str, str] = {"Retry-After": "1"}


class DiskFull(FlopwatchError):
    code = "disk_full"
    status = 507
    title = "No space is left on the disk"


class StorageFailed(FlopwatchError):
    code = "storage_failed"
    status = 503
    title = "The service's disk fails"


class StoreUnreachable(StorageFailed):
    code = "store_unreachable"
    title = "The object store cannot be used now"
    headers: Mapping[str, str] = {"Retry-After": "5"}


class DatabaseGone(FlopwatchError):
    code = "database_gone"
    status = 503
    title = "The database was removed or cannot be reached"


class Damaged(FlopwatchError):
    code = "damaged"
    title = "A stored file is damaged"


STORE_UNAVAILABLE = (DatabaseBusy, DiskFull, StorageFailed, DatabaseGone)
"""Errors that may pass: the writer keeps its data and tries again."""


def is_no_space(error: BaseException) -> bool:
    """Return True if the operating system refused to write more: a full disk, a quota or a file-size limit."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DatabaseFailed(FlopwatchError):
    code = "database_failed"
    title = "The database failed"


class CannotRunHere(FlopwatchError):
    code = "invalid_environment"
    title = "Flopwatch cannot run here"


class DatabaseNewer(CannotRunHere):
    code = "database_newer"
    title = "The database was written by a newer Flopwatch"


class NetworkFileSystem(CannotRunHere):
    code = "network_file_system"
    title = "SQLite cannot be used on a network file system"


def job_problem(code: str, detail: str, **extensions: Any) -> dict[str, Any]:
    """Build the `error` of a job: a problem object whose `code` is one of JOB_PROBLEM_TITLES.

    `extensions` are added unchanged: exit_code, signal, log_head, log_tail, …
    """
    return {
        "type": PROBLEM_PREFIX + code,
        "title": JOB_PROBLEM_TITLES[code],
        "code": code,
        "detail": detail if len(detail) <= MAX_DETAIL else f"{detail[: MAX_DETAIL - 1]}…",
        **extensions,
    }
