"""Checks of a request's token beyond reading and submitting: the scopes `code` and `admin`, and that a job or sweep is
the sender's own. The gate asks for `read` and `submit`."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Any

from anyio.to_thread import run_sync
from fastapi import Depends, Request

from app.api.guard import Access
from app.api.parameters import JobId, SweepId, user_of
from app.api.services import CurrentServices, Services
from app.errors import InsufficientScope, InvalidRequest
from app.specs._code import RUNS_CODE, codes_of
from app.store.records import NewJob
from app.tokens import Scope


def access_of(request: Request) -> Access:
    """Return who sends the request, as the gate found it."""
    access: Access = request.state.access
    return access


def needs(scope: Scope) -> Any:
    """Return a dependency that refuses requests without this scope."""

    async def check(request: Request) -> None:
        access_of(request).require(scope, f"{request.method} {request.url.path}")

    return Depends(check)


CODE, ADMIN = needs("code"), needs("admin")


async def _sender(request: Request) -> Access:
    access = access_of(request)
    return access if access.token_id else replace(access, name=user_of(request.headers))


Sender = Annotated[Access, Depends(_sender)]
"""Who submits something: the token's name or, without one, the user that the client names."""


def own_name(sender: Access, other: str | None) -> str:
    """Return the name that `mine` stands for. Raises InvalidRequest if the sender has none, or if the filter also names
    somebody else."""
    if sender.name is None or other not in (None, sender.name):
        why = "this request names no user" if sender.name is None else f"that is {sender.name!r}, not {other!r}"
        raise InvalidRequest.at("/mine", f"`mine` means jobs of the sender, and {why}.")
    return sender.name


def check_code(sender: Access, jobs: Iterable[NewJob]) -> None:
    """Raise InsufficientScope if a job runs uploaded code, and the sender may not."""
    if not sender.allows("code") and any(RUNS_CODE in job.spec.requirements() for job in jobs):
        sender.require("code", "A spec with uploaded code")


def check_limits(services: Services, sender: Access, jobs: Iterable[NewJob]) -> None:
    """Raise InsufficientScope for a priority above that of the sender's scope, and InvalidRequest for a job that needs
    more devices than its user may hold."""
    if sender.token_id is None:
        return
    highest, most = dict(services.settings.max_priority).get(sender.scope), services.settings.max_running_devices
    for new in jobs:
        if highest is not None and new.priority > highest:
            raise InsufficientScope(
                f"A token with the scope `{sender.scope}` gives jobs priorities up to {highest} "
                f"(FLOPWATCH_MAX_PRIORITY), and this has {new.priority}: lower it, or ask an admin.",
                "admin",
            )
        if most is not None and (number := new.spec.resources().total) > most:
            detail = f"It needs {number} devices; a user's jobs hold at most {most} (FLOPWATCH_MAX_RUNNING_DEVICES)."
            raise InvalidRequest.at("/spec", detail)


def check_own(access: Access, owner: str | None, what: str) -> None:
    """Raise InsufficientScope for what somebody else has submitted, unless the sender is an admin."""
    if not access.allows("admin") and (access.token_id is None or access.name != owner):
        raise InsufficientScope(
            f"{what} was submitted by {owner or 'somebody without a token'}, not by {access.name}: to change it asks "
            "for a token with the scope `admin`.",
            "admin",
        )


async def check_own_jobs(services: Services, access: Access, job_ids: Iterable[int], *, again: bool = False) -> None:
    """Raise InsufficientScope unless the sender may change these jobs, or with `again` run them again."""
    if access.allows("admin"):
        return
    for job_id in job_ids:
        job, _version = await run_sync(services.reading.job, job_id)
        check_own(access, job["submitted_by"], f"Job {job_id}")
        if again and any(codes_of(job["spec"])):
            access.require("code", f"Job {job_id}, which runs uploaded code,")


def own_job(*, again: bool = False) -> Any:
    """Return a dependency for routes that change a job; `again`: they run it again."""

    async def check(request: Request, services: CurrentServices, job_id: JobId) -> None:
        await check_own_jobs(services, access_of(request), [job_id], again=again)

    return Depends(check)


def own_sweep(*, again: bool = False) -> Any:
    """Return a dependency for routes that change a sweep; `again`: they run parts of it again."""

    async def check(request: Request, services: CurrentServices, sweep_id: SweepId) -> None:
        access = access_of(request)
        if not access.allows("admin"):
            sweep = await run_sync(services.reading.sweep, sweep_id)
            check_own(access, sweep["options"].get("submitted_by"), f"Sweep {sweep_id}")
            # A grid may have the name of a file in parts.
            if again and "sha256" in f"{sweep['base']} {sweep['grid']}":
                access.require("code", f"Sweep {sweep_id}, which may run uploaded code,")

    return Depends(check)


OWN_JOB, OWN_JOB_AGAIN = own_job(), own_job(again=True)
OWN_SWEEP, OWN_SWEEP_AGAIN = own_sweep(), own_sweep(again=True)
