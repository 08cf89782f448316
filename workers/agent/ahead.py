"""Starts the units of a job that need new interpreters a few at a time, so that they import torch at the same time.

Importing takes up to ten seconds, and measuring often one. Each unit waits behind a gate after its imports (see
workers/processes/keeper.py); the gates open one after the other, when all have imported, so that no unit is measured
beside another that runs.
"""

import contextlib
import os
import select
import socket
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from workers.outcome import HostExhausted, RunnerError
from workers.processes import keeper
from workers.processes.launch import Process

MAX_AHEAD = 8
"""Most units that start together: each takes a few hundred MiB of memory."""
IMPORTS_S = 300.0
"""Seconds that the imports may take, also on a slow disk with a cold cache."""

WorkT = TypeVar("WorkT")


def units_at_a_time() -> int:
    """Return how many units start together: imports need a core each, and leave some to others."""
    return max(1, min(MAX_AHEAD, len(os.sched_getaffinity(0)) // 2))


class Ahead(Generic[WorkT]):
    """The units that have been started and wait. `start`: starts the process of a unit behind a gate. `stop`: a
    descriptor that becomes readable when the job must end."""

    def __init__(self, start: Callable[[WorkT, socket.socket], Process], stop: int) -> None:
        self._start = start
        self._stop = stop
        self._waiting: list[tuple[WorkT, Process, socket.socket]] = []

    def start(self, units: Sequence[WorkT]) -> None:
        """Start units, if none waits and there are several, and wait until they have imported or the job must end.

        If one cannot be started, none waits: each then starts when it is its turn, and fails with the reason.
        """
        if self._waiting or len(units) < 2:
            return
        try:
            for unit in units:
                with contextlib.ExitStack() as on_error:
                    gate, of_unit = map(on_error.enter_context, socket.socketpair())
                    process = self._start(unit, of_unit)
                    on_error.pop_all()
                of_unit.close()
                self._waiting.append((unit, process, gate))
        except (RunnerError, OSError, HostExhausted):
            self.close()
        for _, _, gate in self._waiting:
            readable, _, _ = select.select([gate.fileno(), self._stop], [], [], IMPORTS_S)
            if self._stop in readable:
                return

    def take(self, unit: WorkT) -> Process | None:
        """Let a unit begin, if it waits; returns its process."""
        if not self._waiting or self._waiting[0][0] is not unit:
            return None
        _, process, gate = self._waiting.pop(0)
        with gate, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            gate.sendall(keeper.READY)
        return process

    def close(self) -> None:
        """End the units that still wait; their keepers do it when their sockets close."""
        for _, process, gate in self._waiting:
            gate.close()
            process.close()
        self._waiting.clear()
