"""The modules that uploaded code needs from its worker, and the sentence where no worker has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from flopwatch.imports import clash_in, complaint_about, left_behind, modules_of
from flopwatch.packing import pack

SOURCE = b"""
from __future__ import annotations
import torch.nn as nn, numpy
from flopwatch import phase
from . import beside

try:
    import fast
except ImportError:
    fast = None
if False:
    import never


def make_step(device):
    import late
"""


def test_imports_that_always_run_are_found() -> None:
    assert modules_of(SOURCE, "train.py") == ["__future__", "flopwatch", "numpy", "torch"]


def test_a_file_that_is_no_python_needs_nothing() -> None:
    assert modules_of(b"def (", "train.py") == []


FILES = {
    "run/train.py": "import torch, beside\nfrom models import net\nimport spaces.inner\nimport models.sub.deep\n",
    "run/beside.py": "import numpy\n",
    "models/__init__.py": "import einops\n",
    "models/net.py": "from .sub import deep\nfrom ..models import net\nimport triton\n",
    "models/sub/__init__.py": "",
    "models/sub/deep.py": "from ...models.net import x\nfrom .. import other\n",
    "models/other.py": "import scipy\n",
    "spaces/inner.py": "import pandas\nimport run.train\n",
    "tests/test_net.py": "import pytest\n",
    "setup.py": "import setuptools\n",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, source in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    return tmp_path


def test_files_of_the_folder_are_followed_and_others_left_out(project: Path) -> None:
    packed = pack(project, project / "run/train.py")
    assert modules_of(packed, "run/train.py") == ["einops", "numpy", "pandas", "scipy", "torch", "triton"]


def test_a_file_alone_needs_what_lies_beside_it(project: Path) -> None:
    alone = (project / "run/train.py").read_bytes()
    assert modules_of(alone, "train.py") == ["beside", "models", "spaces", "torch"]


def worker(name: str, *lacking: str) -> dict[str, object]:
    return {"id": f"{name}-1", "hostname": name, "lacking": list(lacking)}


@pytest.mark.parametrize("workers", [[], [worker("a")], [worker("a", "numpy"), worker("b")]])
def test_there_is_no_complaint_where_a_worker_has_all_or_none_is_known(workers: list[dict[str, object]]) -> None:
    assert complaint_about(workers, "train.py", is_folder=False) is None


def test_the_complaint_names_module_worker_and_cure() -> None:
    workers = [worker("a", "numpy", "triton"), worker("b", "triton")]
    complaint = complaint_about(workers, "train.py", is_folder=False)
    assert complaint is not None
    assert complaint.startswith("train.py imports 'triton', which the worker b-1 on b lacks, and no other worker")
    assert "install it for that worker" in complaint
    assert "send its folder along with --code FOLDER" in complaint
    in_folder = complaint_about(workers[1:], "train.py", is_folder=True)
    assert in_folder is not None
    assert "put it into the folder that goes along" in in_folder


def test_a_name_of_ours_has_a_cure_of_its_own() -> None:
    complaint = complaint_about([worker("a", "kernels", "triton")], "train.py", is_folder=False)
    assert complaint is not None
    assert "if 'kernels' is yours, send its folder along with --code FOLDER; if it is Flopwatch's, write" in complaint
    assert "install the others for that worker" in complaint
    alone = complaint_about([worker("a", "app")], "train.py", is_folder=True)
    assert alone is not None
    assert "put it into the folder that goes along" in alone
    assert "install it" not in alone


@pytest.mark.parametrize("name", ["flopwatch", "torch"])
def test_a_module_of_the_folder_with_a_name_that_is_taken_is_told(tmp_path: Path, name: str) -> None:
    (tmp_path / "train.py").write_text("import beside, torch, flopwatch\n")
    (tmp_path / "beside.py").write_text("import statistics\n")
    assert clash_in(pack(tmp_path, tmp_path / "train.py"), "train.py") is None
    (tmp_path / f"{name}.py").touch()
    told = clash_in(pack(tmp_path, tmp_path / "train.py"), "train.py")
    assert told is not None
    assert told.startswith(f"train.py imports '{name}' of its folder")
    assert clash_in(b"import torch\n", "train.py") is None


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import size\nimport torch, json\n", (["size"], "run")),
        ("def make_step(device):\n    from size import SIZE\n", (["size"], "run")),
        ("from models.net import Net\nimport tools\n", (["models"], ".")),
        ("try:\n    import size\nexcept ImportError:\n    size = None\n", None),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import size\n", None),
        ("import json\n", None),
        ("import train\nimport unknown\n", None),
        ("from .size import SIZE\n", ([".size"], ".")),
    ],
)
def test_modules_that_do_not_go_along_with_the_file_alone(
    tmp_path: Path, source: str, found: tuple[list[str], str] | None
) -> None:
    for name in ("run/size.py", "run/json.py", "run/train.py", "models/net.py", "tools/readme.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    expected = None if found is None else (found[0], (tmp_path / found[1]).resolve())
    assert left_behind(source.encode(), tmp_path / "run/train.py", tmp_path) == expected
