"""Ranks that live as long as the test session, and do what tests send them: starting one costs seconds.

They are started by plain multiprocessing and initialise torch's default process group themselves, as somebody would who
uses the wrappers without `parallel.process_group`.
"""

import datetime
import gc
import importlib
import multiprocessing
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TIMEOUT_S = 60


class Pool:
    """Ranks of one world size."""

    def __init__(self, world_size: int, backend: str = "gloo") -> None:
        self.world_size = world_size
        # One process imports torch, and its compiler, which optimizers import (see tests/conftest.py); the ranks are
        # forks of it. Imports may touch CUDA where there is one, and that does not survive a fork.
        context = multiprocessing.get_context("forkserver" if backend == "gloo" else "spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="flopwatch-ranks-")
        store = str(Path(self._folder.name) / "store")
        self._channels, self._processes = [], []
        for index in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(index, world_size, backend, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self._channels.append(ours)
            self._processes.append(process)

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call a module's function in every rank, with the same arguments; return each rank's result."""
        for channel in self._channels:
            channel.send((function.__module__, function.__qualname__, arguments))
        answers = []
        for index, channel in enumerate(self._channels):
            assert channel.poll(TIMEOUT_S), f"rank {index} hangs in {function.__qualname__}"
            answers.append(channel.recv())
        failures = [f"rank {index}: {answer}" for index, (ok, answer) in enumerate(answers) if not ok]
        assert not failures, "\n".join(failures)
        return [answer for _, answer in answers]

    def close(self) -> None:
        for channel in self._channels:
            channel.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def serve(index: int, world_size: int, backend: str, store: str, channel: Connection) -> None:
    """Run as a rank: call the functions that the test sends, until the connection closes."""
    import torch
    import torch.distributed as dist

    # The garbage collector, which tests call, would look through all that was imported again and again.
    gc.freeze()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    if backend == "gloo":
        warnings.simplefilter("error")
    timeout = datetime.timedelta(seconds=TIMEOUT_S / 2)
    device = None
    if backend == "nccl":
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=index, world_size=world_size, timeout=timeout, device_id=device
    )
    while True:
        try:
            module, name, arguments = channel.recv()
        except EOFError:
            break
        try:
            torch.manual_seed(0)
            answer = (True, getattr(importlib.import_module(module), name)(*arguments))
        except Exception:  # noqa: BLE001 - the test shows it
            answer = (False, traceback.format_exc())
        channel.send(answer)
    dist.destroy_process_group()
