"""What the workers' tests share. GPU hosts run some of them without the service's dependencies."""

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.device_events import RESETS

ENDING = ("adopt_orphans", "kill_all", "reap", "signal_all")
"""Functions that meet every child of the process that calls them."""
UNFREEZE = gc.unfreeze


@pytest.fixture(scope="module", autouse=True)
def _what_runners_change_is_as_before() -> Iterator[None]:
    """A runner unfreezes what it has frozen, and with it what tests/conftest.py has: all later collections would take
    half a second, and former tests' models would count as those of an own step. And it keeps torch's peaks of memory
    from being reset."""
    with pytest.MonkeyPatch.context() as patch:  # before the fixtures of modules, some of which run jobs
        patch.setattr(gc, "unfreeze", lambda: None)
        for name, function in RESETS.items():
            patch.setattr(torch._C, name, function)
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_end_of_others() -> Iterator[None]:
    """Let nobody adopt, reap or kill the children of pytest's own process, such as Chromium or other tests' ranks."""
    try:
        from workers.processes import keeper, launch, warm
    except ImportError:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        for module in (keeper, launch, warm):
            for name in ENDING:
                if hasattr(module, name):
                    patch.setattr(module, name, _elsewhere(getattr(module, name)))
        yield


def _elsewhere(work: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, for forks of this process only."""
    here = os.getpid()

    def do(*arguments: Any, **named: Any) -> Any:
        assert os.getpid() != here, f"{work.__name__} in pytest's own process: fake them, or take a fork"
        return work(*arguments, **named)

    return do


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """The type of the device that a test is run on."""
    return str(request.param)


@pytest.fixture
def settings(tmp_path: Path) -> Any:
    """The settings of a worker whose data folder has a database."""
    from app.settings import Settings
    from tests.databases import put_database

    return Settings(data_dir=put_database(tmp_path / "data").parent)


@pytest.fixture
def database(settings: Any) -> Iterator[Any]:
    from app.store.database.engine import open_database

    database = open_database(settings)
    yield database
    database.close()


@pytest.fixture
def upload(tmp_path: Path) -> Iterator[Callable[..., dict[str, Any]]]:
    """Uploads a source, and returns what a spec says of a function in it."""
    from tests.workers.reporting import uploading

    with uploading(tmp_path / "code") as upload:
        yield upload


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Forget what was compiled, before and after a test."""
    import torch._dynamo

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()
