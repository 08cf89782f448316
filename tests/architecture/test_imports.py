"""The contracts on imports, and what importing a package brings along."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

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


@pytest.fixture(scope="module")
def imported(run_python: Callable[..., str]) -> Callable[..., set[str]]:
    """Top-level names in sys.modules once every module of `roots` is imported in a new interpreter."""

    def names(folder: Path, roots: str, skipped: str = "") -> set[str]:
        return set(run_python(IMPORT_ALL, roots, skipped, folder=folder).split())

    return names


def test_the_contracts_hold(root: Path) -> None:
    # Not the installed script: with -c the folder comes first on sys.path, so the checkout's packages are read.
    code = "from importlinter.cli import lint_imports_command as c; c()"
    result = subprocess.run([sys.executable, "-c", code, "--no-cache"], cwd=root, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_service_imports_no_torch_and_no_pandas(root: Path, imported: Callable[..., set[str]]) -> None:
    names = imported(root, "app,flopwatch", skipped="app.results")
    assert not names & {*GPU_SIDE, "pandas"}
    assert "fastapi" in names


def test_neither_agent_nor_runner_imports_torch(root, imported, run_python) -> None:
    names = imported(root, "workers.agent")  # which imports every runner
    planned = set(run_python(PLAN_ALL, folder=root).split())
    assert not (names | planned) & {"torch", "triton", "pandas"}
    assert "sqlalchemy" not in planned, "every rank imports the runners"
