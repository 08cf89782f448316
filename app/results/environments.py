"""The differences between the environments, and between the specs, of the two sides of a comparison; and which code a
result is of: the hash of an uploaded file, or else the commit of the worker's checkout."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.specs import Scalar
from app.specs._base import flat
from app.specs._training import OF_OUR_STEP
from app.store.database.engine import Snapshot
from app.store.reading import measurements
from app.store.reading.measurements import FinishedJob
from flopwatch.text.values import value_text

DECISIVE = {
    "device.type": "device",
    "device.name": "device",
    "device.capability": "instructions",
    "device.driver": "driver",
    "software.torch": "torch",
    "software.triton": "triton",
    "software.cuda": "CUDA",
    "software.cudnn": "cuDNN",
    "software.nccl": "NCCL",
    "threads.intra_op": "threads",
}
"""Facts that two results must share to be compared, and how a sentence names them. The others are listed only."""
HOST = "host.hostname"
CHANGING = ("device.at_start.", "neighbours")
"""Prefixes of the facts that differ from process to process."""
OF_THE_DEVICE = ("device.", "software.cuda", "software.cudnn", "software.nccl", "threads.")


@dataclass(frozen=True)
class Difference:
    """A fact in which the sides differ."""

    name: str
    baseline: Scalar
    candidate: Scalar


@dataclass(frozen=True)
class EnvironmentDifference(Difference):
    decisive: bool
    """True if results with this difference cannot be compared."""

    def in_words(self) -> str:
        """Return the difference as part of a sentence: "torch 2.11 against 2.13"."""
        return f"{DECISIVE.get(self.name, self.name)} {_against(self.baseline, self.candidate)}"


@dataclass(frozen=True)
class Setup:
    """The environments and specs of the jobs of one side."""

    environments: Sequence[Mapping[str, Scalar]]
    """Flat facts, one mapping for each job that has recorded them."""
    specs: Sequence[Mapping[str, Scalar]]
    """Flat fields, one mapping for each job."""

    @classmethod
    def read(cls, snapshot: Snapshot, jobs: Sequence[FinishedJob], side: str | None = None) -> Setup:
        """Read those of these jobs; `side` selects one side of a comparison."""
        recorded = measurements.environments(snapshot, jobs, side)
        return cls(list(map(_flat, recorded)), [_spec(job, side) for job in jobs])


def _spec(job: FinishedJob, side: str | None) -> dict[str, Scalar]:
    spec = job.spec.get(side, {}) if side is not None and job.has_sides else job.spec
    idle = OF_OUR_STEP if spec.get("step_code") else frozenset[str]()
    return _flat({name: value for name, value in spec.items() if name != "kind" and name not in idle})


def _flat(nested: Mapping[str, Any]) -> dict[str, Scalar]:
    return {
        name: json.dumps(value) if isinstance(value, list | dict) else value for name, value in flat(nested).items()
    }


def environment_differences(
    one: Setup, other: Setup, *, devices_may_differ: bool = True
) -> list[EnvironmentDifference]:
    """Return the facts of the environments in which the sides differ, decisive ones first.

    `devices_may_differ`: allow specs that themselves ask for different devices; a check against a baseline does not.
    """
    if not one.environments or not other.environments:
        return []
    chosen = devices_may_differ and _devices_are_chosen(one, other)
    differences = [
        EnvironmentDifference(
            *difference, decisive=difference[0] in DECISIVE and not (chosen and difference[0].startswith(OF_THE_DEVICE))
        )
        for difference in _differences(one.environments, other.environments)
        if not difference[0].startswith(CHANGING)
    ]
    return sorted(differences, key=lambda difference: not difference.decisive)


def spec_differences(one: Setup, other: Setup) -> list[Difference]:
    """Return the fields in which the specs differ, including those that do not change the work: seed, measure_steps,
    device. Fields of our model are None where a step of one's own takes its place."""
    return [Difference(*difference) for difference in _differences(one.specs, other.specs)]


def obstacles(
    differences: Iterable[EnvironmentDifference], elsewhere: Iterable[tuple[Scalar, Scalar]] = ()
) -> list[str]:
    """Return the reasons why results cannot be compared, such as "torch 2.11 against 2.13"; none if they can be.

    `elsewhere`: pairs of different devices of matched cases, where the environments do not show the difference.
    """
    decisive = [difference for difference in differences if difference.decisive]
    texts = [difference.in_words() for difference in decisive if difference.name != "device.type"]
    if not any(difference.name == "device.name" for difference in decisive):
        texts += [f"device {_against(device, other)}" for device, other in elsewhere if other is not None]
    return list(dict.fromkeys(texts))


def hosts(differences: Iterable[EnvironmentDifference]) -> str | None:
    """Return the hosts of both sides, "a against b"; None if they are the same, or unknown."""
    return next((_against(its.baseline, its.candidate) for its in differences if its.name == HOST), None)


def _devices_are_chosen(one: Setup, other: Setup) -> bool:
    """Return True if the specs themselves ask for different devices: that comparison is meant."""
    devices = [{spec.get("device") for spec in side.specs} for side in (one, other)]
    return not devices[0] & devices[1] and "auto" not in devices[0] | devices[1]


def _differences(
    ones: Sequence[Mapping[str, Scalar]], others: Sequence[Mapping[str, Scalar]]
) -> list[tuple[str, Scalar, Scalar]]:
    names = dict.fromkeys(name for facts in (*ones, *others) for name in facts)
    differences = []
    for name in names:
        values = [list(dict.fromkeys(facts.get(name) for facts in side)) for side in (ones, others)]
        if {repr(value) for value in values[0]} != {repr(value) for value in values[1]}:
            differences.append((name, _joined(values[0]), _joined(values[1])))
    return differences


def _joined(values: Sequence[Scalar]) -> Scalar:
    return values[0] if len(values) == 1 else " / ".join(map(value_text, values))


def _against(*sides: Scalar) -> str:
    return " against ".join(map(value_text, sides))


COMMIT_CHARACTERS = 40
VERSION = "version"
"""Column of tables: the version of the uploaded code of a case."""
SHORT = 8
"""Characters of a short version."""
DIRTY = "-dirty"
"""The end of the version of a checkout with changes that are not committed."""


def uploaded_version(spec: Mapping[str, Any], coordinates: Mapping[str, Scalar]) -> str | None:
    """Return the version of the uploaded code that a case runs, by its job's or side's spec and its coordinates, since
    a job may measure cases with its code beside others without; "+" stands between the hashes of several files."""
    return "+".join(str(code["sha256"]) for code in _codes(spec, coordinates)) or None


def revision_of(spec: Mapping[str, Any], coordinates: Mapping[str, Scalar]) -> Mapping[str, Any]:
    """Return where the uploaded code of a case comes from, as its spec has it; of several files, what the first one
    with a revision has. Empty if that is unknown."""
    return next((code["revision"] for code in _codes(spec, coordinates) if code.get("revision")), {})


def revision_text(revision: Mapping[str, Any]) -> str | None:
    """Write a revision in short: "main, 1a2b3c4d-dirty, 1 file changed, 3 insertions(+)"; "." says no more than its
    commit does."""
    commit = revision.get("commit")
    short = commit and short_version(commit + (DIRTY if revision.get("dirty") else ""))
    return (
        ", ".join(part for part in (revision.get("label"), short, revision.get("diff")) if part not in (None, "."))
        or None
    )


def _codes(spec: Mapping[str, Any], coordinates: Mapping[str, Scalar]) -> Iterator[Mapping[str, Any]]:
    for field, code in spec.items():
        if isinstance(code, Mapping) and "sha256" in code and coordinates.get(f"{field}.function") is not None:
            yield code


def version_of(
    spec: Mapping[str, Any], environment: Mapping[str, Any] | None, coordinates: Mapping[str, Scalar]
) -> str | None:
    """Return the version of a measurement of a case in an environment; None if it is unknown."""
    uploaded = uploaded_version(spec, coordinates)
    if uploaded is not None:
        return uploaded
    software = (environment or {}).get("software") or {}
    commit = software.get("git_commit")
    return None if not commit else f"{commit}{DIRTY if software.get('git_dirty') else ''}"


def commit_of(version: str | None) -> str | None:
    """Return the commit that a version is, or that its changes are based on; None if it is no commit."""
    commit = (version or "").removesuffix(DIRTY)
    return commit if len(commit) == COMMIT_CHARACTERS else None


def short_version(version: str | None) -> str | None:
    """Write a version in short, as `git log --oneline` does: the first characters of each hash."""
    if version is None:
        return None
    parts = (part.removesuffix(DIRTY)[:SHORT] + (DIRTY if part.endswith(DIRTY) else "") for part in version.split("+"))
    return "+".join(parts)
