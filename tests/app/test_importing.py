from __future__ import annotations

import gc
import os
import subprocess
from pathlib import Path

import pytest

from app.importing import HOME, program, without_collector


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_leaves_imports_alone(enabled: bool) -> None:
    before, frozen = gc.isenabled(), gc.get_freeze_count()
    try:
        (gc.enable if enabled else gc.disable)()
        with without_collector():
            assert not gc.isenabled()
            imported = [[number] for number in range(1000)]
        assert gc.isenabled() == enabled
        assert gc.get_freeze_count() >= frozen + len(imported)
    finally:
        (gc.enable if before else gc.disable)()


def test_the_collector_works_again_after_an_import_that_fails() -> None:
    with pytest.raises(ModuleNotFoundError), without_collector():
        raise ModuleNotFoundError("no such module")
    assert gc.isenabled()


def test_modules_of_the_current_folder_do_not_stand_in_for_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "workers.py").write_text("raise SystemExit('of a user')\n")
    monkeypatch.chdir(tmp_path)
    ran = subprocess.run(
        program("workers"), env={**os.environ, "PYTHONPATH": str(HOME)}, capture_output=True, text=True, check=False
    )
    assert ran.stderr.startswith("`python -m workers agent")


def test_a_checkout_that_is_not_installed_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HOME)
    assert "-P" not in program("workers")
