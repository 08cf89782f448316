"""Looks whether this host can run jobs at all: its disk, Python packages, driver, GPUs, and the store of files."""

import os
import shutil
import time
from collections.abc import Iterable
from contextlib import ExitStack, closing
from importlib.machinery import PathFinder
from pathlib import Path

from app.errors import STORE_UNAVAILABLE, DiskFull, FlopwatchError, StorageFailed, StoreUnreachable
from app.settings import Settings
from app.store.files.store import FileStore
from workers.agent.fitness import Unfit, UnfitCode
from workers.agent.readings import Readings
from workers.agent.unit_run import Listener, StopSignal, Timeout, UnitRun
from workers.devices.locks import HeldDevices
from workers.installed import NEEDED
from workers.outcome import Failed
from workers.processes.keeper import Request
from workers.processes.launch import Launcher

FULL_BYTES, FULL_PART = 64 << 20, 0.01
"""A disk is full that has less room than either: a job could write neither its log nor a small artifact."""
PROBE_S = 60.0
"""Seconds that a GPU may take to compute something small in a fresh process."""


class HostCheck:
    """Checks one agent's host. Each function returns why the worker is unfit; None if it is not."""

    def __init__(
        self, settings: Settings, launcher: Launcher, artifacts: FileStore, readings: Readings, scratch: Path
    ) -> None:
        self._folders = [settings.data_dir]
        if settings.object_store_url is None:
            self._folders.append(settings.artifacts_dir)
        self._launcher = launcher
        self._artifacts = artifacts
        self._readings = readings
        self._scratch = scratch

    def glance(self, room: int = 0) -> Unfit | None:
        """Look at what can be seen in a millisecond. `room`: bytes that count as free, since they will be."""
        return full_disk(self._folders, room) or missing_packages() or self._readings.trouble()

    def of_job(self, devices: HeldDevices, room: int = 0) -> Unfit | None:
        """Look after a job has failed, with its devices."""
        return self.glance(room) or self._probe(devices)

    def whole(self, devices: HeldDevices) -> Unfit | None:
        if (found := self.glance()) is not None:
            return found
        try:
            self._artifacts.probe()
        except STORE_UNAVAILABLE as error:
            return of_store(error)
        return self._probe(devices)

    def _probe(self, devices: HeldDevices) -> Unfit | None:
        """Let a fresh process compute something on each of the GPUs."""
        if not devices.gpus:
            return None
        uuids = ",".join(gpu.uuid for gpu in devices.gpus)
        folder = self._scratch / f"probe-{os.getpid()}-{time.monotonic_ns()}"
        request = Request("", {}, {}, str(folder), {"CUDA_VISIBLE_DEVICES": uuids}, task="probe")
        listener = Listener(message=lambda _message: None, output=lambda _output: None, flush=lambda: None)
        with ExitStack() as at_end:
            at_end.callback(shutil.rmtree, folder, ignore_errors=True)
            stop = at_end.enter_context(closing(StopSignal()))
            folder.mkdir(parents=True)
            process = at_end.enter_context(closing(self._launcher.start(request, "fork", devices.descriptors)))
            timeout = Timeout.after(PROBE_S, time.monotonic())
            outcome = UnitRun(process, listener, stop, timeout=timeout, grace_s=1.0).run()
        if not isinstance(outcome, Failed):
            return None
        if outcome.code == "timeout":
            return Unfit("driver_silent", f"{uuids} computed nothing for {PROBE_S:g} s: see dmesg for Xid errors")
        return Unfit("device_lost", f"{uuids} cannot compute: {outcome.detail}; see dmesg for Xid errors")


def full_disk(folders: Iterable[Path], room: int = 0) -> Unfit | None:
    """Look whether the disk of one of these folders is full, if `room` bytes more were free."""
    for folder in folders:
        try:
            disk = os.statvfs(folder)
        except FileNotFoundError:  # not made yet
            continue
        except OSError as error:
            return Unfit("storage_failed", f"the disk of {folder} fails: {error.strerror}")
        free = disk.f_bavail * disk.f_frsize
        if free + room < min(FULL_BYTES, FULL_PART * disk.f_blocks * disk.f_frsize):
            return Unfit("disk_full", f"the disk of {folder} is full: {free >> 10} KiB are free")
    return None


def missing_packages(needed: Iterable[str] = NEEDED) -> Unfit | None:
    """Look whether packages that all jobs import have gone since this process imported them."""
    PathFinder.invalidate_caches()
    missing = [name for name in needed if PathFinder.find_spec(name) is None]
    if not missing:
        return None
    return Unfit("package_missing", f"no {', '.join(missing)}, which all jobs need: install flopwatch[worker] again")


def of_store(error: FlopwatchError) -> Unfit | None:
    """Return why a worker is unfit that cannot store files; None if only the database keeps it from it."""
    if isinstance(error, DiskFull):
        return Unfit("disk_full", error.detail)
    if isinstance(error, StorageFailed):
        code: UnfitCode = "store_unreachable" if isinstance(error, StoreUnreachable) else "storage_failed"
        return Unfit(code, error.detail)
    return None
