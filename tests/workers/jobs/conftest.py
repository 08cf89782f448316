from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flopwatch import steps
from tests.workers.jobs.trace_readers import install


@pytest.fixture(autouse=True)
def _precision_stays() -> Iterator[None]:
    """Restore the precision of float32 products, which runners set."""
    precision = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(precision)


@pytest.fixture(autouse=True)
def _nobody_listens(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore what hears the ranges that users' code names."""
    for name in ("range_push", "range_pop"):
        monkeypatch.setattr(torch.cuda.nvtx, name, getattr(torch.cuda.nvtx, name))
    yield
    steps.listen(None)


@pytest.fixture(scope="session")
def readers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the programs of `trace_readers`."""
    return install(tmp_path_factory.mktemp("readers"))
