"""How the kernels' tests judge results: by the tolerances that also the service shows."""

import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.tolerance import TOLERANCES, error, fixed_limits
from tests.kernels.beside import DEVICES

# Before anything imports a kernel: without a GPU, Triton's interpreter runs them.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session", autouse=True)
def _fast_interpreter() -> Iterator[None]:
    """Triton's interpreter without the work that it repeats: a kernel's test takes less than half of the time."""
    if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        yield
        return
    from tests.kernels.interpreter import fast_interpreter

    with fast_interpreter():
        yield


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """A GPU or, without one, the CPU, where Triton's interpreter runs kernels."""
    return str(request.param)


@pytest.fixture(params=[False, True], ids=["full", "causal"])
def is_causal(request: pytest.FixtureRequest) -> bool:
    """Whether attention hides later keys."""
    return bool(request.param)


@pytest.fixture
def assert_close() -> Callable[[Tensor, Tensor], None]:
    """(out, float64 oracle): out is right, by the tolerance of its dtype."""

    def check(out: Tensor, oracle: Tensor) -> None:
        why = error(out, oracle).why_wrong(fixed_limits(TOLERANCES[out.dtype]))
        assert why is None, f"{why}, in {out.dtype}"

    return check


@pytest.fixture
def _small_tiles_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        return
    from kernels.attention.triton import tilings
    from kernels.attention.triton.tilings import Tiling

    small = tilings.Tilings(Tiling(32, 16, 4, 2), Tiling(16, 32, 4, 2), Tiling(32, 16, 4, 2), Tiling(16, 32, 4, 2))
    monkeypatch.setattr(tilings, "choose", lambda *_: small)


@pytest.fixture
def _without_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The Triton kernels, also on a device that has others."""
    from kernels.attention.hopper import native, plans, rules

    remembered = plans.forward_launch, plans.backward_launches
    monkeypatch.setattr(rules, "runs_on", lambda _device: False)
    monkeypatch.setattr(native, "_loaded", None)
    for one in remembered:
        one.cache_clear()
    yield
    for one in remembered:
        one.cache_clear()


@pytest.fixture
def one_pass(monkeypatch: pytest.MonkeyPatch, _small_tiles_in_the_interpreter: None) -> None:
    """The backward pass of the Triton attention in its one-pass form, wherever that is not the faster one."""
    from kernels.attention.triton import tilings

    choose = tilings.choose
    monkeypatch.setattr(tilings, "choose", lambda *which: replace(choose(*which), prefer_one_pass=True))


@pytest.fixture(params=["two passes", "one pass"])
def form(request: pytest.FixtureRequest) -> str:
    """Both forms of the Triton attention's backward pass."""
    if request.param == "one pass":
        request.getfixturevalue("one_pass")
    return str(request.param)


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
