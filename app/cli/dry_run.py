"""What `--dry-run` says beside the number of jobs: how long earlier ones took, and what no worker has."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flopwatch.text.times import duration, parsed_time

if TYPE_CHECKING:
    from app.specs import SpecBase
    from flopwatch import Flopwatch

LAST = 100
"""Number of the last jobs of a kind that are asked for."""


@dataclass(frozen=True)
class Took:
    """How long finished jobs of the kind took, or those of the same code of the user's own, on such a device."""

    seconds: Sequence[float]
    jobs: Sequence[int]
    which: str

    @property
    def median_s(self) -> float | None:
        return statistics.median(self.seconds) if self.seconds else None

    def sentence(self) -> str:
        if self.median_s is None:
            return f"no finished job of this {self.which} yet"
        least, middle, most = map(duration, (min(self.seconds), self.median_s, max(self.seconds)))
        if len(self.jobs) == 1:
            return f"one job of this {self.which} took {middle}"
        return f"the last {len(self.jobs)} jobs of this {self.which} took {least} to {most}, {middle} in the median"


def took(server: Flopwatch, kind: str, specs: Iterable[Mapping[str, Any]]) -> Took:
    """Return what is known of jobs like those of these specs."""
    asked = [_inner(spec if (whole := _read(spec)) is None else whole.model_dump(mode="json")) for spec in specs]
    devices = {spec.get("device") for spec in asked} - {"auto", None}
    works = [_work(spec) for spec in asked]
    which = "code" if any(map(_code, asked)) else "kind and model" if any(works) else "kind"
    found = []
    for job in server.list_jobs(kind=kind, state="succeeded", limit=LAST):
        device = ((job["environment"] or {}).get("device") or {}).get("type")
        on_such = device is None or not devices or device in devices
        if job["started_at"] and job["finished_at"] and on_such and _work(_inner(job["spec"])) in works:
            span = parsed_time(job["finished_at"]) - parsed_time(job["started_at"])
            found.append((job["id"], span.total_seconds()))
    return Took([seconds for _, seconds in found], [job for job, _ in found], which)


def _work(spec: Mapping[str, Any]) -> Any:
    """Return what a job runs: code of the user's own, or else its model; None for neither."""
    return _code(spec) or spec.get("model")


def unavailable(server: Flopwatch, specs: Iterable[Mapping[str, Any]]) -> str | None:
    """Return a sentence if no connected worker has the devices that a job asks for; None if one has."""
    workers = server.list_workers(state="active")
    if not workers:
        return "no worker is connected: the jobs would wait for one"
    most = {"cuda": 0, "cpu": 0}
    for device in (device for worker in workers for device in worker["devices"]):
        if device["type"] in most:
            most[device["type"]] = max(most[device["type"]], 1 if device["type"] == "cpu" else device.get("count", 1))
    for spec in filter(None, map(_read, specs)):
        needs = spec.resources()
        if needs.device_type == "cuda" and most["cuda"] < needs.devices and needs.nodes == 1:
            gpus = "a GPU" if needs.devices == 1 else f"{needs.devices} GPUs"
            return f"no connected worker has {gpus} (device=cuda): the jobs would wait"
        if needs.device_type == "cpu" and not most["cpu"]:
            return "no connected worker has a CPU for jobs (device=cpu): the jobs would wait"
    return None


def _inner(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the spec, that of the candidate if it has two sides, or that of the step that it diagnoses."""
    held = (spec.get(name) for name in ("candidate", "step"))
    return next((value for value in held if isinstance(value, Mapping)), spec)


def _code(spec: Mapping[str, Any]) -> Any:
    """Return what code of the user's own a job runs, with its arguments, whatever its version; None for none."""
    codes = {
        name: (value["file"], value["function"])
        for name, value in spec.items()
        if isinstance(value, dict) and "sha256" in value
    }
    return (codes, spec.get("arguments")) if codes else None


def _read(spec: Mapping[str, Any]) -> SpecBase | None:
    """Return a spec with its defaults; None if it is of another version."""
    from pydantic import ValidationError

    from app.specs import spec_adapter

    try:
        read: SpecBase = spec_adapter.validate_json(json.dumps(spec))
    except ValidationError:
        return None
    return read
