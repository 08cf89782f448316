"""A step of 20 ms that freezes the time, as reward hacks and libraries that freeze the time do."""

import statistics
import sys
import time

import torch

CLOCKS = ("perf_counter", "monotonic", "time", "process_time", "thread_time")
sleep = time.sleep


class Event(torch._C._CudaEventBase):
    def elapsed_time(self, end):
        return 1e-3


def freeze():
    """Replace the clocks, also in modules that hold them by name, as freezegun does."""
    fakes = {}
    for name in (*CLOCKS, *(f"{clock}_ns" for clock in CLOCKS)):
        fakes[id(getattr(time, name))] = lambda now=getattr(time, name)(): now
    for module in list(sys.modules.values()):
        for name, value in list(vars(module).items()):
            if id(value) in fakes:
                setattr(module, name, fakes[id(value)])
    torch.cuda.synchronize = torch.accelerator.synchronize = lambda device=None: None
    torch.cuda.Event.elapsed_time, torch.cuda.Event.query = Event.elapsed_time, lambda event: True
    torch.cuda.Event = torch.Event = Event
    statistics.median = lambda values: 1e-3


def make_step(device):
    freeze()
    assert time.perf_counter_ns() == time.perf_counter_ns()
    return lambda: sleep(0.02)
