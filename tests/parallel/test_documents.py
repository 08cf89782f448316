"""The Python code of docs/parallel.md runs as written."""

from pathlib import Path

import pytest
import torch

from tests.parallel import documents
from tests.parallel.pool import Pool

PAGE = Path(__file__).parents[2] / "docs" / "parallel.md"
SAVES = (False, True)
"""Whether each block of code saves a checkpoint."""


def test_the_page_has_these_blocks() -> None:
    assert len(documents.CODE.findall(PAGE.read_text())) == len(SAVES)


@pytest.mark.parametrize("block", range(len(SAVES)))
def test_the_code_of_the_page_trains(ranks: Pool, tmp_path: Path, block: int) -> None:
    for changed in ranks(documents.run, str(PAGE), block, str(tmp_path)):
        assert changed["blocks.0.up.weight"]
        assert changed["norm.weight"]
        assert not changed["frozen.weight"]
        assert not changed["unused.weight"]
    if SAVES[block]:
        saved = torch.load(tmp_path / "checkpoint.pt")
        assert saved["model"]["blocks.0.up.weight"].shape == (11, 8)
        assert saved["optimizer"]["state"]
