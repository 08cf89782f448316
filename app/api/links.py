"""Adds to jobs and sweeps, as the store returns them, the addresses of their parts and pages."""

from collections.abc import Iterable, Mapping
from typing import Any

from app.specs import without_effect_in
from app.specs._code import codes_of
from app.store.files.uploads import url_of

JOB_PARTS = ("events", "logs", "units", "measurements", "tables", "artifacts", "attempts")


def linked_job(job: Mapping[str, Any], *, alone: bool = True) -> dict[str, Any]:
    """Return the job with its links; those of uploaded code are named by their fields: "code", "candidate_code", …

    alone: the answer is about this job, and also names the fields without effect.
    """
    path = f"/jobs/{job['id']}"
    parts = {name: f"{path}/{name}" for name in JOB_PARTS}
    code = {"_".join(place): url_of(sha256) for place, sha256 in codes_of(job["spec"])}
    links = {"self": path, **parts, **code, "ui": f"/ui{path}"}
    return {**job, "without_effect": without_effect_in(job["spec"]) if alone else None, "links": links}


def linked_jobs(jobs: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [linked_job(job, alone=False) for job in jobs]


def linked_sweep(sweep: Mapping[str, Any]) -> dict[str, Any]:
    path = f"/sweeps/{sweep['id']}"
    others = {"jobs": f"/jobs?sweep={sweep['id']}", "table": f"/tables?sweep={sweep['id']}", "ui": f"/ui{path}"}
    return {**sweep, "links": {"self": path, **others}}
