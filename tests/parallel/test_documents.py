"""The documents' Python code runs as written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.parallel import documents
from tests.parallel.pool import Pool

DOCS = Path(__file__).parents[2] / "docs"
SAVES = {"parallel.md": False, "from-torch-parallel.md": True}


@pytest.mark.parametrize("name", SAVES)
def test_the_code_of_a_document_trains(ranks: Pool, tmp_path: Path, name: str) -> None:
    for changed in ranks(documents.run, str(DOCS / name), str(tmp_path)):
        assert changed["blocks.0.up.weight"]
        assert changed["norm.weight"]
        assert not changed["frozen.weight"]
        assert not changed["unused.weight"]
    if SAVES[name]:
        saved = torch.load(tmp_path / "checkpoint.pt")
        assert saved["model"]["blocks.0.up.weight"].shape == (11, 8)
        assert saved["optimizer"]["state"]
