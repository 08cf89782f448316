"""Adds to jobs and sweeps, as the store returns them, the addresses of their parts and pages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from app.specs._code import codes_of
from app.store.files.uploads import url_of

JOB_PARTS = ("events", "logs", "units", "measurements", "tables", "artifacts", "attempts")


def linked_job(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the job with its links; those of uploaded code are named by their fields: "code", "candidate_code", …"""
    path = f"/jobs/{job['id']}"
    parts = {name: f"{path}/{name}" for name in JOB_PARTS}
    code = {"_".join(place): url_of(sha256) for place, sha256 in codes_of(job["spec"])}
    return {**job, "links": {"self": path, **parts, **code, "ui": f"/ui{path}"}}


def linked_jobs(jobs: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [linked_job(job) for job in jobs]


def linked_sweep(sweep: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sweep with its links."""
    path = f"/sweeps/{sweep['id']}"
    others = {"jobs": f"/jobs?sweep={sweep['id']}", "table": f"/tables?sweep={sweep['id']}", "ui": f"/ui{path}"}
    return {**sweep, "links": {"self": path, **others}}
