"""Our packages under long names, beside packages of others that have their short names."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flopwatch.packages import FOLDER, PACKAGES, RELATIVE, cure

EDITABLE = str(Path(FOLDER, "tools", "editable"))
Run = Callable[..., Any]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """What code prints, as JSON, in a new interpreter that finds modules in `tmp_path`, then in `path`."""

    def run(code: str, *path: str) -> Any:
        search = [str(tmp_path), *path]
        done = subprocess.run(
            [sys.executable, "-P", "-c", f"import sys, json; sys.path[:0] = {search!r}\n{code}"],
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A project of a user's with packages of all our names, whose modules have the names of ours."""
    for package in PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("WHO = 'the user'\n")
        for module in ("registry", "errors", "outcome", "accounting"):
            (tmp_path / package / f"{module}.py").write_text("WHO = 'the user'\n")
    return tmp_path


def test_an_editable_installation_exposes_flopwatch_alone() -> None:
    assert [entry.name for entry in Path(EDITABLE).iterdir()] == ["flopwatch"]
    assert Path(EDITABLE, "flopwatch").resolve() == Path(FOLDER, "flopwatch")


@pytest.mark.parametrize("theirs_first", [True, False])
def test_both_are_imported_in_one_process(theirs: Path, run: Run, theirs_first: bool) -> None:
    """Ours import each other, at the top and in functions, whatever the user's are called."""
    imports = ["import kernels.registry, app.errors, workers.outcome, parallel.accounting"]
    imports.insert(theirs_first, "import flopwatch.kernels.registry, flopwatch.workers.run_here, flopwatch.app.errors")
    found = run(
        "\n".join(imports) + "\n"
        "from flopwatch.workers.jobs import runner_for\n"  # it imports every runner, and each its spec
        "runner_for('benchmark')\n"
        "from flopwatch.workers.jobs._base import parse_spec\n"
        "spec = parse_spec({'kind': 'attention'})\n"
        "names = flopwatch.kernels.registry.ATTENTION.names()\n"
        "print(json.dumps([kernels.registry.WHO, type(spec).__module__, len(names),"
        " sorted(name for name in sys.modules if name.partition('.')[0] in "
        f"{PACKAGES} and not sys.modules[name].__file__.startswith({str(theirs)!r}))]))",
        EDITABLE,
    )
    assert found[:2] == ["the user", "flopwatch.app.specs.attention"]
    assert found[2] > 10
    assert found[3] == []


@pytest.mark.parametrize("first", ["kernels", "flopwatch.kernels"])
def test_in_a_checkout_both_names_are_the_same_modules(first: str, run: Run) -> None:
    found = run(
        f"import {first}.registry, flopwatch, kernels.registry, flopwatch.kernels.attention.problem, workers.outcome\n"
        "import kernels.attention.problem as short, flopwatch.kernels.attention.problem as long, flopwatch.workers\n"
        "print(json.dumps([flopwatch.kernels is kernels, flopwatch.kernels.registry is kernels.registry, long is short,"
        " flopwatch.workers is workers, kernels.__name__, short.__spec__.name]))",
        FOLDER,
    )
    assert found == [True, True, True, True, first, f"{first}.attention.problem"]


def test_hiding_leaves_flopwatch_alone(run: Run) -> None:
    code = (
        "import app.errors, kernels, flopwatch.packages\n"
        "flopwatch.packages.hide()\n"
        "import importlib.util, flopwatch.kernels, pathlib\n"
        "print(json.dumps([[name for name in flopwatch.packages.PACKAGES if importlib.util.find_spec(name)],"
        f" {FOLDER!r} in sys.path, {EDITABLE!r} in sys.path, flopwatch.kernels.__name__]))"
    )
    assert run(code, FOLDER) == [[], False, True, "flopwatch.kernels"]


def test_a_process_that_is_spawned_finds_ours_by_their_names(theirs: Path, run: Run) -> None:
    code = (
        "import pickle, subprocess\n"
        "from flopwatch.workers.outcome import RunnerError\n"
        "import kernels\n"
        "sent = pickle.dumps([RunnerError('x'), RunnerError])\n"
        "code = 'import sys, pickle; sys.path[:] = sys.argv[1:]; '\n"
        "code += 'e, c = pickle.loads(sys.stdin.buffer.read()); print(c.__module__, \"kernels\" in sys.modules)'\n"
        "done = subprocess.run([sys.executable, '-c', code, *sys.path], input=sent, capture_output=True)\n"
        "print(json.dumps(done.stdout.decode() + done.stderr.decode()))"
    )
    assert run(code, EDITABLE) == "flopwatch.workers.outcome False\n"


@pytest.mark.parametrize("package", RELATIVE)
def test_a_package_that_imports_by_relative_names_does(package: str) -> None:
    for file in Path(FOLDER, package).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names.append(node.module or "")
            assert not {name.partition(".")[0] for name in names} & set(PACKAGES), (file, node.lineno)


def test_the_cure_for_a_name_of_ours_installs_nothing() -> None:
    told = cure("kernels", "send its folder along")
    assert told is not None
    assert "if 'kernels' is yours, send its folder along; if it is Flopwatch's, write flopwatch.kernels;" in told
    hidden = cure("app", "send its folder along")
    assert hidden is not None
    assert "flopwatch.app" not in hidden
    assert cure("numpy", "send its folder along") is None
