"""docs/failures.md has every code of an error, and no other."""

import re
from pathlib import Path
from typing import get_args

from app import errors
from app.api.problems import HTTP_CODES
from app.errors import JOB_PROBLEM_TITLES, FlopwatchError
from workers.agent.fitness import UnfitCode

PAGE = (Path(__file__).parents[2] / "docs" / "failures.md").read_text()


def codes(part: str) -> list[str]:
    """Codes in the first column of a part's table, each with a meaning or a cure."""
    found: list[str] = []
    for line in part.splitlines():
        if re.match(r"\| `", line):
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            assert all(cells), line
            found += re.findall(r"`(\w+)`", cells[0])
    return found


def families(kind: type[FlopwatchError]) -> set[str]:
    return {kind.code}.union(*(families(one) for one in kind.__subclasses__() if one.__module__ == errors.__name__))


def drawn(kind: type[FlopwatchError], depth: int = 0) -> list[tuple[int, str, str]]:
    below = (one for one in kind.__subclasses__() if one.__module__ == errors.__name__)
    return sum((drawn(one, depth + 1) for one in below), [(depth, kind.__name__, str(kind.status))])


def test_the_tree_is_drawn_first() -> None:
    lines = re.findall(r"^    (\W*)(\w+)(?: +(\d+))?.*$", str(errors.__doc__), re.MULTILINE)
    tree = [(len(before) // 4, name, status or "500") for before, name, status in lines]
    assert tree == drawn(FlopwatchError)


def test_every_code_has_a_row() -> None:
    of_jobs, of_workers, of_requests = re.split("## Of (?:workers|requests)", PAGE)
    assert sorted(codes(of_workers)) == sorted(get_args(UnfitCode))
    assert sorted(codes(of_jobs)) == sorted(JOB_PROBLEM_TITLES)
    assert sorted(codes(of_requests)) == sorted(families(FlopwatchError) | {*HTTP_CODES.values(), "http_error"})
