"""The contracts on imports. Each must fail on a copy of the sources with a forbidden import."""

import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

CIRCLES = "no packages import each other in a circle"

FORBIDDEN_IMPORTS = {
    "the service imports neither torch nor what runs on GPU hosts": ("app/settings.py", "import torch"),
    "the service is built in layers": ("app/store/reading/members.py", "import app.results.sheet"),
    "the client needs little beside the standard library": ("flopwatch/connection.py", "import pydantic"),
    "the client imports nothing of the service": ("flopwatch/connection.py", "import app.presets"),
    "only the command line is built on the client": ("app/web/forms.py", "import flopwatch.own_code"),
    "the service below its pages knows nothing of the client": ("app/specs/_code.py", "import flopwatch.spelling"),
    "only the store talks to the database": ("workers/agent/agent.py", "import sqlalchemy"),
    "results hold no SQL": ("app/results/sides.py", "import sqlalchemy"),
    "kernels knows nothing of the others": ("kernels/__init__.py", "import parallel"),
    "parallel knows nothing of the others": ("parallel/__init__.py", "import kernels"),
    "the model and the measuring import nothing of the service": ("workers/model/__init__.py", "import app.presets"),
    "migrations use the tables and the engine only": ("migrations/env.py", "import app.main"),
    "only the client uses pandas": ("app/store/queue/transitions.py", "import pandas"),
}
"""For each contract of pyproject.toml a file and a line that break it."""

IMPORT_ALL = """
import importlib, pkgutil, sys
roots, skipped = sys.argv[1].split(","), sys.argv[2].split(",")

def import_all(name):
    module = importlib.import_module(name)
    for info in pkgutil.iter_modules(getattr(module, "__path__", []), name + "."):
        if info.name not in skipped and not info.name.endswith("__main__"):
            import_all(info.name)

for root in roots:
    import_all(root)
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""
PLAN_ALL = """
import sys
from app.specs import KINDS
from workers.jobs import runner_for

for kind, spec in KINDS.items():
    runner_for(kind).plan(spec.example())
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""
GPU_SIDE = {"torch", "triton", "workers", "kernels", "parallel"}


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    # Not the installed script: with -c the folder comes first on sys.path, so the copy's packages are the ones read.
    return subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()", "--no-cache"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def imported(run_python: Callable[..., str]) -> Callable[..., set[str]]:
    """Top-level names in sys.modules once every module of `roots` is imported in a new interpreter."""

    def names(folder: Path, roots: str, skipped: str = "") -> set[str]:
        return set(run_python(IMPORT_ALL, roots, skipped, folder=folder).split())

    return names


def break_it(copy: Path, file: str, line: str) -> None:
    source = copy / file
    future = "from __future__ import annotations\n"
    text = source.read_text()
    source.write_text(text.replace(future, f"{future}{line}\n", 1) if future in text else f"{line}\n{text}")


def test_the_contracts_hold(root: Path) -> None:
    result = lint_imports(root)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_contract_has_a_forbidden_import(root: Path) -> None:
    contracts = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert {contract["name"] for contract in contracts} == {CIRCLES, *FORBIDDEN_IMPORTS}


def test_a_forbidden_import_breaks_its_contract(copy: Path) -> None:
    """All of them in one copy: the report names the broken import in the part of its own contract."""
    for file, line in FORBIDDEN_IMPORTS.values():
        break_it(copy, file, line)
    result = lint_imports(copy)
    assert result.returncode != 0
    *_, told = result.stdout.partition("Broken contracts")
    # Each part is the contract's name, underlined, and the imports that break it.
    parts = dict(zip(*[iter(re.split(r"\n([^\n]+)\n-+\n", told)[1:])] * 2, strict=True))
    for contract, (file, line) in FORBIDDEN_IMPORTS.items():
        module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        assert f"{module} -> {line.removeprefix('import ')} " in parts[contract], result.stdout


def test_a_circle_of_packages_breaks_its_contract(copy: Path) -> None:
    break_it(copy, "app/store/queue/hosts.py", "import app.store.keeping.pruning")
    result = lint_imports(copy)
    assert f"{CIRCLES} BROKEN" in result.stdout
    assert "No cycles are allowed in app.store." in result.stdout


def test_the_service_imports_no_torch_and_no_pandas(root: Path, imported: Callable[..., set[str]]) -> None:
    names = imported(root, "app,flopwatch", skipped="app.results")
    assert not names & {*GPU_SIDE, "pandas"}
    assert "fastapi" in names


def test_neither_agent_nor_runner_imports_torch(root, imported, run_python) -> None:
    names = imported(root, "workers.agent")  # which imports every runner
    planned = set(run_python(PLAN_ALL, folder=root).split())
    assert not (names | planned) & {"torch", "triton", "pandas"}
    assert "sqlalchemy" not in planned, "every rank imports the runners"
