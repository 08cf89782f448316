"""Habits that keep the sources readable and portable."""

import ast
import re
import tomllib
from pathlib import Path

FUNCTION_LINES = 60
LONGER: dict[str, str] = {
    "migrations/versions/0010_create_every_table.py::upgrade": "declares every table; a migration never changes",
    "kernels/attention/hopper/backward.py::consume_narrow_unit": "one order of instructions, which was timed",
}
"""Functions ("path::name") that may be longer, with the reason."""

TEXT = {".css", ".html", ".md", ".mako", ".py", ".sh", ".toml", ".yaml", ".yml", ""}
THIRD_PARTY = ("app/web/static/vendor/", "tests/browser/vendor/")


def python_files(sources: list[Path], root: Path) -> list[Path]:
    return [path for path in sources if path.suffix == ".py" and path.relative_to(root).parts[0] != "tests"]


def test_functions_fit_on_a_screen_and_swallow_no_errors(sources: list[Path], root: Path) -> None:
    too_long, swallowed = set(), []
    for path in python_files(sources, root):
        name = path.relative_to(root).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_LINES:
                    too_long.add(f"{name}::{node.name}")
            elif isinstance(node, ast.ExceptHandler):
                takes_all = node.type is None or ast.unparse(node.type) in {"Exception", "BaseException"}
                if takes_all and all(isinstance(statement, ast.Pass) for statement in node.body):
                    swallowed.append(f"{name}:{node.lineno}")
    assert too_long == set(LONGER)
    assert not swallowed


CLOCKS = {"kernels/clock.py", "kernels/device_events.py"}
MEASURING = ("kernels/device_clock.py", "parallel/", "workers/measure/", "workers/model/", "workers/jobs/")
REPLACEABLE = re.compile(
    r"time\.(?:perf_counter|monotonic|time|process_time|thread_time)(?:_ns)?\b|from time import"
    r"|torch\.(?:cuda|accelerator)\.(?:synchronize|Event|_sleep)\(|torch\.Event\("
)


def test_only_the_clocks_read_the_clock(sources: list[Path], root: Path) -> None:
    """Code of the user may replace these functions: `kernels.clock` holds what they were."""
    found = {
        f"{name}: {match[0]}"
        for path in python_files(sources, root)
        if (name := path.relative_to(root).as_posix()).startswith(MEASURING) and name not in CLOCKS
        for match in REPLACEABLE.finditer(path.read_text())
    }
    assert not found, "take it from kernels.clock or kernels.device_events"


def test_nothing_names_one_machine(sources: list[Path], root: Path) -> None:
    """No absolute path of somebody's machine, and no host that packages are downloaded from."""
    # In pieces, so that this file does not find itself.
    places = re.compile(rf"{re.escape(str(root))}/|(?<![\w./{{}}-])/(?:root|Users|work)" + r"/[\w.-]+")
    hosts = re.compile("|".join(["pypi" + r"\.org", "python" + "hosted", "npm" + r"js\.", "download" + r"\.pytorch"]))
    for path in sources:
        name = path.relative_to(root).as_posix()
        if path.suffix not in TEXT or name.startswith(THIRD_PARTY):
            continue
        text = path.read_text()
        assert not places.findall(text), name
        assert not hosts.findall(text), name


def test_dependencies_are_bounded_on_both_sides(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"].values()
    for requirement in [
        *project["build-system"]["requires"],
        *project["project"]["dependencies"],
        *(requirement for extra in extras for requirement in extra),
    ]:
        specifier = requirement.partition(";")[0]
        assert ">=" in specifier, requirement
        assert "<" in specifier.replace("<=", "<"), requirement
