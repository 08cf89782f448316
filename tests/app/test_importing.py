import gc
import os
import subprocess
from pathlib import Path

import pytest

from app.importing import program, without_collector
from flopwatch.packages import FOLDER


def test_the_collector_works_again_after_an_import_that_fails() -> None:
    with pytest.raises(ModuleNotFoundError), without_collector():
        raise ModuleNotFoundError("no such module")
    assert gc.isenabled()


@pytest.mark.parametrize("installed_by", ["the path", "nothing"])
def test_modules_of_the_current_folder_do_not_stand_in_for_ours(installed_by: str, tmp_path: Path) -> None:
    for name in ("app", "workers", "flopwatch"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('of a user')\n")
    path = {"PYTHONPATH": FOLDER} if installed_by == "the path" else {}
    others = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(
        program("workers"), cwd=tmp_path, env={**others, **path}, capture_output=True, text=True, check=False
    )
    assert ran.stderr.startswith("`python -m workers agent")
