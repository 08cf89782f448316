"""The modules that a worker tells."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from workers import modules


def test_what_can_be_imported_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files and packages of sys.path, installed distributions, the standard library, built-in modules."""
    (tmp_path / "mine_alone.py").touch()
    (tmp_path / "no-module.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    told = modules.importable()
    assert told is not None
    assert {"mine_alone", "torch", "pytest", "json", "sys", "flopwatch"} <= set(told)
    assert not {"app", "kernels", "workers"} & set(told), "ours, which a checkout on the path has: jobs do not see them"
    assert "no-module" not in told
    assert told == sorted(told)
    assert not importlib.util.find_spec("not_there_at_all")
    assert "not_there_at_all" not in told


def test_too_many_are_not_told_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "MOST", len(sys.stdlib_module_names) - 1)
    assert modules.importable() is None
