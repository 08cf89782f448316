from collections.abc import Iterator

import pytest
import torch

from flopwatch import steps
from workers.measure.process_settings import set_back, settings


@pytest.fixture(autouse=True)
def _settings_stay() -> Iterator[None]:
    """Set back what runners and planted steps change in torch.

    With detection of anomalies left on, later tests of the process take up to ten times as long.
    """
    before = settings()
    yield
    set_back(before)


@pytest.fixture(autouse=True)
def _nobody_listens(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore what hears the ranges that users' code names."""
    for name in ("range_push", "range_pop"):
        monkeypatch.setattr(torch.cuda.nvtx, name, getattr(torch.cuda.nvtx, name))
    yield
    steps.listen(None)
