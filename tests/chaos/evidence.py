"""The evidence of a chaos run: the server's answers to clients, the jobs' own records, the contents of the store."""

import hashlib
import json
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Mark = Mapping[str, Any]


@dataclass
class Ledger:
    """The server's promises to the clients. Several threads write, through the methods."""

    accepted: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    """Job ids answered with 201, by the job's name. Every name is submitted once, if maybe by many requests."""
    unanswered: set[str] = field(default_factory=set)
    """Names of jobs whose submission was never answered: they may be there, once."""
    refused: set[str] = field(default_factory=set)
    """Names of jobs that were answered 409, since another one had their unique key."""
    retried: set[int] = field(default_factory=set)
    """Ids of jobs that were run again, or may have been, after they had failed or been cancelled."""
    sweeps: dict[int, int] = field(default_factory=dict)
    """Numbers of jobs of the sweeps answered with 201, by sweep id."""
    finals: dict[tuple[Any, ...], dict[str, Any]] = field(default_factory=dict)
    """Jobs as they were first seen in a final state, by id; if they were retried, by that end of theirs."""
    deleted: set[int] = field(default_factory=set)
    """Ids of jobs that are gone, or may be: a DELETE was answered 204, or not at all."""
    troubles: list[str] = field(default_factory=list)
    """Forbidden answers, and other faults that were seen during the run."""
    answers: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """Numbers of answers by status; 0 stands for requests without an answer."""
    acts: Counter[str] = field(default_factory=Counter)
    """Number of successes of each action of clients other than a submission."""
    guard: threading.Lock = field(default_factory=threading.Lock)

    def answered(self, status: int) -> None:
        with self.guard:
            self.answers[status] += 1

    def accept(self, name: str, job_id: int) -> None:
        """A submission was answered 201."""
        with self.guard:
            self.accepted[name].add(job_id)

    def trouble(self, what: str) -> None:
        """Something was seen that must not be."""
        with self.guard:
            self.troubles.append(what)

    def saw_final(self, job: dict[str, Any]) -> None:
        """A finished job was seen: it must look the same for ever, unless it is retried."""
        with self.guard:
            end = (job["attempt"], job["finished_at"]) if job["id"] in self.retried else ()
            first = self.finals.setdefault((job["id"], *end), job)
            if first != job:
                changed = {name: (first.get(name), job[name]) for name in job if first.get(name) != job[name]}
                self.troubles.append(f"job {job['id']} changed after its end: {changed}")

    def saw_paused(self, before: set[tuple[int, int]], after: set[tuple[int, int]]) -> None:
        """These attempts, of jobs, ran at two moments while their kind was paused."""
        for job_id, attempt in sorted(after - before):
            self.trouble(f"attempt {attempt} of job {job_id} began while its kind was paused")


@dataclass(frozen=True)
class StoredFile:
    """A file below artifacts/, named by a content's SHA-256."""

    sha256: str
    """Of what is in it."""
    size: int


@dataclass(frozen=True)
class Evidence:
    """The state when everything has ended."""

    ask: Callable[[str], list[Any]]
    """Answers SQL with rows."""
    ledger: Ledger
    marks: Sequence[Mark]
    files: Mapping[str, StoredFile]
    """By the name's SHA-256."""
    leftovers: Sequence[str]
    """Files in folders that must be empty."""


def read_marks(path: Path) -> list[Mark]:
    """Return the records that jobs wrote."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def stored_files(data_dir: Path) -> dict[str, StoredFile]:
    """Return the contents of the store; each file is read whole."""
    found = {}
    for path in (data_dir / "artifacts").glob("[0-9a-f][0-9a-f]/*"):
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        found[path.parent.name + path.name] = StoredFile(content, path.stat().st_size)
    return found
