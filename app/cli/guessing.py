"""Guesses how long jobs would take, for `--dry-run`: by earlier jobs of the kind, scaled by their cases' FLOPs."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flopwatch.text.times import duration, parsed_time

if TYPE_CHECKING:
    from app.specs import SpecBase
    from flopwatch import Flopwatch

GUESSED_BY = 100
"""Number of the last jobs of a kind by which the time of others is guessed."""
START_S = 5.0
"""Seconds of a process that no FLOPs explain: its start, and the shortest warm-up and measurement."""
STEPS, WARMUP_STEPS = 10, 5
"""Steps of a spec that does not say how many."""
FAR = 10.0
"""A guess by a job with so many times fewer or more FLOPs says that it is rough."""


@dataclass(frozen=True)
class Guess:
    """The time of several jobs, and what it rests on."""

    seconds: Sequence[float] = ()
    """Of each job; empty if nothing is known."""
    rests_on: Sequence[int] = ()
    """Earlier jobs."""
    took_s: float | None = None
    """Their median."""
    ratio: float | None = None
    """The FLOPs of the job that differs most from them, over theirs; None if FLOPs are not known."""
    why: str = ""

    def sentence(self, *, one_each: bool) -> str:
        """Say it in words; `one_each`: the number of jobs is not known."""
        if not self.seconds:
            return self.why
        least, most = duration(min(self.seconds)), duration(max(self.seconds))
        each = least if least == most else f"{least} to {most}"
        if one_each or len(self.seconds) == 1:
            told = f"about {each} for each job"
        else:
            told = f"about {duration(sum(self.seconds))} one after the other: {each} each"
        return f"{told}, {self.why}"


def guess(server: Flopwatch, kind: str, specs: Iterable[Mapping[str, Any]]) -> Guess:
    """Guess the time of jobs with these specs."""
    asked = [_read(spec) for spec in specs]
    known = []
    for job in server.list_jobs(kind=kind, state="succeeded", limit=GUESSED_BY):
        if job["started_at"] and job["finished_at"]:
            took = (parsed_time(job["finished_at"]) - parsed_time(job["started_at"])).total_seconds()
            device = ((job["environment"] or {}).get("device") or {}).get("type")
            known.append((job["id"], _read(job["spec"]), took, device))
    wanted = {spec.resources().device_type for spec in asked if spec is not None} - {"auto"}
    alike = [each for each in known if each[3] is None or not wanted or each[3] in wanted]
    if not alike:
        which = f" on a {'/'.join(sorted(wanted))} device" if known else ""
        return Guess(why=f"no estimate: no finished job of this kind{which} yet")
    own = {_own(spec) for spec in asked} - {None}
    if own:
        same = [each for each in alike if _own(each[1]) in own]
        if not same:
            return Guess(why="no estimate: no finished job of this code yet")
        return _unscaled(same, len(asked), "of this code")
    measured = [(job, work(spec), took) for job, spec, took, _ in alike if spec is not None]
    works = [None if spec is None else work(spec) for spec in asked]
    with_work = [(job, flops, took) for job, flops, took in measured if flops]
    if not with_work or not all(works):
        return _unscaled(alike, len(asked), "of this kind, whatever their size")
    return _scaled(with_work, [flops for flops in works if flops], [spec for spec in asked if spec is not None])


def _unscaled(known: Sequence[tuple[int, Any, float, Any]], number: int, which: str) -> Guess:
    took_s = statistics.median(took for _, _, took, _ in known)
    why = f"the median of the last {len(known)} {which}"
    return Guess([took_s] * number, [job for job, *_ in known], took_s, None, why)


def _scaled(known: Sequence[tuple[int, float, float]], works: Sequence[float], specs: Sequence[SpecBase]) -> Guess:
    """Scale the time of the jobs whose FLOPs are nearest, but for START_S of each process."""
    middle = statistics.median(works)
    nearest = min(abs(math.log(flops / middle)) for _, flops, _ in known)
    used = [each for each in known if abs(math.log(each[1] / middle)) <= nearest + 0.01]
    flops, took_s = (statistics.median(each[place] for each in used) for place in (1, 2))
    processes = max(_processes(spec) for spec in specs)
    start_s = min(took_s, START_S * processes)
    seconds = [start_s + (took_s - start_s) * its / flops for its in works]
    ratio = max((its / flops for its in works), key=lambda its: abs(math.log(its)))
    jobs = [job for job, *_ in used]
    which = f"job {jobs[0]}" if len(jobs) == 1 else f"{len(jobs)} jobs, such as {jobs[0]}"
    why = f"by {which}, which took {duration(took_s)}"
    if abs(ratio - 1) > 0.01:
        why += f", scaled by FLOPs ({'up to ' if len(works) > 1 and ratio > 1 else ''}{ratio:.2g} × as many)"
    if not 1 / FAR <= ratio <= FAR:
        why += "; so far away it is rough: it may well be a third or three times that"
    return Guess(seconds, jobs, took_s, ratio, why)


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


def work(spec: SpecBase) -> float | None:
    """Return about how many FLOPs a job's measured steps have, to compare jobs by; None if it is not known.

    The products of `workers.model.accounting`, without windows and documents; times, processes and steps.
    """
    from app.specs._training import TrainingSpec

    if spec.has_sides:
        sides = [work(side) for side in spec.sides().values()]  # type: ignore[attr-defined]
        return None if None in sides else sum(filter(None, sides)) * _processes(spec) / len(sides)
    if isinstance(spec, TrainingSpec) and spec.step_code is None and spec.code is None:
        shape, tokens = spec.model.shape(), spec.context_length
        width, layers = shape["d_model"], shape["num_layers"]
        keys = width * (spec.model.num_kv_heads or shape["num_heads"]) // shape["num_heads"]
        weights = layers * (2 * width * (width + keys) + 3 * width * shape["d_ff"]) + spec.model.vocab_size * width
        flops = spec.batch_size * (2.0 * tokens * weights + 2.0 * layers * tokens**2 * width)
        passes = 1 if spec.mode in ("forward", "generate") else 3
        steps = getattr(spec, "measure_steps", None) or STEPS
        warmup = getattr(spec, "warmup_steps", None)
        steps += WARMUP_STEPS if warmup is None else warmup
        return float(flops * passes * spec.accumulation_steps * steps * _processes(spec))
    if spec.kind == "attention":
        pairs = [float(cell.sequence_length) ** 2 * cell.head_dim for cell in spec.cells()]
        return float(sum(pairs) * _processes(spec))
    return None


def _processes(spec: SpecBase) -> int:
    """Return how many processes measure, one after the other."""
    return (getattr(spec, "replicates", None) or 1) * (2 if spec.has_sides else 1)


def _own(spec: SpecBase | None) -> str | None:
    """Return what code of the user's own a job runs, with its arguments, whatever its version; None for none."""
    if spec is None:
        return None
    fields = spec.model_dump(mode="json")
    inner = fields.get("candidate", fields)
    codes = {name: (value["file"], value["function"]) for name, value in inner.items() if _is_code(value)}
    return json.dumps([codes, inner.get("arguments")], sort_keys=True) if codes else None


def _is_code(value: Any) -> bool:
    return isinstance(value, dict) and "sha256" in value


def _read(spec: Mapping[str, Any]) -> SpecBase | None:
    """Return a spec with its defaults; None if it is of another version."""
    from pydantic import ValidationError

    from app.specs import spec_adapter

    try:
        read: SpecBase = spec_adapter.validate_json(json.dumps(spec))
    except ValidationError:
        return None
    return read
