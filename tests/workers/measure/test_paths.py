import sysconfig
from pathlib import Path

import pytest

from workers.measure.paths import CHECKOUT, without_folders


@pytest.mark.parametrize(
    ("text", "shortened"),
    [
        (f"{CHECKOUT}/workers/model/steps.py(3): forward", "workers/model/steps.py(3): forward"),
        (f"{sysconfig.get_path('stdlib')}/contextlib.py", "contextlib.py"),
        (f"{sysconfig.get_path('purelib')}/torch/nn/modules/linear.py", "torch/nn/modules/linear.py"),
        ("/opt/other/lib/python3.12/site-packages/mine/model.py", "mine/model.py"),
        ("/home/größe/my-model.py:7", "my-model.py:7"),
        ('"kernel_file": "/tmp/torchinductor_me/ab/cab.py", "x": 1', '"kernel_file": "cab.py", "x": 1'),
        ("see (/data/scratch/a.py) and /data/b.py", "see (a.py) and b.py"),
        *((same, same) for same in ("torch/nn/modules/linear.py", "a / b", "https://pytorch.org/x/y", "aten::mm", "")),
    ],
)
def test_what_remains_of_a_path(text: str, shortened: str) -> None:
    assert without_folders(text) == shortened


def test_a_folder_of_the_import_path_may_have_blanks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path / "my models")
    assert without_folders(f"{tmp_path}/my models/mine/net.py(1)") == "mine/net.py(1)"
