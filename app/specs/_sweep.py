"""Sweeps: one base spec and a grid of values, expanded to one spec per combination.

A grid maps dotted paths below the spec ("context_length", "model.size") to lists of values. Combinations run in the
grid's order, the last path fastest. `exclude` lists partial points: a combination that has all values of one of them is
left out. The specs are not validated here; `Point.origin` finds the place in the sweep that a wrong field came from.
"""

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.errors import FieldError, InvalidRequest
from app.specs._base import Location, with_paths

MAX_JOBS = 10_000
MAX_BYTES = 64 << 20
"""Largest size in bytes of a sweep's bases together, as JSON: every job has one."""
MAX_NAME = 200
MAX_PROBLEMS = 50


@dataclass(frozen=True)
class Point:
    """One combination: the spec, and the index of its value on each path."""

    spec: dict[str, Any]
    choice: dict[str, int]

    def origin(self, location: Location) -> Location:
        """Return where the sweep's body sets the spec's field at `location`."""
        for path, index in self.choice.items():
            parts = tuple(path.split("."))
            if location[: len(parts)] == parts:
                return ("grid", path, index, *location[len(parts) :])
        return ("base", *location)


def expand(
    base: Mapping[str, Any], grid: Mapping[str, Sequence[Any]], exclude: Sequence[Mapping[str, Any]]
) -> list[Point]:
    """Return every combination that is not excluded. Raises InvalidRequest, with pointers, for an invalid grid."""
    positions = {path: {_canonical(one): at for at, one in enumerate(values)} for path, values in grid.items()}
    # The size is counted first: a few kilobytes may ask for more combinations than fit into memory.
    for problems in (_too_many(base, grid), _problems(base, grid, positions, exclude)):
        errors = tuple(itertools.islice(problems, MAX_PROBLEMS))
        if errors:
            raise InvalidRequest(f"{errors[0].pointer}: {errors[0].detail}", errors=errors)
    points = [
        Point(with_paths(base, {path: grid[path][index] for path, index in choice.items()}), choice)
        for choice in _choices(grid, positions, exclude)
    ]
    if not points:
        field = FieldError("/exclude", "Every combination is excluded: no job is left")
        raise InvalidRequest(f"{field.pointer}: {field.detail}", errors=(field,))
    return points


def member_name(name: str | None, grid: Mapping[str, Sequence[Any]], choice: Mapping[str, int]) -> str | None:
    """Return the name of a sweep's job: the sweep's name, and the coordinates that distinguish the job.

    A path of `choice` that is not in the grid is the axis of a search, with its value.
    """
    differing = {path: index for path, index in choice.items() if path not in grid or len(grid[path]) > 1}
    coordinates = ", ".join(
        f"{path}={_short(grid[path][index] if path in grid else index)}" for path, index in differing.items()
    )
    whole = ": ".join(filter(None, (name, coordinates)))
    return f"{whole[: MAX_NAME - 1]}…" if len(whole) > MAX_NAME else whole or None


def _short(value: Any) -> str:
    return value if isinstance(value, str) and value.isprintable() else json.dumps(value)


def _choices(
    grid: Mapping[str, Sequence[Any]], positions: Mapping[str, Mapping[str, int]], exclude: Sequence[Mapping[str, Any]]
) -> Iterator[dict[str, int]]:
    """Yield each combination that is not excluded, as the position of its value on each path."""
    partial = [{(path, positions[path][_canonical(value)]) for path, value in point.items()} for point in exclude]
    for indices in itertools.product(*(range(len(values)) for values in grid.values())):
        choice = dict(zip(grid, indices, strict=True))
        if not any(point <= choice.items() for point in partial):
            yield choice


def _too_many(base: Mapping[str, Any], grid: Mapping[str, Sequence[Any]]) -> Iterator[FieldError]:
    count = math.prod(len(values) for values in grid.values())
    if count > MAX_JOBS:
        yield FieldError("/grid", f"{count} combinations; a sweep has at most {MAX_JOBS}: split it")
        return
    size = len(_canonical(base))
    if count * size > MAX_BYTES:
        detail = f"{count} jobs with {size} bytes of base each; a sweep has at most {MAX_BYTES} in all: split it"
        yield FieldError("/base", detail)


def _problems(
    base: Mapping[str, Any],
    grid: Mapping[str, Sequence[Any]],
    positions: Mapping[str, Mapping[str, int]],
    exclude: Sequence[Mapping[str, Any]],
) -> Iterator[FieldError]:
    for path, values in grid.items():
        yield from _path_problems(base, grid, path)
        seen = set()
        for index, value in enumerate(values):
            if (text := _canonical(value)) in seen:
                yield FieldError(f"/grid/{path}/{index}", f"{text} is in the list twice")
            seen.add(text)
    for index, partial in enumerate(exclude):
        if not partial:
            yield FieldError(f"/exclude/{index}", "An empty point would exclude everything")
        for path, value in partial.items():
            at = f"/exclude/{index}/{path.replace('~', '~0').replace('/', '~1')}"
            if path not in grid:
                yield FieldError(at, f"Not a path of the grid; its paths: {', '.join(grid)}")
            elif (text := _canonical(value)) not in positions[path]:
                yield FieldError(at, f"{text} is not in the grid's list, so this excludes nothing")


def _path_problems(base: Mapping[str, Any], grid: Mapping[str, Any], path: str) -> Iterator[FieldError]:
    if path == "kind":
        yield FieldError("/grid/kind", "A sweep is of one kind: set it in base")
    parents = path.split(".")[:-1]
    inside: Any = base
    for depth, parent in enumerate(parents, start=1):
        above = ".".join(parents[:depth])
        if above in grid:
            yield FieldError(f"/grid/{path}", f"The grid also sets {above}, which this is a part of: sweep one of them")
        inside = inside.get(parent, {})
        if not isinstance(inside, Mapping):
            yield FieldError("/base/" + above.replace(".", "/"), f"Must be an object, since the grid sets {path}")
            return


def _canonical(value: Any) -> str:
    # In Python 1, 1.0 and True are equal; in JSON they are not.
    return json.dumps(value, sort_keys=True)
