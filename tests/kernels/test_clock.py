"""Times stay right in a process whose code replaces the clock."""

import sys
import time
from types import ModuleType

import pytest
import torch

from kernels import clock, device_clock, device_events

CUDA = torch.device("cuda")


def test_the_clock_goes_on_where_every_module_has_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """freezegun's way: it replaces whatever is the real function, in every module."""
    real, frozen = time.perf_counter, lambda: 7.0
    holder = ModuleType("holder")
    monkeypatch.setitem(sys.modules, "holder", holder)
    monkeypatch.setattr(holder, "by_name", real, raising=False)
    for module in [module for name, module in sys.modules.items() if not name.startswith("_pytest")]:
        for name, value in list(vars(module).items()):
            if value is real:
                monkeypatch.setattr(module, name, frozen)
    assert holder.by_name() == time.perf_counter() == 7.0
    before = clock.now_s()
    assert clock.now_s() > before
    assert device_clock.host_lap_ms(lambda: real()) > 0.0
    assert abs(real() - clock.now_s()) < 60.0


@pytest.mark.gpu
def test_a_kernel_that_replaces_events_and_synchronisation_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, numbers = device_clock.DeviceClock(CUDA), torch.ones(2**28, device=CUDA)
    watch.lap(lambda: numbers.add_(1))
    honest = watch.lap(lambda: numbers.add_(1)).device_ms
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    monkeypatch.setattr(torch.cuda.Event, "elapsed_time", lambda event, end: 1e-6)
    monkeypatch.setattr(torch.cuda, "Event", None)
    watch = device_clock.DeviceClock(CUDA)
    watch.lap(lambda: numbers.add_(1))
    assert watch.lap(lambda: numbers.add_(1)).device_ms == pytest.approx(honest, rel=0.2)
    begin = device_events.Event()
    with pytest.raises((TypeError, AttributeError)):
        type(begin).__base__.elapsed_time = None


def test_a_thread_that_has_just_ended_has_used_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(thread: int) -> int:
        raise ProcessLookupError

    monkeypatch.setattr(clock, "_clock_of", ended)
    assert clock.processor_ns(1) == 0
