"""The files of one's own that uploaded code imports."""

from pathlib import Path

import pytest

from flopwatch.imports import clash_in, left_behind, own_modules
from flopwatch.packing import pack

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


def test_files_of_the_folder_are_followed(project: Path) -> None:
    assert own_modules(project, "run/train.py") == {"beside": "run", "models": ".", "run": ".", "spaces": "."}
    assert own_modules(project, "tests/test_net.py") == {}


def test_modules_in_the_src_of_a_project_are_followed(tmp_path: Path) -> None:
    for name, source in {"run/train.py": "import net", "src/net.py": "import size", "src/size.py": ""}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source)
    assert own_modules(tmp_path, "run/train.py") == {}
    (tmp_path / "pyproject.toml").touch()
    assert own_modules(tmp_path, "run/train.py") == {"net": "src", "size": "src"}


@pytest.mark.parametrize(
    ("name", "is_told"), [("flopwatch", True), ("torch", True), ("kernels", False), ("app", False)]
)
def test_a_module_of_the_folder_with_a_name_that_is_taken_is_told(tmp_path: Path, name: str, is_told: bool) -> None:
    (tmp_path / "train.py").write_text(f"def make_step(device):\n    import beside, {name}\n")
    (tmp_path / "beside.py").touch()
    assert clash_in(pack(tmp_path, tmp_path / "train.py"), "train.py") is None
    (tmp_path / f"{name}.py").touch()
    told = clash_in(pack(tmp_path, tmp_path / "train.py"), "train.py")
    assert (told is not None and f"imports '{name}' of its folder" in told) == is_told


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import size\nimport torch, json\n", (["json", "size"], "run")),
        ("def make_step(device):\n    from size import SIZE\n", (["size"], "run")),
        ("from models.net import Net\nimport tools\n", (["models"], ".")),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import size\n", None),
        ("import json\n", (["json"], "run")),
        ("import queue\n", None),
        ("import train\nimport unknown\n", None),
        ("import installed\n", (["installed"], ".")),
        ("from .size import SIZE\n", ([".size"], ".")),
    ],
)
def test_modules_that_do_not_go_along_with_the_file_alone(tmp_path, source, found) -> None:
    for name in (
        "run/size.py",
        "run/json.py",
        "run/train.py",
        "models/net.py",
        "tools/readme.txt",
        "queue.py",
        "src/installed.py",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    expected = None if found is None else (found[0], (tmp_path / found[1]).resolve())
    assert left_behind(source.encode(), tmp_path / "run/train.py", tmp_path) == expected
