"""What all tests share. Needs pytest and torch only: GPU hosts run part of the suite with nothing else installed."""

import contextlib
import ctypes
import functools
import gc
import importlib.metadata
import importlib.util
import multiprocessing
import os
import random
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest_plugins = ["tools.side_by_side"]
os.environ.pop("COLUMNS", None)  # pytest-xdist's processes have it from readline; commands would lay out by it
SEED = pytest.StashKey[int]()
TESTS = Path(__file__).parent
WITHOUT_THE_SERVICE = ("kernels", "parallel", "workers/measure", "workers/model")
"""Folders whose tests import nothing beyond torch and pytest: GPU hosts may lack the service's dependencies."""
FORKED = ("torch.distributed", "torch._dynamo")
"""Modules that processes which tests start by multiprocessing have from the beginning."""
SERVICE = ("fastapi", "httpx", "psutil", "pydantic", "pydantic_settings", "sqlmodel", "uvicorn")
MISSING = next((name for name in SERVICE if importlib.util.find_spec(name) is None), None)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("flopwatch")
    group.addoption("--random-seed", type=int, default=None, help="repeat a run's random choices")
    group.addoption("--require-gpu", action="store_true", help="without a GPU, GPU tests fail instead of being skipped")
    group.addoption(
        "--share",
        choices=("all", "together", "alone"),
        default="all",
        help="run the tests that can run at the same time as others, or those marked alone (tools/suite.py does both)",
    )
    group.addoption("--slice", default="1/1", help="run one of so many parts of the tests: 2/8")


def pytest_configure(config: pytest.Config) -> None:
    chosen = config.getoption("--random-seed")
    config.stash[SEED] = secrets.randbelow(2**32) if chosen is None else chosen
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout(seconds): kept by pytest-timeout, which is not installed here")
    # A shell starts what runs in the background so that it ignores interrupts, and tests interrupt programs.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Each process that a test starts would compile the service anew.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # The developer's own settings must change no test, and no test may touch the developer's own data.
    for name in [name for name in os.environ if name.startswith("FLOPWATCH_")]:
        del os.environ[name]
    if config.getoption("--processes"):
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # torch's other way leaves no CUDA to forks
        if "tests" in config.args and MISSING is None:
            _share_forkserver()


def _share_forkserver() -> None:
    """Let all processes share one in a run of the whole suite: it imports torch only once."""
    try:
        from tests.forked import share_forkserver
    except ModuleNotFoundError:  # a suite of tests/tools
        return
    share_forkserver()


@pytest.hookimpl(trylast=True)  # after -m has chosen, or the parts have unlike numbers of tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    share = config.getoption("--share")
    chosen = [
        item for item in items if share == "all" or (share == "alone") == (item.get_closest_marker("alone") is not None)
    ]
    number, count = map(int, config.getoption("--slice").split("/"))
    chosen = chosen[number - 1 :: count]
    kept = set(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = chosen


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Collect without the garbage collector: it visits all modules again and again while they are imported."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep the garbage collector, which measurements call often, from visiting thousands of tests and their modules."""
    with contextlib.suppress(ImportError):
        import hypothesis  # noqa: F401 - its import looks for references, which the collector hides when frozen
    gc.freeze()  # garbage, too: to find it takes longer than it is worth
    # Processes of parallel's tests and of benchmarks are forks of the one forkserver that this process has.
    multiprocessing.set_forkserver_preload(list(FORKED))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Keep it from visiting, again and again, what the tests of former files have imported and cached, too."""
    yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_report_header(config: pytest.Config) -> list[str]:
    return [
        f"random seed: {config.stash[SEED]} (repeat with --random-seed={config.stash[SEED]})",
        f"torch: {importlib.metadata.version('torch')}",
    ]


class NothingAlone(pytest.File):
    """Stands for a file without a test marked alone: importing all of them would take as long as those tests."""

    def collect(self) -> list[pytest.Item]:
        return []


class NeedsTheService(pytest.File):
    """Stands for a folder or file that this host cannot import."""

    def collect(self) -> list[pytest.Item]:
        pytest.skip(f"the service's dependencies are not installed here: no {MISSING}")


def _needs_the_service(path: Path) -> bool:
    if MISSING is None or not path.is_relative_to(TESTS) or path == TESTS:
        return False
    name = path.relative_to(TESTS).as_posix()
    leads_there = any(folder.startswith(f"{name}/") for folder in WITHOUT_THE_SERVICE)
    return not leads_there and not any(f"{name}/".startswith(f"{folder}/") for folder in WITHOUT_THE_SERVICE)


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    return NeedsTheService.from_parent(parent, path=path) if _needs_the_service(path) else None


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if parent.config.getoption("--share") == "alone" and b"pytest.mark.alone" not in module_path.read_bytes():
        return NothingAlone.from_parent(parent, path=module_path)
    return NeedsTheService.from_parent(parent, path=module_path) if _needs_the_service(module_path) else None


@functools.cache
def why_no_gpu() -> str | None:
    """Why CUDA cannot be used here, or None. Without a driver this is known without importing torch (2 s)."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver"
    import torch

    return None if torch.cuda.is_available() else f"torch {torch.__version__} sees no CUDA device"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None or (reason := why_no_gpu()) is None:
        return
    if item.config.getoption("--require-gpu"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


@pytest.fixture(autouse=True)
def _working_directory_stays() -> Iterator[None]:
    """Jobs that run in the test's own process change to a folder of their own, which goes."""
    before = Path.cwd()
    yield
    os.chdir(before)


@pytest.fixture(scope="session", autouse=True)
def _certificates_read_once() -> Iterator[None]:
    """Each client of httpx would read all certificates, which takes longer than most requests."""
    if MISSING is not None:
        yield
        return
    import httpx

    with pytest.MonkeyPatch.context() as patch:
        transports = httpx._transports.default
        patch.setattr(transports, "create_ssl_context", functools.cache(transports.create_ssl_context))
        yield


@pytest.fixture(scope="session")
def postgres() -> Iterator[Any]:
    """A PostgreSQL server of this process's (see tests/postgres.py); the test is skipped where there is none."""
    from tests.postgres import running_server

    with running_server() as server:
        yield server


@pytest.fixture(scope="session")
def slurm() -> Iterator[Any]:
    """A Slurm cluster of this process's (see tests/slurm_cluster.py); the test is skipped where there is none."""
    from tests.slurm_cluster import running_cluster

    with running_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def object_server() -> Iterator[int]:
    """The port of an S3 server."""
    from tests.object_stores import serving_objects

    with serving_objects() as port:
        yield port


@pytest.fixture
def bucket(object_server: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A tests.object_stores.Bucket, which this process's environment reaches."""
    from tests.object_stores import new_bucket

    with new_bucket(object_server) as made:
        for name, value in made.environment().items():
            monkeypatch.setenv(name, value)
        yield made


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Random choices of one test, from the run's printed seed and the test's name, whatever the order of tests."""
    seed = request.config.stash[SEED]
    print(f"random seed: {seed}")
    return random.Random(f"{seed} {request.node.nodeid}")
