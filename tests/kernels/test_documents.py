"""The Python code of docs/kernels.md runs as written."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"
CODE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def run(names: dict[str, Any], *, on_gpu: bool) -> int:
    """Run the page's blocks that need a GPU, or the others; return their number."""
    blocks = [block for block in CODE.findall(PAGE.read_text()) if ("cuda" in block) == on_gpu]
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    return len(blocks)


def test_the_code_runs() -> None:
    names: dict[str, Any] = {}
    assert run(names, on_gpu=False) == 2
    assert names["out"].shape == (1, 2, 256, 64)
    assert names["q"].shape == (1, 4, 1024, 32)


@pytest.mark.gpu
def test_the_code_for_a_gpu_runs() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the page calls the kernels for Hopper")
    names: dict[str, Any] = {}
    run(names, on_gpu=False)
    # The page goes on from its first block.
    names |= {name: torch.randn(1, 2, 256, 64) for name in "qkv"}
    assert run(names, on_gpu=True) == 1
    assert names["q"].grad is None
