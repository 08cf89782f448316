"""Joins the cases of release 0.1.0, in which the hash of uploaded code was a coordinate, to those of later releases, in
which it is a version.

A former case keeps its key. It is of the same work as a later case, or another former one, if they differ in the code's
hash, the name of its file, which 0.1.0 did not record, and coordinates that were added at their default only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from app.results.cases import CaseOfJob
from app.results.versions import VERSION
from app.specs import KINDS, Scalar
from app.specs._code import UNNAMED

HASH, FILE, FUNCTION = ".sha256", ".file", ".function"
OF_THE_PLACE = ("device", "side", VERSION)
"""Columns beside a case's coordinates."""
CODE = re.compile(r"(?<=@)\S+")
"""The part of labels behind a function's name: eight digits of the hash then, the file's name now."""

Work = frozenset[tuple[str, str]]


def has_code(coordinates: Mapping[str, Scalar]) -> bool:
    """Return True for a case of uploaded code."""
    return any(name.endswith(FUNCTION) and value is not None for name, value in coordinates.items())


def is_former(coordinates: Mapping[str, Scalar]) -> bool:
    """Return True for a case of uploaded code as release 0.1.0 wrote it."""
    return any(name.endswith(HASH) and value is not None for name, value in coordinates.items())


def work_of(kind: str, coordinates: Mapping[str, Scalar]) -> Work:
    """Return the measured work of a case, without the version of its code and the name of the file."""
    added = KINDS[kind].added if kind in KINDS else {}
    files = [f"@{value}" for name, value in coordinates.items() if name.endswith(FILE) and value is not None]
    kept = {
        name: _without_version(value, files) if isinstance(value, str) else value
        for name, value in coordinates.items()
        if value is not None and not name.endswith((HASH, FILE)) and name not in OF_THE_PLACE
    }
    texts = ((name, json.dumps(value)) for name, value in kept.items())
    return frozenset((name, text) for name, text in texts if name not in added or text != json.dumps(added[name]))


def _without_version(text: str, files: Sequence[str]) -> str:
    for file in files:  # its name may have spaces
        text = text.replace(file, "@")
    return CODE.sub("", text)


def joined(cases: Sequence[CaseOfJob]) -> list[CaseOfJob]:
    """Return cases that are shown together, with former ones in the coordinates of the later case of the same work, or
    without a file's name if there is none, or several."""
    if not any(VERSION in case.coordinates and is_former(case.coordinates) for case in cases):
        return list(cases)
    later: dict[Work, dict[str, Mapping[str, Scalar]]] = {}
    for case in cases:
        if VERSION in case.coordinates and not is_former(case.coordinates):
            later.setdefault(_work(case), {})[case.key or ""] = case.coordinates
    return [replace(case, coordinates=_renamed(case, later.get(_work(case), {}))) for case in cases]


def _renamed(case: CaseOfJob, later: Mapping[str, Mapping[str, Scalar]]) -> Mapping[str, Scalar]:
    if not is_former(case.coordinates):
        return case.coordinates
    if len(later) == 1:
        (its,) = later.values()
        coordinates = {name: value for name, value in its.items() if name not in OF_THE_PLACE}
        return coordinates | {name: case.coordinates[name] for name in OF_THE_PLACE if name in case.coordinates}
    unnamed = {
        name: CODE.sub(UNNAMED, value) if isinstance(value, str) else value
        for name, value in case.coordinates.items()
        if not name.endswith(HASH)
    }
    return unnamed | {name.removesuffix(HASH) + FILE: None for name in case.coordinates if name.endswith(HASH)}


def matching_keys(kept: Iterable[CaseOfJob], cases: Iterable[CaseOfJob]) -> dict[str, str]:
    """Return the keys of `cases` by the keys that the same work has in `kept`, where one of both is a former case."""
    by_work = {_work(case): case for case in cases if case.key is not None and VERSION in case.coordinates}
    keys = {}
    for case in kept:
        other = by_work.get(_work(case)) if VERSION in case.coordinates else None
        if case.key is None or other is None or other.key is None or other.key == case.key:
            continue
        if is_former(case.coordinates) or is_former(other.coordinates):
            keys[case.key] = other.key
    return keys


def _work(case: CaseOfJob) -> Work:
    return work_of(case.tabled_as[-1], case.coordinates)
