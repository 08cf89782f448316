"""The Python client: submit jobs and sweeps, wait for them, and read their results as pandas frames.

    from flopwatch import Flopwatch

    with Flopwatch() as flopwatch:
        job = flopwatch.submit({"kind": "benchmark", "model": {"size": "small"}, "context_length": 256})
        flopwatch.wait(job)
        print(flopwatch.table(job=job))

Jobs, sweeps and comparisons are the dicts that the server answers with; docs/http-api.md describes them. A `Job` has
`id`, `kind`, `state`, `error` and `verdict` as attributes, too. A method that takes a job or a sweep also takes its id.
The errors:

    ClientError
    ├── Unreachable     no Flopwatch server answers at that address, or the connection broke
    ├── Refused         the server answered with a problem: its type, status, pointer and cure
    ├── InvalidArgument  a file, folder or option that the client refuses by itself (a ValueError, too)
    ├── JobFailed       a job that was waited for failed or was cancelled
    ├── WaitTimeout     it was not done in time; it goes on (a TimeoutError, too)
    └── DownloadFailed  a downloaded file is damaged, or a file of that name exists already
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack
from urllib.parse import quote, unquote

from flopwatch import alternating
from flopwatch.connection import (
    PAGE,
    Answer,
    ClientError,
    Connection,
    DownloadFailed,
    Event,
    InvalidArgument,
    Job,
    Submitted,
    WaitTimeout,
    deadline_of,
    problem_text,
)
from flopwatch.imports import clash_in, left_behind
from flopwatch.own_code import OwnCode, put_into
from flopwatch.packing import is_packed
from flopwatch.progress import Show, progress_bar
from flopwatch.queries import (
    Description,
    JobFilter,
    OwnCodeOptions,
    PlotOptions,
    Question,
    RowOptions,
    SubmissionOptions,
    TableOptions,
    Thing,
    comparison_query,
    filter_query,
    id_of,
    ids_of,
    preset_of,
    query_of,
    refuse_unknown,
    table_query,
)
from flopwatch.table_options import Format
from flopwatch.text.cases import case_text
from flopwatch.text.times import duration, rough_duration
from flopwatch.text.values import value_text

if TYPE_CHECKING:
    import pandas as pd

POLL_S = 0.5
BULK_TIMEOUT_S = 3600.0
"""Longest silence of the server while it changes thousands of jobs, in slices between which other writers get their
turn."""
MAX_NAME = 200
ALL = 1_000_000
"""More entries than a list has."""
FINISHED = ("succeeded", "failed", "cancelled")
CHECKED = ("wrong", "slower", "invalid", "missing", "not_confirmed", "inconclusive", "passed")
"""Outcomes of a check, the worst first."""
UNDECIDED = ("not_confirmed", "inconclusive")
"""Outcomes that measuring in turns decides."""


class JobFailed(ClientError):
    """A job that was waited for failed or was cancelled. `job` is the job, `problem` its error, if it has one."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.problem: Mapping[str, Any] = job.get("error") or {}
        why = f": {problem_text(self.problem)}" if self.problem else ""
        super().__init__(f"Job {job['id']} {'was cancelled' if job['state'] == 'cancelled' else 'failed'}{why}")


@dataclass(frozen=True)
class ComparisonText:
    """A comparison as text. Without `fail_above_percent`, `gate` and `gate_sentence`, which answer it, are empty."""

    text: str
    gate: str
    gate_sentence: str
    wrong_sides: str
    """The sides with a result that is not the reference's: "candidate", "baseline, candidate"; empty if there are
    none."""


class Flopwatch(Connection):
    """A connection to one server. All talk with the server, that of the command line too, goes through this class.

    Args:
        url: the server's address. Default: FLOPWATCH_URL; else the address that the server of this data folder left
            there; else that at which it would listen with this environment's settings.
        token: the API token. Default: FLOPWATCH_API_TOKEN.
        data_dir: the server's data folder, if the server runs on this host. Default: FLOPWATCH_DATA_DIR.
        timeout_s: the longest silence of the server within an answer, in seconds.

    Raises:
        ClientError: one of the environment's settings, or the address, makes no sense.

    Example:
        >>> with Flopwatch() as flopwatch:
        ...     job = flopwatch.submit({"kind": "benchmark", "model": {"size": "tiny"}, "context_length": 64})
        ...     job = flopwatch.wait(job)
        ...     print(job["state"])
        succeeded
    """

    def __repr__(self) -> str:
        return f"Flopwatch({self.url!r})"

    # Submitting

    def submit(
        self,
        spec: Mapping[str, Any],
        *,
        unique_key: str | None = None,
        wait_s: int = 0,
        **options: Unpack[SubmissionOptions],
    ) -> Job:
        """Submit one job.

        Args:
            spec: the job's spec with its `kind`; fields that are left out have defaults.
            unique_key: refused while another job with this key is queued or runs.
            wait_s: hold the answer for at most so many seconds (60 is the most), until the job is done.
            options: `SubmissionOptions` describes them. With `dry_run` the answer is {"jobs": 1, "spec": …}.

        Returns:
            The job; done if it ended within `wait_s`. Its attribute `replayed` is True if an earlier request with this
            `idempotency_key` has made it.

        Raises:
            Refused: the server does not take it; `pointer` and `cure` say what to mend.
            Unreachable: no server answers.

        Example:
            >>> job = flopwatch.submit(
            ...     {"kind": "benchmark", "context_length": 64}, preset="tiny", labels={"run": "first"}, wait_s=60
            ... )
            >>> job["state"], job["spec"]["model"]["size"]
            ('succeeded', 'tiny')
        """
        chosen, body, once = self._prepared(spec, options)
        answer = self.post_once("/jobs", {"spec": chosen, **body, "unique_key": unique_key}, wait_s=wait_s, **once)
        return Job({**answer, "spec": chosen} if once["dry_run"] else answer, replayed=answer.replayed)

    def _prepared(
        self, spec: Mapping[str, Any], options: SubmissionOptions, swept: Iterable[str] = ()
    ) -> tuple[Answer, Answer, Answer]:
        """Upload the code that the options name; return the spec with it, the body's other fields, and what the request
        is told beside its body."""
        refuse_unknown(options, SubmissionOptions)
        rest: Answer = {"name": None, "priority": 0, "timeout_s": None, "max_attempts": 2, **options}
        own_code: Any = {name: rest.pop(name, None) for name in ("implementation", "model", "step", "code")}
        chosen = self.with_code(self._with_preset(spec, rest.pop("preset", None)), swept=swept, **own_code)
        once = {"idempotency_key": rest.pop("idempotency_key", None), "dry_run": rest.pop("dry_run", False)}
        return chosen, {**rest, "labels": dict(rest.get("labels") or {})}, once

    def versus(
        self,
        old: str,
        new: str,
        spec: Mapping[str, Any],
        *,
        preset: str | None = None,
        replicates: int = 8,
        name: str | None = None,
        labels: Mapping[str, str] | None = None,
        **own_code: Unpack[OwnCodeOptions],
    ) -> Job:
        """Submit a comparison of two versions of your own code: fresh processes measure both in turns.

        Args:
            old: the version to compare with: a file, a folder, or a revision of the git repository ("main", "HEAD~3").
            new: the version that is compared; "." is the working tree.
            spec: the spec of both sides, with its `kind`.
            preset: one of the kind's presets, which `spec` then changes.
            replicates: fresh processes of each version.
            name: of the job; None: both versions.
            own_code: `implementation`, `model` or `step`: the file and its function in both versions; where a version
                is a file itself, that file has the function. `code`: "." of versions that are folders.

        Raises:
            InvalidArgument: a version has no such file or function, or no code is named.
            ClientError: both have the same code.
            Refused, Unreachable: as `submit`.
        """
        refuse_unknown(own_code, OwnCodeOptions)
        named: dict[str, Any] = {name: own_code.get(name) for name in ("implementation", "model", "step")}
        code = own_code.get("code")
        if not any(named.values()):
            raise InvalidArgument("Name the code of which these are versions: implementation, model or step.")
        plain = self._with_preset(spec, preset)
        (before, ones), (after, others) = (self._read_code(plain, named, code, version) for version in (old, new))
        if alternating.versions(before) == alternating.versions(after):
            raise ClientError(_same_code(old, new, next(filter(None, named.values())), code))
        self._upload(ones, named, code, old)
        self._upload(others, named, code, new)
        sides = {"baseline": before, "candidate": after}
        comparison = {"kind": "compare", **sides, "replicates": replicates}
        return self.submit(comparison, name=name or f"{old} → {new}"[-MAX_NAME:], labels=labels)

    def sweep(
        self,
        base: Mapping[str, Any],
        grid: Mapping[str, Sequence[Any]] | None = None,
        *,
        fit: Mapping[str, Any] | None = None,
        exclude: Iterable[Mapping[str, Any]] = (),
        **options: Unpack[SubmissionOptions],
    ) -> Submitted:
        """Submit one job per combination of the grid's values: all, or none if one of them is not valid.

        Args:
            base: the spec that the jobs have in common, with its `kind`.
            grid: dotted paths below the spec, each with its values.
            fit: search for the largest value that fits into memory, for each point of the grid or, without one, once:
                {"axis": "context_length", "upto": 65536, "step": 64}. `start` is the value to try first; without
                `step` the answer is exact to 6 %, below 32 to 1. The sweep's `searches` tell where it stands.
            exclude: points to leave out, such as {"model.size": "xl", "context_length": 1024}.
            options: those of `submit`. With `dry_run` the answer has the number of `jobs`, and `base`.

        Example:
            >>> sweep = flopwatch.sweep(
            ...     {"kind": "benchmark", "model": {"size": "tiny"}}, {"context_length": [16, 32], "seed": [1, 2]},
            ...     exclude=[{"context_length": 32, "seed": 2}],
            ... )
            >>> sum(sweep["counts"].values())
            3
        """
        varied = [*(grid or {}), *([] if fit is None else [str(fit.get("axis"))])]
        chosen, rest, once = self._prepared(base, options, swept=varied)
        body = {
            "base": chosen,
            "grid": {path: list(values) for path, values in (grid or {}).items()},
            "fit": None if fit is None else dict(fit),
            "exclude": [dict(point) for point in exclude],
            **rest,
        }
        made = self.post_once("/sweeps", body, **once)
        return Submitted({**made, "base": chosen}, replayed=False) if once["dry_run"] else made

    def rerun(
        self,
        job: Thing,
        changes: Mapping[str, Any] | None = None,
        /,
        *,
        implementation: str | None = None,
        own_model: str | None = None,
        step: str | None = None,
        code: str | os.PathLike[str] | None = None,
        **fields: Any,
    ) -> Job:
        """Submit a new job with a job's spec and options, and other values for some fields of the spec.

        Args:
            changes: dotted paths below the spec with their values: {"model.size": "small"}.
            implementation: attention of your own, as in `submit`.
            own_model: likewise, a model class of your own; `model` is a field of specs.
            step: likewise, a training step of your own.
            code: the folder that goes along, as in `submit`.
            fields: fields of the spec, as keyword arguments.

        Example:
            >>> again = flopwatch.rerun(job, {"model.num_layers": 1}, precision="bf16")
            >>> again["spec"]["precision"], again["spec"]["model"]["num_layers"], again["labels"] == job["labels"]
            ('bf16', 1, True)
        """
        former = self.job(job)
        spec = copy.deepcopy(former["spec"])
        for path, value in {**fields, **(changes or {})}.items():
            _set(spec, path, value)
        spec = self.with_code(spec, implementation=implementation, model=own_model, step=step, code=code)
        return self._resubmit(former, spec, self._name_of(former), former["labels"])

    def _name_of(self, job: Answer) -> str | None:
        named = job if job["sweep_id"] is None else self.sweep_state(job["sweep_id"])
        name: str | None = named["name"]
        return name

    def with_code(
        self, spec: Answer, *, script: str | None = None, swept: Iterable[str] = (), **own_code: Unpack[OwnCodeOptions]
    ) -> Answer:
        """Upload the files of code of one's own, and return the spec with it.

        swept: dotted paths of fields that a sweep varies.

        Raises:
            InvalidArgument: a file cannot be read, a job could not call what is named in it, it imports other files of
                yours that do not go along, or specs of this kind take no such code.
        """
        named: dict[str, Any] = {"script": script, **own_code}
        code = named.pop("code", None)
        changed, files = self._read_code(spec, named, code, swept=swept)
        self._upload(files, named, code)
        return changed

    def _read_code(
        self,
        spec: Mapping[str, Any],
        named: Mapping[str, str | None],
        code: str | os.PathLike[str] | None,
        version: str | None = None,
        swept: Iterable[str] = (),
    ) -> tuple[Answer, list[OwnCode]]:
        changed = copy.deepcopy(dict(spec))
        if code is None and not any(named.values()):
            return changed, []
        try:
            return changed, put_into(changed, self.specs(), named, None if code is None else Path(code), version, swept)
        except ValueError as error:
            raise InvalidArgument(str(error)) from error

    def _upload(
        self,
        files: Sequence[OwnCode],
        named: Mapping[str, str | None],
        code: str | os.PathLike[str] | None,
        version: str | None = None,
    ) -> None:
        """Upload files, unless they import what would not go along, or what a job has loaded before them."""
        if code is None:
            self._check_own_modules(files, [value for value in named.values() if value], version)
        for file in files:
            if is_packed(file.content) and (clash := clash_in(file.content, file.name)):
                raise InvalidArgument(clash)
            self.send("PUT", f"/files/{file.sha256}", content=file.content)

    @staticmethod
    def _check_own_modules(files: Iterable[OwnCode], named: Iterable[str], version: str | None) -> None:
        """Raise InvalidArgument if a file imports other files of its folder, which would not go along."""
        is_file = version is not None and Path(version).is_file()
        here = Path(version).resolve() if version is not None and Path(version).is_dir() else Path.cwd()
        for file, value in zip(files, named, strict=False):
            path = Path(str(version) if is_file else value.rpartition(":")[0])
            if (found := left_behind(file.source, here / path, here)) is None:
                continue
            modules, root = found
            shown = os.path.relpath(root, here) if root.is_relative_to(here) else root
            cure = "name folders or revisions" if is_file else f"send the folder, too: --code {shlex.quote(str(shown))}"
            raise InvalidArgument(
                f"{path} imports {', '.join(map(repr, modules))} of the folder {root}, and only the file would go "
                f"along: {cure}"
            )

    def specs(self) -> list[Answer]:
        """Return every kind of job: its JSON Schema, presets, and an example that runs.

        Example:
            >>> "benchmark" in [spec["kind"] for spec in flopwatch.specs()]
            True
        """
        return list(self.get("/specs")["data"])

    def preset(self, kind: str, name: str) -> Answer:
        """Return the fields of one of a kind's presets. Raises ClientError, which names the known ones.

        Example:
            >>> flopwatch.preset("attention", "leaderboard")["sequence_lengths"]
            [16384]
        """
        return preset_of(self.specs(), kind, name)

    # Waiting

    def wait(self, job: Thing, *, timeout_s: float | None = None, show: Show | None = None, check: bool = True) -> Job:
        """Wait until a job is done; shows a progress bar on a terminal, a line in a notebook, and nothing elsewhere.

        Args:
            timeout_s: raise WaitTimeout after about so many seconds; the job goes on.
            show: called with each step of progress, and with what a queued job waits for, in place of the bar. If
                it has a method `tell`, that gets a line about each finished cell; a method `log` gets the job's output.
            check: raise JobFailed unless the job succeeded.

        Returns:
            The job as it is then.

        Example:
            >>> flopwatch.wait(job, timeout_s=600)["state"]
            'succeeded'
        """
        job_id, deadline = id_of(job), deadline_of(timeout_s)
        later = f"show {job_id}"
        with contextlib.ExitStack() as stack:
            display = show or stack.enter_context(progress_bar())
            tell, log = getattr(display, "tell", None), getattr(display, "log", None)
            seconds: list[float] = []
            queued, reason = False, None
            for event in self._events(job_id, timeout_s):
                if event is not None and event.type == "state":
                    queued, reason = event.data["state"] == "queued", None
                    display(0, 0, event.data["state"])
                # What the reason depends on, such as the workers, makes no event of the job.
                if queued and (latest := self.patiently(lambda: self._in_queue(job_id), deadline, later)) != reason:
                    reason = latest
                    display(0, 0, latest)
                if event is not None and event.type == "log" and log is not None:
                    log(event.data["text"])
                if event is not None and event.type == "progress":
                    done, total, message = (event.data[name] for name in ("done", "total", "message"))
                    if "cell" in event.data:
                        seconds.append(event.data["cell"]["seconds"])
                        if done == len(seconds):  # else the job's worker counts other things than cells
                            message += _left(seconds, total - done)
                        if tell is not None:
                            tell(f"{done}/{total} {message}")
                    display(done, total, message)
        done = self.patiently(lambda: self.job(job_id), deadline, later)
        if check and done["state"] != "succeeded":
            raise JobFailed(done)
        return done

    def _in_queue(self, job_id: int) -> str:
        """Say what a queued job waits for: the reason why it cannot start, or the jobs ahead and their time."""
        job = self.job(job_id)
        place = self._places([job]).get(job_id, {"place": 1})
        if place["place"] == 1 or (job["waiting"] and place.get("about_s") is None):
            return f"job {job_id} waits: {job['waiting']}" if job["waiting"] else "queued"
        ahead = place["place"] - 1
        about = "" if place.get("about_s") is None else f", about {rough_duration(place['about_s'])}"
        reason = f"; {job['waiting']}" if job["waiting"] else ""
        return f"{ahead} job{'s' * (ahead > 1)} ahead{about}{reason}"

    def wait_for_sweep(self, sweep: Thing, *, timeout_s: float | None = None, show: Show | None = None) -> Answer:
        """Wait until all jobs of a sweep are done. Its `counts` tell how many succeeded; none raises an error.

        The arguments are those of `wait`.

        Example:
            >>> flopwatch.wait_for_sweep(sweep)["counts"]["succeeded"]
            3
        """
        sweep_id = id_of(sweep)
        deadline, later = deadline_of(timeout_s), f"sweeps {sweep_id}"
        with contextlib.ExitStack() as stack:
            display = show or stack.enter_context(progress_bar())
            while True:
                current, waiting = self.patiently(lambda: self._look_at_sweep(sweep_id), deadline, later)
                counts = current["counts"]
                total, done = sum(counts.values()), sum(counts[current] for current in FINISHED)
                state = f"{counts['running']} running, {counts['failed']} failed{_largest_that_fits(current)}"
                display(done, total, state + waiting)
                if done >= total:
                    return current
                if time.monotonic() >= deadline:
                    raise WaitTimeout(f"Sweep {sweep_id} was not done after {timeout_s:g} s; it keeps running.")
                time.sleep(POLL_S)

    def _look_at_sweep(self, sweep_id: int) -> tuple[Answer, str]:
        """Return a sweep, and what it waits for if nothing of it runs."""
        sweep = self.sweep_state(sweep_id)
        if not sweep["counts"]["queued"] or sweep["counts"]["running"]:
            return sweep, ""
        first = self.list_jobs(sweep=sweep_id, state="queued", limit=1)
        reasons = [job["waiting"] for job in first if job["waiting"]]
        return sweep, "".join(f"; waits: {reason}" for reason in reasons)

    def events(self, job: Thing, *, timeout_s: float | None = None) -> Iterator[Event]:
        """Yield a job's events from the first on, until it is done; after a lost connection, resume where it broke.

        Raises:
            WaitTimeout: the job was not done after `timeout_s`. It is noticed at the server's next sign of life.
        """
        return (event for event in self._events(id_of(job), timeout_s) if event is not None)

    def _events(self, job_id: int, timeout_s: float | None) -> Iterator[Event | None]:
        return self.stream(f"/jobs/{job_id}/events", f"Job {job_id}", f"show {job_id}", timeout_s)

    # Looking

    def job(self, job: Thing) -> Job:
        """Return a job as it is now.

        Example:
            >>> flopwatch.job(job["id"])["kind"]
            'benchmark'
        """
        return Job(self.get(f"/jobs/{id_of(job)}"))

    def list_jobs(self, *, limit: int = ALL, since: str | None = None, **filters: Unpack[JobFilter]) -> list[Answer]:
        """Return the jobs that match everything given, newest first, over as many pages as it takes.

        Args:
            limit: at most so many jobs; by default all.
            since: jobs submitted after this: "7d", "12h" or "90min" ago, a date, or a time.
            filters: `state`, `kind`, `labels`, `sweep`, `submitted_by` and `mine`.
        """
        return self.pages("/jobs", limit, since=since, **filter_query(filters))

    def jobs_of_sweep(self, sweep: Thing) -> list[Answer]:
        """Return the job of each point of a sweep, newest first: where a point was run again, its latest job.

        Example:
            >>> len(flopwatch.jobs_of_sweep(sweep))
            3
        """
        latest: dict[str, Answer] = {}
        for job in self.pages("/jobs", ALL, sweep=self.sweep_state(sweep)["id"]):
            latest.setdefault(json.dumps(job["spec"], sort_keys=True), job)
        return list(latest.values())

    def jobs(self, *, limit: int = ALL, since: str | None = None, **filters: Unpack[JobFilter]) -> pd.DataFrame:
        """Return the jobs that match everything given as a frame, newest first, with their ids as its index.

        Times are UTC, `duration_s` is in seconds, and `verdict` is that of the job's worst case. The arguments are
        those of `list_jobs`.

        Example:
            >>> flopwatch.jobs(sweep=sweep)["state"].tolist()
            ['succeeded', 'succeeded', 'succeeded']
        """
        import pandas as pd

        jobs = self.list_jobs(limit=limit, since=since, **filters)
        times = ("created_at", "started_at", "finished_at")
        kept = (
            "id", "kind", "state", "name", "labels", "submitted_by", "priority", "attempt", "sweep_id", "worker_id",
            "waiting", *times,
        )  # fmt: skip
        rows = [
            {
                **{name: job[name] for name in kept},
                "case": case_text(job["summary"]),
                "verdict": (job["validity"] or {}).get("verdict"),
            }
            for job in jobs
        ]
        frame = pd.DataFrame(rows, columns=[*kept, "case", "verdict"])
        for name in times:
            frame[name] = pd.to_datetime(frame[name], utc=True, format="ISO8601")
        frame["duration_s"] = (frame["finished_at"] - frame["started_at"]).dt.total_seconds()
        return frame.set_index("id")

    def places(self, jobs: Iterable[Mapping[str, Any]]) -> dict[int, int]:
        """Return the places in the queue, from 1 on, of those of the jobs that are queued, by their ids.

        Example:
            >>> waiting = flopwatch.rerun(job, device="cuda")
            >>> flopwatch.places([waiting])[waiting["id"]] >= 1
            True
        """
        return {job_id: int(place["place"]) for job_id, place in self._places(jobs).items()}

    def _places(self, jobs: Iterable[Mapping[str, Any]]) -> dict[int, Answer]:
        """Return the place of each of the jobs that is queued, and in how many seconds it starts: `about_s`."""
        queued = [job["id"] for job in jobs if job["state"] == "queued"]
        places: dict[int, Answer] = {}
        for start in range(0, len(queued), PAGE):
            page = self.get("/queue/places", job=queued[start : start + PAGE])
            places |= {job["id"]: job for job in page["data"]}
        return places

    def usage(self, since: str | None = None) -> Answer:
        """Return `data`, the device hours by user, kind and device, and `now`, who has running or queued jobs.

        Args:
            since: "30d" (the default), "12h", a date, or a time.

        Example:
            >>> flopwatch.usage("7d")["data"][0]["kind"]
            'benchmark'
        """
        return dict(self.get("/usage", since=since))

    def sweep_state(self, sweep: Thing) -> Answer:
        """Return a sweep as it is now, with the `counts` of its jobs by state, and its `searches`."""
        return dict(self.get(f"/sweeps/{id_of(sweep)}"))

    def list_sweeps(self, limit: int = ALL) -> list[Answer]:
        """Return the sweeps, newest first."""
        return self.pages("/sweeps", limit)

    def list_workers(self, *, state: str | None = None, limit: int = ALL) -> list[Answer]:
        """Return the workers with their devices, newest first."""
        return self.pages("/workers", limit, state=state)

    def logs(self, job: Thing, *, attempt: int | None = None) -> str:
        """Return what a job printed, in its last attempt or in that one; the middle of a long log is cut.

        Example:
            >>> flopwatch.logs(job)
            'a line of output\\n'
        """
        return self.text(f"/jobs/{id_of(job)}/logs", attempt=attempt)

    # Results

    def measurements(self, job: Thing, *, samples: bool = False, attempt: int | None = None) -> pd.DataFrame:
        """Return all measurements of a job: one row is one metric of one case, as a process measured it.

        Args:
            samples: add a column with the raw samples of each row, as lists.
            attempt: of this attempt; by default of the last that recorded something.

        Returns:
            A frame with the case's coordinates, `phase`, `metric`, `unit`, `outcome`, `validity`, `n`, `mean`, `median`
            and the other statistics as columns. Values that were not measured are NaN; `outcome` and `reason` say why.

        Example:
            >>> found = flopwatch.measurements(job)
            >>> found.loc[found["metric"] == "forward_ms", ["median", "unit"]].values.tolist()
            [[1.25, 'ms']]
        """
        params = {"samples": True if samples else None, "attempt": attempt}
        return _frame(self.all_rows(f"/jobs/{id_of(job)}/measurements", params))

    def table(self, **options: Unpack[TableOptions]) -> pd.DataFrame:
        """Return the measurements of jobs as a table: one row per case, one column per metric.

        `TableOptions` describes the options.

        Returns:
            A frame. Its `attrs["units"]` has the columns' units, `attrs["missing"]` why cells have no numbers.

        Example:
            >>> table = flopwatch.table(sweep=sweep, rows=["context_length"], columns=["forward_ms"])
            >>> float(table["forward_ms"].mean()), table.attrs["units"]["forward_ms"]
            (1.25, 'ms')
        """
        return _frame(self.get("/tables", format="json", **table_query(options)))

    def table_text(
        self,
        format: Format = "markdown",  # noqa: A002  (the query parameter's name)
        *,
        best: bool = False,
        separate: bool = False,
        links: bool = False,
        caption: str | None = None,
        latex_label: str | None = None,
        **options: Unpack[TableOptions],
    ) -> str:
        """Return the same table as `table`, written as "markdown", "latex", "csv", "html" or "json".

        Args:
            best: print the best cell of each column in bold; where the pivot is a choice, such as `implementation`,
                that of each row.
            separate: put what stands after ± into columns of its own: the standard deviation of a mean, the interval of
                a median.
            links: show the job of each row, with its address.
            caption, latex_label: the table's title, and the name by which LaTeX's \\ref finds it.
            options: as for `table`.

        Example:
            >>> "Forward (ms)" in flopwatch.table_text("latex", job=job)
            True
        """
        # The query leaves out options that are not set.
        style = {"best": best or None, "separate": separate or None, "links": links or None}
        title = {"caption": caption, "latex_label": latex_label}
        return self.text("/tables", format=format, **table_query(options), **style, **title)

    def missing(self, job: Thing) -> list[str]:
        """Return why cells of a job's table have no numbers, in sentences."""
        return list(self.get("/tables", job=id_of(job))["missing"])

    def has_measurements(self, job: Thing) -> bool:
        """Return True if a job, or the attempt of it that recorded something last, has measurements."""
        return bool(self.get(f"/jobs/{id_of(job)}/measurements", limit=1)["rows"])

    def units(self, job: Thing) -> list[Answer]:
        """Return the units of a job: title, outcome, environment and validity of each."""
        return list(self.get(f"/jobs/{id_of(job)}/units")["data"])

    def list_tables(self, job: Thing) -> list[Answer]:
        """Return the names, columns and numbers of rows of the tables that a job's units reported."""
        return list(self.get(f"/jobs/{id_of(job)}/tables")["data"])

    def job_table(self, job: Thing, name: str, **options: Unpack[RowOptions]) -> pd.DataFrame:
        """Return a table that a job's units reported, such as the kernels of a profile."""
        query = query_of(options, RowOptions)
        return _frame(self.all_rows(_job_table_path(job, name), query, query.pop("limit", None)))

    def job_table_rows(self, job: Thing, name: str) -> list[Answer]:
        """Return all rows of such a table by their columns, without pandas."""
        return list(self.all_rows(_job_table_path(job, name), {})["rows"])

    def job_table_text(
        self,
        job: Thing,
        name: str,
        format: Format = "markdown",  # noqa: A002  (the query parameter's name)
        **options: Unpack[RowOptions],
    ) -> str:
        """Return a table that a job's units reported as text."""
        return self.text(_job_table_path(job, name), format=format, **query_of(options, RowOptions))

    def sweep_table(self, sweep: Thing, name: str, **options: Unpack[RowOptions]) -> pd.DataFrame:
        """Return the table of this name of all finished jobs of a sweep, such as their profiles' kernels, as one frame,
        each row with its `job` and the job's values of the grid. `attrs["missing"]` has the jobs that lack it."""
        query = query_of(options, RowOptions)
        return _frame(self.all_rows(_sweep_table_path(sweep, name), query, query.pop("limit", None)))

    def sweep_table_text(
        self,
        sweep: Thing,
        name: str,
        format: Format = "markdown",  # noqa: A002  (the query parameter's name)
        **options: Unpack[RowOptions],
    ) -> str:
        """Return the same as text."""
        return self.text(_sweep_table_path(sweep, name), format=format, **query_of(options, RowOptions))

    def list_plots(self, job: Thing | None = None, *, sweep: Thing | None = None) -> list[Answer]:
        """Return the name and the title of every plot that the pages have of a job, or of a sweep."""
        return list(self.get(_plots_path(job, sweep))["data"])

    def plot(
        self,
        job: Thing | None = None,
        name: str | None = None,
        *,
        sweep: Thing | None = None,
        against: Thing | None = None,
        format: Literal["svg", "png", "pdf", "html", "json"] = "svg",  # noqa: A002  (as in `table_text`)
        **options: Unpack[PlotOptions],
    ) -> bytes:
        """Return a plot of the pages as the bytes of a file, for a report: light, with title and caption.

        SVG, PDF and PNG are drawn here, by matplotlib (`pip install 'flopwatch[plots]'`). HTML needs no server.
        JSON is the figure for Plotly.

        Args:
            job: the job whose plot it is, or
            sweep: the sweep.
            name: the plot's name, as `list_plots` has it; None: the first.
            against: draw `ratios` or `distributions` of the job compared with this one.
            options: what is drawn along which axis; `PlotOptions` describes them.

        Raises:
            Refused: there is no such plot, and the error names those that there are; or an option is not for it.
            ClientError: matplotlib is not installed, or there is nothing to draw.

        Example:
            >>> flopwatch.plot(sweep=sweep, format="html", metric="forward_ms")[:15]
            b'<!doctype html>'
        """
        if name is None:
            plots = self.list_plots(job, sweep=sweep)
            if not plots:
                raise ClientError("It has no plots: there is nothing measured yet that could be drawn.")
            name = plots[0]["name"]
        query = query_of(options, PlotOptions)
        if against is None:
            path = f"{_plots_path(job, sweep)}/{quote(name, safe='')}"
        elif job is None:
            raise InvalidArgument("Name the job that is compared with the one of `against`.")
        else:
            path = f"/compare/plots/{quote(name, safe='')}"
            query |= {"baseline": id_of(against), "candidate": id_of(job)}
        if format == "html" or format == "json":
            return self.text(path, format=format, **query).encode()
        from flopwatch.drawing import draw

        return draw(self.get(path, **query), format)

    def compare(
        self,
        baseline: Thing | Sequence[Thing] | str,
        candidate: Thing | Sequence[Thing] | None = None,
        *,
        limit: int | None = None,
        **question: Unpack[Question],
    ) -> pd.DataFrame:
        """Compare finished jobs, case by case; or, given one job of kind `compare`, its two sides.

        Args:
            baseline: a job, several that are samples of the same cases, or a baseline's name.
            candidate: the job that is compared, or several.
            limit: of profiles and memory, the most rows of each table and phase.
            question: `Question` describes what is judged.

        Returns:
            A frame: one row is a metric of a case, or a kernel, operator or class of a profile, on both sides. Its
            `attrs` have what the server says of the whole: `sentence` and `conclusion`, `alternated` (False: the jobs
            ran at different times), `baseline`, `candidate`, `differences`, `environment_differences`, and `notes`.
        """
        return _frame(
            self.get("/compare", **comparison_query(baseline, candidate, question), limit=limit, format="json")
        )

    def compare_text(
        self,
        baseline: Thing | Sequence[Thing] | str,
        candidate: Thing | Sequence[Thing] | None = None,
        *,
        format: Format = "markdown",  # noqa: A002  (the query parameter's name)
        limit: int | None = None,
        **question: Unpack[Question],
    ) -> ComparisonText:
        """Return the same comparison as `compare`, written as "markdown", "latex", "csv", "html" or "json"."""
        params = {**comparison_query(baseline, candidate, question), "limit": limit, "format": format}
        answer = self.send("GET", "/compare", params=params)
        gate, sentence = (answer.headers.get(name, "") for name in ("Flopwatch-Gate", "Flopwatch-Gate-Sentence"))
        return ComparisonText(answer.text, gate, unquote(sentence), answer.headers.get("Flopwatch-Wrong", ""))

    def measure_in_turns(
        self,
        baseline: Thing,
        candidate: Thing,
        *,
        replicates: int = 8,
        timeout_s: float | None = None,
        show: Show | None = None,
    ) -> Answer:
        """Measure the specs of two jobs of one kind again, in turns, and return the job of kind `compare` that did.

        Args:
            replicates: fresh processes of each.
            timeout_s: raise WaitTimeout after about so many seconds; the job goes on.
            show: called with each step of progress, in place of a bar.
        """
        sides = {
            side: alternating.of_side(self.job(job)["spec"])
            for side, job in (("baseline", baseline), ("candidate", candidate))
        }
        name = f"jobs {id_of(baseline)} → {id_of(candidate)}, in turns"
        job = self.submit({"kind": "compare", **sides, "replicates": replicates}, name=name)
        return self.wait(job, timeout_s=timeout_s, show=show)

    # Exports

    def history(
        self,
        case: str | None = None,
        *,
        job: Thing | None = None,
        coordinates: Mapping[str, Any] | None = None,
        metric: str | None = None,
        device: str | None = None,
        limit: int | None = None,
    ) -> pd.DataFrame:
        """Return one metric of one case in every job that measured it, in the order in which the jobs finished.

        Args:
            case: the case's key, or its beginning, as `case_key` of measurements has it.
            job: a job that measured the case; of several cases, `coordinates` choose one.
            coordinates: {"precision": "bf16"}.
            metric: named as its column; by default the main one.
            device: only on this device.
            limit: at most so many points, the newest.

        Returns:
            A row for each job and device: `value` is the median, from `low` to `high` its 95 % interval, and `version`
            the code that ran. `attrs` have the case, metric and unit.

        Example:
            >>> job["id"] in flopwatch.history(job=job, metric="forward_ms")["job"].tolist()
            True
        """
        import pandas as pd

        wanted = [f"{name}={value_text(value)}" for name, value in (coordinates or {}).items()]
        answer = self.get(
            "/history",
            case=case,
            job=None if job is None else id_of(job),
            coordinate=wanted or None,
            metric=metric,
            device=device,
            limit=limit,
        )
        frame = pd.DataFrame.from_records(answer.pop("points"))
        frame["finished_at"] = pd.to_datetime(frame["finished_at"], utc=True)
        frame.attrs |= answer
        return frame

    # Baselines

    def set_baseline(self, name: str, *, job: Thing | None = None, sweep: Thing | None = None) -> Answer:
        """Put a job, or the jobs of a sweep, into a baseline: they replace the cases that they have.

        Returns:
            The baseline. `left_out` has what is not in it: jobs without complete results, and with invalid ones;
            `suspect` the jobs whose results are in it though a verdict doubts them.

        Example:
            >>> flopwatch.set_baseline("main", job=job)["number_of_cases"]
            1
        """
        body = {"job": None if job is None else id_of(job), "sweep": None if sweep is None else id_of(sweep)}
        return self.ask("PUT", _baseline_path(name), body=body)

    def baseline(self, name: str) -> Answer:
        """Return a baseline with its cases.

        Example:
            >>> kept = flopwatch.set_baseline("nightly", job=job)
            >>> flopwatch.baseline("nightly")["cases"][0]["jobs"] == [job["id"]]
            True
        """
        return dict(self.get(_baseline_path(name)))

    def list_baselines(self, limit: int = ALL) -> list[Answer]:
        """Return the baselines by name, without their cases."""
        return self.pages("/baselines", limit)

    def delete_baseline(self, name: str) -> None:
        """Delete a baseline. Its jobs stay, and can be deleted from now on."""
        self.send("DELETE", _baseline_path(name))

    def check(
        self,
        baseline: str,
        jobs: Thing | Sequence[Thing] | None = None,
        *,
        metrics: Sequence[str] | None = None,
        fail_above_percent: float = 5.0,
        expect_equal: float | None = None,
        labels: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        alternate: bool = False,
        show: Show | None = None,
    ) -> Answer:
        """Check jobs against a baseline; without jobs, run its specs again, wait for them, and check those.

        Args:
            metrics: judge these; by default the first of each kind.
            fail_above_percent: "slower" is what is worse by more than this.
            expect_equal: "wrong" is a step that returns numbers (its loss) which differ by more than this, relatively.
            labels: of the jobs that run again, beside `check`, which names the baseline unless it is among them. Labels
                of the baseline's own jobs tell of their run, and are not copied.
            timeout_s: raise WaitTimeout after about so many seconds; the jobs go on.
            alternate: where that is inconclusive or a slowdown is not confirmed, and the jobs run another version of
                your own code than the baseline, measure both versions in turns, and judge that.
            show: called with each step of progress, in place of a bar.

        Returns:
            `outcome`, the worst of all: wrong, slower, invalid, missing, not_confirmed (slower, but not in turns),
            inconclusive (also on another device or in another environment) or passed. `sentence` says it in words,
            `jobs` are those that were checked, and `comparisons` has the server's answer for each kind of job.

        Raises:
            InvalidArgument: `jobs` is empty.

        Example:
            >>> kept = flopwatch.set_baseline("nightly", job=job)
            >>> flopwatch.check("nightly", job)["outcome"]
            'inconclusive'
        """
        if jobs is None:
            mine = {"check": baseline, **(labels or {})}
            former = [self.job(job) for job in self.baseline(baseline)["jobs"]]
            checked = [self._resubmit(job, job["spec"], job["name"], mine) for job in former]
            self._wait_for_all(checked, timeout_s, show)
        else:
            checked = [self.job(job_id) for job_id in ids_of(jobs)]
        judged: Question = {"metrics": metrics, "fail_above_percent": fail_above_percent, "expect_equal": expect_equal}
        answer = self._checked(baseline, checked, judged)
        if not alternate or answer["outcome"] not in UNDECIDED:
            return answer
        return self._alternated(answer, judged, timeout_s, show)

    def _alternated(self, answer: Answer, judged: Question, timeout_s: float | None, show: Show | None) -> Answer:
        """Measure in turns what a check could not tell, and return the check's answer with that; see `check`."""
        comparisons: list[Answer] = []
        for comparison in answer["comparisons"]:
            specs, are_all = self._in_turns(comparison)
            is_undecided = comparison["gate"]["outcome"] in UNDECIDED
            if not is_undecided or not are_all:
                comparisons.append(comparison)  # what is not measured in turns stays as it is
            if is_undecided:
                number = alternating.replicates(comparison, judged["fail_above_percent"] or 0)
                jobs = [self.submit({**spec, "replicates": number}) for spec in specs]
                self._wait_for_all(jobs, timeout_s, show)
                comparisons += [self.get("/compare", **comparison_query(job, None, judged)) for job in jobs]
        return _answer_of(answer["jobs"], comparisons)

    def can_alternate(self, checked: Answer) -> bool:
        """Return True if `check(…, alternate=True)` would measure something in turns that this answer of `check` leaves
        undecided: the jobs run another version of your own code than the baseline, and are otherwise the same."""
        undecided = (each for each in checked["comparisons"] if each["gate"]["outcome"] in UNDECIDED)
        return any(self._in_turns(comparison)[0] for comparison in undecided if not comparison["alternated"])

    def _in_turns(self, comparison: Answer) -> tuple[list[Answer], bool]:
        """Return the specs that measure a comparison's jobs in turns; see `alternating.comparisons`."""
        sides = ([self.job(job) for job in comparison[side]["jobs"]] for side in ("baseline", "candidate"))
        return alternating.comparisons(*sides)

    def _checked(self, baseline: str, jobs: Sequence[Answer], judged: Question) -> Answer:
        """Compare finished jobs with a baseline, kind by kind; see `check`."""
        if not jobs:
            raise InvalidArgument(
                f"There is no job to check: name some, or leave them out to run those of {baseline} again."
            )
        by_kind: dict[str, list[int]] = {}
        for job in jobs:
            by_kind.setdefault(job["kind"], []).append(job["id"])
        comparisons = [self.get("/compare", **comparison_query(baseline, ids, judged)) for ids in by_kind.values()]
        for kind, comparison in zip(by_kind, comparisons, strict=True):
            ended = [job for job in jobs if job["kind"] == kind and job["state"] != "succeeded"]
            if ended and comparison["gate"]["outcome"] == "missing":
                states = ", ".join(f"job {job['id']}: {job['state']}" for job in ended)
                comparison["gate"]["sentence"] += f" ({states})"
        return _answer_of([job["id"] for job in jobs], comparisons)

    def _resubmit(self, former: Answer, spec: Mapping[str, Any], name: str | None, labels: Mapping[str, str]) -> Job:
        return self.submit(
            spec,
            name=name,
            labels=labels,
            priority=former["priority"],
            timeout_s="none" if former["timeout_s"] is None else former["timeout_s"],
            max_attempts=former["max_attempts"],
        )

    def _wait_for_all(self, jobs: Sequence[Answer], timeout_s: float | None, show: Show | None) -> None:
        deadline = deadline_of(timeout_s)
        with contextlib.ExitStack() as stack:
            display = show or stack.enter_context(progress_bar())
            for number, job in enumerate(jobs, 1):
                which = f"job {job['id']}" + (f", {number} of {len(jobs)}" if len(jobs) > 1 else "")
                left_s = None if timeout_s is None else max(0.0, deadline - time.monotonic())

                def tell(done: int, total: int, message: str, which: str = which) -> None:
                    display(done, total, f"{which}: {message}")

                self.wait(job, timeout_s=left_s, show=tell, check=False)

    def list_files(self, job: Thing) -> list[Answer]:
        """Return a job's files: name, kind, size in bytes, SHA-256."""
        return list(self.get(f"/jobs/{id_of(job)}/artifacts")["data"])

    def download(self, job: Thing, name: str | None = None, *, to: str | os.PathLike[str] | None = None) -> list[Path]:
        """Download a job's files, or one of them, each checked against its SHA-256. No file is ever overwritten.

        Args:
            name: the one file to download.
            to: the folder to write into; by default `job-17` for job 17.

        Returns:
            The paths of the files. One that is there already, with the same content, stays as it is.

        Raises:
            DownloadFailed: a file of that name with other content is there, which is noticed before anything is
                written; or one came damaged, or cannot be written.
            InvalidArgument: the folder cannot be made.

        Example:
            >>> [path.name for path in flopwatch.download(job, to=folder)]
            ['trace.json.gz']
        """
        job_id, files = id_of(job), self.list_files(job)
        chosen = [file for file in files if name in (None, file["name"])]
        if name is not None and not chosen:
            names = ", ".join(file["name"] for file in files) or "none"
            raise ClientError(f"Job {job_id} has no file {name!r}; it has: {names}.")
        folder = Path(f"job-{job_id}" if to is None else to)
        targets = [(file, folder / Path(file["name"]).name) for file in chosen]
        wanted = [(file, target) for file, target in targets if not _is_there(target, file["sha256"])]
        try:
            if wanted:
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidArgument(f"{folder}: {error.strerror}: choose another folder.") from error
        for file, target in wanted:
            self.download_file(file, target)
        return [target for _, target in targets]

    # Changing

    def describe(self, job: Thing, **changes: Unpack[Description]) -> Answer:
        """Change a job's `name`, `labels` and `note`, in any state. What is left out stays, and None removes.

        Example:
            >>> described = flopwatch.describe(job, labels={"tried": "fused loss"}, note="No gain.")
            >>> described["note"], described["labels"]["tried"]
            ('No gain.', 'fused loss')
        """
        return self.ask("PATCH", f"/jobs/{id_of(job)}", body=dict(changes))

    def cancel(self, job: Thing) -> Answer:
        """Cancel a job: at once if it is queued, else as soon as its processes have ended.

        Example:
            >>> flopwatch.cancel(flopwatch.rerun(job, device="cuda"))["state"]
            'cancelled'
        """
        return self.ask("POST", f"/jobs/{id_of(job)}/cancel")

    def cancel_sweep(self, sweep: Thing) -> Answer:
        """Cancel the jobs of a sweep that are not finished; the others keep their results."""
        return self.ask("POST", f"/sweeps/{id_of(sweep)}/cancel")

    def resume_sweep(self, sweep: Thing) -> Answer:
        """Run again what has no result: a new job for each point whose latest one failed or was cancelled."""
        return self.ask("POST", f"/sweeps/{id_of(sweep)}/resume")

    def retry(self, job: Thing) -> Answer:
        """Queue a failed or cancelled job for its next attempt: the same job, the same spec."""
        return self.ask("POST", f"/jobs/{id_of(job)}/retry")

    def delete(self, job: Thing) -> None:
        """Delete a finished job with its results and files."""
        self.send("DELETE", f"/jobs/{id_of(job)}")

    def cancel_jobs(self, **filters: Unpack[JobFilter]) -> Answer:
        """Cancel all queued and running jobs that match every filter; those of `list_jobs`, at least one. Without the
        scope `admin` only one's own.

        Returns:
            `cancelled`: how many were queued; `requested`: how many run, and end soon.
        """
        return self.ask("POST", "/jobs/cancel", params=filter_query(filters), timeout_s=BULK_TIMEOUT_S)

    def delete_jobs(self, **filters: Unpack[JobFilter]) -> Answer:
        """Delete all finished jobs that match every filter; those of `list_jobs`, at least one. Without the scope
        `admin` only one's own.

        Returns:
            How many were `deleted`, and how many stay, since they are `unfinished` or `in_baselines`.
        """
        return self.ask("DELETE", "/jobs", params=filter_query(filters), timeout_s=BULK_TIMEOUT_S)

    def paused_kinds(self) -> list[str] | str:
        """Return the kinds of which no job starts: a list, or "all"."""
        paused: list[str] | str = self.get("/queue/paused")["kinds"]
        return paused

    def set_paused_kinds(self, kinds: Sequence[str] | str) -> Answer:
        """Let no job of these kinds start, and jobs of all others; "all": no job at all. Jobs that run go on."""
        body = {"kinds": kinds if isinstance(kinds, str) else list(kinds)}
        return self.ask("PUT", "/queue/paused", body=body)

    def _with_preset(self, spec: Mapping[str, Any], preset: str | None) -> Answer:
        return dict(spec) if preset is None else _merged(self.preset(str(spec.get("kind")), preset), spec)


def _left(seconds: Sequence[float], cells: int) -> str:
    """Return how long the other cells will take, if they take as long as those before."""
    left_s = cells * sum(seconds) / len(seconds)
    return f"; about {duration(left_s)} left" if left_s >= 1 else ""


def _largest_that_fits(sweep: Mapping[str, Any]) -> str:
    searches = sweep.get("searches") or []
    if len(searches) != 1 or searches[0]["largest"] is None:
        return ""
    return f", {searches[0]['axis']} {searches[0]['largest']} fits"


def _same_code(old: str, new: str, named: str | None, code: str | os.PathLike[str] | None) -> str:
    where = str(named).rpartition(":")[0] if code is None else f"the folder {code}"
    return (
        f"{old} and {new} have the same code in {where}, so there is nothing to compare: save your change there, or "
        "name other versions. What a file imports goes along with --code FOLDER, and of a folder what git tracks. "
        "Paths are relative to each version's folder."
    )


def _job_table_path(job: Thing, name: str) -> str:
    return f"/jobs/{id_of(job)}/tables/{quote(name, safe='')}"


def _sweep_table_path(sweep: Thing, name: str) -> str:
    return f"/sweeps/{id_of(sweep)}/tables/{quote(name, safe='')}"


def _plots_path(job: Thing | None, sweep: Thing | None) -> str:
    if (job is None) == (sweep is None):
        raise InvalidArgument("Name a job or a sweep, whose plot it is, and not both.")
    return f"/jobs/{id_of(job)}/plots" if job is not None else f"/sweeps/{id_of(sweep or 0)}/plots"


def _baseline_path(name: str) -> str:
    return f"/baselines/{quote(name, safe='')}"


def _merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> Answer:
    merged = copy.deepcopy(dict(under))
    for name, value in over.items():
        inside = merged.get(name)
        both = isinstance(inside, Mapping) and isinstance(value, Mapping)
        merged[name] = _merged(inside, value) if both else value  # type: ignore[arg-type]
    return merged


def _set(spec: Answer, path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for parent in parents:
        inside = spec.setdefault(parent, {})
        if not isinstance(inside, dict):
            raise InvalidArgument(f"{path}: {parent} is no object, so nothing can be set inside it.")
        spec = inside
    spec[last] = value


def _frame(answer: Mapping[str, Any]) -> pd.DataFrame:
    """Make a frame of columns with types, and rows keyed by column; what is null is missing in every type. Its `attrs`
    have the columns' units, and what else the server says of the whole table."""
    import pandas as pd

    columns = answer["columns"]
    frame = pd.DataFrame.from_records(answer["rows"], columns=[column["name"] for column in columns])
    types: dict[str, Any] = {"number": "float64", "integer": "Int64", "boolean": "boolean"}
    frame = frame.astype({column["name"]: types[column["type"]] for column in columns if column["type"] in types})
    frame.attrs["units"] = {column["name"]: column["unit"] for column in columns if column["unit"] is not None}
    frame.attrs |= {name: value for name, value in answer.items() if name not in ("columns", "rows", "next")}
    return frame


def _is_there(target: Path, sha256: str) -> bool:
    """Return True if the file is there. Raises DownloadFailed for another one, InvalidArgument if none can be."""
    try:
        with target.open("rb") as opened:
            same = hashlib.file_digest(opened, "sha256").hexdigest() == sha256
    except FileNotFoundError:
        return False
    except OSError as error:
        raise InvalidArgument(f"{target}: {error.strerror}: choose another folder.") from error
    if not same:
        raise DownloadFailed(f"{target} exists with other content, and is not overwritten: choose another folder.")
    return True


def _answer_of(jobs: list[int], comparisons: list[Answer]) -> Answer:
    """Return the answer of a check, which is that of its worst comparison; what cannot be compared is inconclusive."""
    for comparison in comparisons:
        if comparison["gate"]["outcome"] == "not_comparable":
            comparison["gate"] |= {
                "outcome": "inconclusive",
                "sentence": f"inconclusive: {comparison['gate']['sentence']}",
            }
    worst = min(comparisons, key=lambda comparison: CHECKED.index(comparison["gate"]["outcome"]))["gate"]
    return {"outcome": worst["outcome"], "sentence": worst["sentence"], "jobs": jobs, "comparisons": comparisons}
