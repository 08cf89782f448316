"""/ui/workers: the workers, and their devices' readings."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, get_args

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from app.api.parameters import StrictQuery
from app.api.services import CurrentServices
from app.states import LivingState
from app.web.templates import Entry, render
from flopwatch.text.cases import case_text
from flopwatch.text.validity import RECENT_JOBS, noisy_host

router = APIRouter()
NAVIGATION = Entry("Workers", "/ui/workers", order=60)

LIVING: tuple[LivingState, ...] = get_args(LivingState)
SHOWN_GONE = 50
"""Largest number of stopped and lost workers that `gone` shows, the newest."""


class WorkersQuery(StrictQuery):
    gone: bool = False
    """Show workers that stopped or were lost, too."""


@router.get("/workers")
def workers(request: Request, services: CurrentServices, query: Annotated[WorkersQuery, Query()]) -> Response:
    workers = services.reading.workers(gone=SHOWN_GONE if query.gone else 0)
    counts = services.reading.worker_counts()
    running = {job["id"]: job for job in services.reading.jobs(state="running", limit=200)[0]}
    recent = services.reading.jobs(state="succeeded", limit=RECENT_JOBS)[0]
    return render(
        request,
        "workers.html",
        workers=[
            {
                **worker,
                "devices": devices_of(worker),
                "read_at": (worker["readings"] or {}).get("read_at"),
                "noise": noisy_host(job["validity"] for job in recent if job["worker_id"] == worker["id"]),
                "jobs": [(job_id, running.get(job_id)) for job_id in worker["job_ids"]],
            }
            for worker in sorted(workers, key=lambda worker: (worker["state"] not in LIVING, worker["hostname"]))
        ],
        cases={job_id: case_text(job.get("summary") or {}) for job_id, job in running.items()},
        queued=services.reading.counts()["queued"],
        gone=query.gone,
        number_gone=sum(number for state, number in counts.items() if state not in LIVING),
        paused=services.pausing.kinds(),
        this="/ui/workers?gone=true" if query.gone else "/ui/workers",
    )


def devices_of(worker: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return each device of a public worker, with its readings at the last heartbeat and the fraction of its memory in
    use."""
    reported: Sequence[Any] = (worker["readings"] or {}).get("devices") or ()
    readings = {(device.get("type"), device.get("uuid")): device for device in reported if isinstance(device, dict)}
    devices = []
    for device in worker["devices"]:
        if not isinstance(device, dict):
            continue
        present = readings.get((device.get("type"), device.get("uuid")), {})
        total, used = device.get("memory_mib"), present.get("memory_used_mib")
        share = 100 * used / total if total and used is not None else None
        devices.append({**device, **present, "memory_percent": share})
    return devices
