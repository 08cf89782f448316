"""Reads the load of this host's devices, for the page of workers.

A driver that hangs must not stop an agent's heartbeat, so a separate thread reads, and `latest` never waits.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Any

import psutil

from app.store.public import rfc3339
from app.store.tables import utc_now
from workers.devices.discovery import Host
from workers.measure import nvml

logger = logging.getLogger(__name__)

UNKNOWN_GPU_LOAD: dict[str, Any] = dict.fromkeys(
    (
        "utilisation_percent",
        "memory_used_mib",
        "temperature_c",
        "power_w",
        "sm_clock_mhz",
        "memory_clock_mhz",
        "throttling",
    )
)


def read(host: Host, find_gpu: Callable[[str], nvml.Gpu | None] = nvml.find_gpu) -> dict[str, Any]:
    """Return each device's present load, in the order of `Host.as_devices`. Values that a device does not report are
    None.

    Args:
        host: the devices.
        find_gpu: finds a GPU by its UUID.
    """
    load_1min, _, _ = os.getloadavg()
    cpu = {
        "type": "cpu",
        # Of the time since the last call.
        "utilisation_percent": psutil.cpu_percent(interval=None),
        "load_1min": round(load_1min, 2),
        "memory_used_mib": psutil.virtual_memory().used >> 20,
    }
    devices: list[dict[str, Any]] = [cpu]
    for gpu in host.gpus:
        device = find_gpu(gpu.uuid)
        devices.append({"type": "cuda", "uuid": gpu.uuid, **(UNKNOWN_GPU_LOAD if device is None else device.load())})
    return {"read_at": rfc3339(utc_now()), "devices": devices}


class Readings:
    """Reads the devices every `period_s` seconds in a thread, from `start` to `stop`."""

    def __init__(self, host: Host, period_s: float, read: Callable[[Host], dict[str, Any]] = read) -> None:
        self._host = host
        self._period_s = period_s
        self._read = read
        self._stopping = threading.Event()
        self._latest: dict[str, Any] | None = None
        # A daemon: the process can end while the driver hangs.
        self._thread = threading.Thread(target=self._run, name="readings", daemon=True)

    def start(self) -> None:
        psutil.cpu_percent(interval=None)  # the first call has nothing to compare with
        self._thread.start()

    def latest(self) -> dict[str, Any] | None:
        """Return the last reading, with its time; None before the first one."""
        return self._latest

    def stop(self) -> None:
        """Let the thread end; does not wait for it."""
        self._stopping.set()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._latest = self._read(self._host)
            except Exception:  # a missing number on a page must not end the readings
                logger.exception("the devices cannot be read now")
            self._stopping.wait(self._period_s)
