"""Reads the load of this host's devices, for the page of workers.

A driver that hangs must not stop an agent's heartbeat, so a separate thread reads, and `latest` never waits.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil

from app.store.public import rfc3339
from app.store.tables import utc_now
from workers.agent.fitness import Unfit
from workers.devices.discovery import Host
from workers.measure import nvml

logger = logging.getLogger(__name__)

SILENT_S = 60.0
"""Seconds for which one reading of all devices may last; it takes milliseconds."""
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


def read(
    host: Host,
    find_gpu: Callable[[str], nvml.Gpu | None] = nvml.find_gpu,
    is_lost: Callable[[str], bool] = nvml.is_lost,
) -> dict[str, Any]:
    """Return each device's present load, in the order of `Host.as_devices`. Values that a device does not report are
    None. `find_gpu`: finds a GPU by its UUID. `is_lost`: tells whether a GPU fell off the bus; one that did is `lost`
    in the result."""
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
        load = UNKNOWN_GPU_LOAD if device is None else device.load()
        devices.append({"type": "cuda", "uuid": gpu.uuid, **load} | ({"lost": True} if is_lost(gpu.uuid) else {}))
    return {"read_at": rfc3339(utc_now()), "devices": devices}


class Readings:
    """Reads the devices every `period_s` seconds in a thread, from `start` to `stop`."""

    def __init__(
        self,
        host: Host,
        period_s: float,
        read: Callable[[Host], dict[str, Any]] = read,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host = host
        self._period_s = period_s
        self._read = read
        self._clock = clock
        self._reading_since: float | None = None
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

    def trouble(self) -> Unfit | None:
        """Return why the devices cannot be used, as far as reading them has told."""
        if self._reading_since is not None and self._clock() - self._reading_since > SILENT_S:
            return Unfit("driver_silent", f"NVIDIA's driver has not answered for more than {SILENT_S:g} s: see dmesg")
        latest = self._latest or {"devices": []}
        lost = [one["uuid"] for one in latest["devices"] if one.get("lost")]
        return Unfit("device_lost", f"{', '.join(lost)} fell off the bus: see dmesg for Xid errors") if lost else None

    def stop(self) -> None:
        """Let the thread end; does not wait for it."""
        self._stopping.set()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._reading_since = self._clock()
                self._latest = self._read(self._host)
            except Exception:  # a missing number on a page must not end the readings
                logger.exception("the devices cannot be read now")
            self._reading_since = None
            self._stopping.wait(self._period_s)
