"""Finds this host's devices, and locks those of a job.

Each device is locked by flock on a file of its own, so that two agents on one host never measure on one GPU at a time,
and a CPU measurement runs alone. Agents of other users cannot open these files; they read announcements
(announcements.py). A job's keeper inherits the locks and the announcement: a device is free only when no process of the
job is left.
"""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pynvml

from app.errors import InvalidEnvironment
from workers.devices.announcements import PREFIX, Others, announce, own_folder, withdraw

logger = logging.getLogger(__name__)

PCI_ORDER = "PCI_BUS_ID"
MIG = "MIG-"


@dataclass(frozen=True)
class Gpu:
    """One GPU, or one MIG instance of a GPU, as NVML names it."""

    uuid: str
    """GPU-…, or MIG-… of an instance."""
    name: str
    memory_mib: int


@dataclass(frozen=True)
class Board:
    """A physical GPU: jobs run on the GPU, or in MIG mode on its instances, of which there may be none.

    `gpu` is None if the GPU does not answer: then the board has no devices, but keeps its place, so that the indices of
    the other boards stay the same.
    """

    gpu: Gpu | None
    instances: tuple[Gpu, ...] | None = None

    @property
    def devices(self) -> tuple[Gpu, ...]:
        """Return the devices of this board that jobs can have."""
        if self.gpu is None:
            return ()
        return (self.gpu,) if self.instances is None else self.instances


@dataclass(frozen=True)
class Host:
    """A host's devices. `gpus` lists whole GPUs before MIG instances, so that jobs of several GPUs get whole ones."""

    gpus: tuple[Gpu, ...]
    cpu_count: int
    memory_mib: int

    def as_devices(self) -> list[dict[str, Any]]:
        """Return one object per device, for the worker's row."""
        cpu = {"type": "cpu", "count": self.cpu_count, "memory_mib": self.memory_mib}
        return [cpu, *({"type": "cuda", **asdict(gpu)} for gpu in self.gpus)]


def discover() -> Host:
    """Return the host's devices as NVML lists them, without touching CUDA; a host without NVIDIA's driver has no GPUs.
    CUDA_VISIBLE_DEVICES is respected.

    Raises:
        InvalidEnvironment: CUDA_VISIBLE_DEVICES is ambiguous.
    """
    memory_mib = psutil.virtual_memory().total >> 20
    gpus = _visible(_boards(), os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER"))
    gpus.sort(key=lambda gpu: gpu.uuid.startswith(MIG))
    return Host(gpus=tuple(gpus), cpu_count=len(os.sched_getaffinity(0)), memory_mib=memory_mib)


def _boards() -> list[Board]:
    """Return the physical GPUs in the order of their places on the PCI bus."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        logger.info("no GPUs: %s", error)
        return []
    try:
        boards = []
        place = (-1, -1, -1)
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                pci = pynvml.nvmlDeviceGetPciInfo(handle)
                place = (pci.domain, pci.bus, pci.device)
                board = Board(_gpu(handle), _instances(handle))
            except pynvml.NVMLError as error:
                logger.warning("GPU %s of NVML's order does not answer and is left out: %s", index, error)
                # A GPU whose place is unknown stays behind the one before it: NVML mostly follows the bus.
                board = Board(None)
            boards.append((place, index, board))
        return [board for _, _, board in sorted(boards, key=lambda entry: entry[:2])]
    finally:
        pynvml.nvmlShutdown()


def _gpu(handle: Any) -> Gpu:
    memory_mib = pynvml.nvmlDeviceGetMemoryInfo(handle).total >> 20
    return Gpu(pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetName(handle), memory_mib)


def _instances(handle: Any) -> tuple[Gpu, ...] | None:
    """Return the MIG instances of a GPU; None if it is not in MIG mode."""
    try:
        current, _pending = pynvml.nvmlDeviceGetMigMode(handle)
    except pynvml.NVMLError:  # this model does not support MIG
        return None
    if current != pynvml.NVML_DEVICE_MIG_ENABLE:
        return None
    found = []
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            instance = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except pynvml.NVMLError:  # there is no instance at this index
            continue
        found.append(_gpu(instance))
    return tuple(found)


def _visible(boards: Sequence[Board], names: str | None, order: str | None) -> list[Gpu]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names, by index or by the beginning of a UUID; all if it is not set.

    This follows CUDA: the first unknown name ends the list, and a GPU that is named twice makes it empty.
    https://docs.nvidia.com/cuda/cuda-c-programming-guide/#env-vars
    """
    if names is None:
        return _devices(boards)
    chosen: list[Gpu] = []
    for name in (part.strip() for part in names.split(",")):
        if name.isdigit():
            if int(name) < len(boards) and boards[int(name)].gpu is None:
                continue  # this GPU does not answer; the log says so
            found = [_at(boards, int(name), order)] if int(name) < len(boards) else []
        else:
            found = [gpu for gpu in _devices(boards) if name and gpu.uuid.startswith(name)]
            if not found and any(name and gpu.uuid.startswith(name) for gpu in _physical(boards)):
                raise InvalidEnvironment(_IN_MIG_MODE.format(name=name))
        if len(found) != 1:
            break
        if found[0] in chosen:
            return []
        chosen += found
    return chosen


_IN_MIG_MODE = (
    "CUDA_VISIBLE_DEVICES names {name}, a GPU in MIG mode. Name its instances instead, by the UUIDs that begin with"
    " MIG- (nvidia-smi -L lists them), or unset it to offer all."
)
_AMBIGUOUS = (
    "CUDA_VISIBLE_DEVICES names the index {index}, but this host has GPUs of several models ({models}), and CUDA puts"
    " the fastest first unless CUDA_DEVICE_ORDER says otherwise. Set CUDA_DEVICE_ORDER=PCI_BUS_ID, the order of"
    " nvidia-smi, or name GPUs by their UUIDs (nvidia-smi -L lists them)."
)


def _devices(boards: Iterable[Board]) -> list[Gpu]:
    return [gpu for board in boards for gpu in board.devices]


def _physical(boards: Iterable[Board]) -> list[Gpu]:
    """Return the GPUs that answer, including those in MIG mode."""
    return [board.gpu for board in boards if board.gpu is not None]


def _at(boards: Sequence[Board], index: int, order: str | None) -> Gpu:
    """Return the GPU that CUDA means by an index. CUDA also orders GPUs of one model by their places on the bus.

    Raises:
        InvalidEnvironment: the order is by speed, and only CUDA knows how fast each GPU is.
    """
    models = sorted({gpu.name for gpu in _physical(boards)})
    if order != PCI_ORDER and len(models) > 1:
        raise InvalidEnvironment(_AMBIGUOUS.format(index=index, models=", ".join(models)))
    if boards[index].instances is not None:
        raise InvalidEnvironment(_IN_MIG_MODE.format(name=f"the index {index}"))
    gpu = boards[index].gpu
    assert gpu is not None
    return gpu


@dataclass
class Lease:
    """Locked devices of one job; `descriptors` go to its keeper."""

    gpus: tuple[Gpu, ...] = ()
    alone: bool = False
    descriptors: list[int] = field(default_factory=list)

    def release(self) -> None:
        """Close our copies of the locks. A keeper may still hold its own."""
        while self.descriptors:
            os.close(self.descriptors.pop())


def lock_folder() -> Path:
    """Return the folder of this user's device locks."""
    return Path(tempfile.gettempdir()) / f"{PREFIX}{os.geteuid()}"


class DeviceLocks:
    """The host's locks. It never waits for a lock: a locked device is not free now.

    A job that runs alone locks the file `host` exclusively, other jobs share the lock. The agent knows only after the
    claim which of the two a job needs, and flock cannot convert a lock in one step: it releases the lock first, and
    then another process may take it for hours. So an agent holds the lock `choosing` from its look at the locks until
    it has reduced them to what the job needs.

    Locks exclude agents of one user. Agents of other users exclude each other by announcements: an agent announces that
    it is choosing before it looks whether others are, so of two that begin at once at most one goes on.
    """

    def __init__(self, host: Host, folder: Path | None = None) -> None:
        self._host = host
        self._folder = folder or lock_folder()
        self._others = Others(self._folder.parent)
        with own_folder(self._folder):  # raises at once if the folder cannot be used
            pass

    def take_free(self, *, afresh: bool = True) -> Lease:
        """Lock everything that is free: every free GPU, and the host, exclusively if nobody else holds it, otherwise
        shared.

        A lease without descriptors means that another job has the host alone, or that another agent is choosing.

        Args:
            afresh: list other users' folders again, instead of reading only the known ones. Without it the lease costs
                less and is mostly right, but must not be given to a job.

        Raises:
            InvalidEnvironment: the folder for locks cannot be used.
            OSError: no descriptor is left, or the disk is full. No lock is held then.
        """
        lease = Lease()
        try:
            # The folder is made at every call, because hosts clean their folders for temporary files.
            with own_folder(self._folder) as folder:
                self._lock_for_own_user(folder, lease)
                if lease.descriptors:
                    self._agree_with_others(folder, lease, afresh)
        except BaseException:
            # A lock that is never released would stop every agent of this host.
            lease.release()
            raise
        return lease

    def _lock_for_own_user(self, folder: int, lease: Lease) -> None:
        choosing = _lock(folder, "choosing", fcntl.LOCK_EX)
        if choosing is None:
            return
        lease.descriptors.append(choosing)
        alone = _lock(folder, "host", fcntl.LOCK_EX)
        host = alone if alone is not None else _lock(folder, "host", fcntl.LOCK_SH)
        if host is None:
            lease.release()
            return
        lease.descriptors.append(host)
        lease.alone = alone is not None
        free = []
        for gpu in self._host.gpus:
            # UUIDs of MIG instances in the old format contain slashes.
            descriptor = _lock(folder, gpu.uuid.replace("/", "_"), fcntl.LOCK_EX)
            if descriptor is not None:
                free.append(gpu)
                lease.descriptors.append(descriptor)
        lease.gpus = tuple(free)

    def _agree_with_others(self, folder: int, lease: Lease, afresh: bool) -> None:
        """Announce the devices of the lease, and remove from it those that agents of other users have."""
        announcement = announce(folder, ["choosing", "host", "alone", *(gpu.uuid for gpu in lease.gpus)])
        lease.descriptors.append(announcement)
        if afresh:
            self._others.list_afresh()  # after our announcement, which later agents see
        theirs = self._others.have(["choosing", "host", "alone", *(gpu.uuid for gpu in lease.gpus)])
        if theirs & {"choosing", "alone"}:
            lease.release()
            lease.gpus, lease.alone = (), False
            return
        lease.alone = lease.alone and "host" not in theirs
        taken = [gpu for gpu in lease.gpus if gpu.uuid in theirs]
        withdraw(announcement, [gpu.uuid for gpu in taken] + ([] if lease.alone else ["alone"]))
        _without(lease, taken)

    def keep_only(self, lease: Lease, *, gpus: int, alone: bool) -> Lease:
        """Release all but the first `gpus` GPUs, and share the host unless `alone`; then others may choose.

        Raises:
            BlockingIOError: a process that does not use `choosing` has taken the host. The lease has released all
                locks.
        """
        choosing, host, *locks, announcement = lease.descriptors
        if not alone:
            try:
                fcntl.flock(host, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                lease.release()
                raise
        for descriptor in locks[gpus:]:
            lease.descriptors.remove(descriptor)
            os.close(descriptor)
        given_back = [gpu.uuid for gpu in lease.gpus[gpus:]]
        withdraw(announcement, [*given_back, *([] if alone else ["alone"]), "choosing"])
        os.close(choosing)
        return Lease(lease.gpus[:gpus], alone, [host, *locks[:gpus], announcement])


def _without(lease: Lease, taken: Sequence[Gpu]) -> None:
    """Release the locks of these GPUs."""
    choosing, host, *locks, announcement = lease.descriptors
    kept = []
    for gpu, descriptor in zip(lease.gpus, locks, strict=True):
        if gpu in taken:
            os.close(descriptor)
        else:
            kept.append(descriptor)
    lease.gpus = tuple(gpu for gpu in lease.gpus if gpu not in taken)
    lease.descriptors = [choosing, host, *kept, announcement]


def _lock(folder: int, name: str, operation: int) -> int | None:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(f"{name}.lock", flags, 0o600, dir_fd=folder)
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
