"""What this host has, and which devices a job gets.

Devices are locked by flock on a file each, so that two agents on one host never measure on one GPU at a time, and a
CPU measurement runs alone. A job's keeper inherits the locks: a device is free only when nothing of the job is left.
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

    `gpu` is None of one that does not answer: it has no devices, and keeps its place, so that the indices of the others
    mean what they meant before.
    """

    gpu: Gpu | None
    instances: tuple[Gpu, ...] | None = None

    @property
    def devices(self) -> tuple[Gpu, ...]:
        """What jobs can have of this board."""
        if self.gpu is None:
            return ()
        return (self.gpu,) if self.instances is None else self.instances


@dataclass(frozen=True)
class Host:
    """What the host offers; `gpus` lists whole GPUs before MIG instances, so that jobs of several get whole ones."""

    gpus: tuple[Gpu, ...]
    cpu_count: int
    memory_mib: int

    def as_devices(self) -> list[dict[str, Any]]:
        """For the worker's row: one object per device."""
        cpu = {"type": "cpu", "count": self.cpu_count, "memory_mib": self.memory_mib}
        return [cpu, *({"type": "cuda", **asdict(gpu)} for gpu in self.gpus)]


def most_of_one_job(gpus: Sequence[Gpu]) -> int:
    """How many of these GPUs one job can use: a CUDA process sees one MIG instance and never two."""
    whole = sum(not gpu.uuid.startswith(MIG) for gpu in gpus)
    return max(whole, min(len(gpus), 1))


def discover() -> Host:
    """Ask NVML, without touching CUDA; a host without NVIDIA's driver has no GPUs. CUDA_VISIBLE_DEVICES is obeyed.

    Raises:
        InvalidEnvironment: CUDA_VISIBLE_DEVICES does not say clearly which GPUs it means.
    """
    memory_mib = psutil.virtual_memory().total >> 20
    gpus = _visible(_boards(), os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER"))
    gpus.sort(key=lambda gpu: gpu.uuid.startswith(MIG))
    return Host(gpus=tuple(gpus), cpu_count=len(os.sched_getaffinity(0)), memory_mib=memory_mib)


def _boards() -> list[Board]:
    """The physical GPUs in the order of their places on the PCI bus."""
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
                # Of unknown place, it stays behind the one before: NVML's order is mostly that of the bus.
                board = Board(None)
            boards.append((place, index, board))
        return [board for _, _, board in sorted(boards, key=lambda entry: entry[:2])]
    finally:
        pynvml.nvmlShutdown()


def _gpu(handle: Any) -> Gpu:
    memory_mib = pynvml.nvmlDeviceGetMemoryInfo(handle).total >> 20
    return Gpu(pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetName(handle), memory_mib)


def _instances(handle: Any) -> tuple[Gpu, ...] | None:
    """The MIG instances of a GPU; None where it is not in MIG mode."""
    try:
        current, _pending = pynvml.nvmlDeviceGetMigMode(handle)
    except pynvml.NVMLError:  # this model has no MIG
        return None
    if current != pynvml.NVML_DEVICE_MIG_ENABLE:
        return None
    found = []
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            instance = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except pynvml.NVMLError:  # no instance is made at this index
            continue
        found.append(_gpu(instance))
    return tuple(found)


def _visible(boards: Sequence[Board], names: str | None, order: str | None) -> list[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES names, by index or by the beginning of a UUID; all if it is not set.

    As CUDA reads it: the first unknown name ends the list, and a GPU that is named twice makes it empty.
    https://docs.nvidia.com/cuda/cuda-c-programming-guide/#env-vars
    """
    if names is None:
        return _devices(boards)
    chosen: list[Gpu] = []
    for name in (part.strip() for part in names.split(",")):
        if name.isdigit():
            if int(name) < len(boards) and boards[int(name)].gpu is None:
                continue  # it does not answer; the log says so
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
    """The GPUs that answer, those in MIG mode too."""
    return [board.gpu for board in boards if board.gpu is not None]


def _at(boards: Sequence[Board], index: int, order: str | None) -> Gpu:
    """The GPU that an index of CUDA's means. Among GPUs of one model CUDA's order is that of the bus, too.

    Raises:
        InvalidEnvironment: the order is the fastest first, and which GPU is how fast only CUDA knows.
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
        """Close our copies of the locks; a keeper may hold its own still."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()


class DeviceLocks:
    """The host's locks. Never waits: what is locked is not free now.

    A job alone on the host holds its file `host` exclusively, others share it. Which of both a job needs is known only
    once it is claimed, and flock converts no lock in one step: it lets go of it first, and then somebody else may take
    it for hours. So an agent holds `choosing` from its look at the locks until it has kept what it needs.
    """

    def __init__(self, host: Host, folder: Path | None = None) -> None:
        self._host = host
        self._folder = folder or Path(tempfile.gettempdir()) / f"flopwatch-locks-{os.getuid()}"

    def take_free(self) -> Lease:
        """Lock all that is free: every free GPU, and the host alone if nothing else holds it, else shared.

        A lease without descriptors means that somebody has the host alone, or that another agent is choosing.
        """
        lease = Lease()
        # Every time: hosts clean their temporary folders.
        self._folder.mkdir(mode=0o700, exist_ok=True)
        choosing = self._lock("choosing", fcntl.LOCK_EX)
        if choosing is None:
            return lease
        alone = self._lock("host", fcntl.LOCK_EX)
        host = alone if alone is not None else self._lock("host", fcntl.LOCK_SH)
        if host is None:
            os.close(choosing)
            return lease
        lease.descriptors += [choosing, host]
        lease.alone = alone is not None
        free = []
        for gpu in self._host.gpus:
            # The former kind of MIG's UUIDs has slashes.
            descriptor = self._lock(gpu.uuid.replace("/", "_"), fcntl.LOCK_EX)
            if descriptor is not None:
                free.append(gpu)
                lease.descriptors.append(descriptor)
        lease.gpus = tuple(free)
        return lease

    def keep_only(self, lease: Lease, *, gpus: int, alone: bool) -> Lease:
        """Give back all but the first `gpus` GPUs, and share the host unless `alone`; then others may choose.

        Raises:
            BlockingIOError: somebody who does not know of `choosing` has taken the host. All is given back.
        """
        choosing, host, *locks = lease.descriptors
        if not alone:
            try:
                fcntl.flock(host, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                lease.release()
                raise
        for descriptor in (choosing, *locks[gpus:]):
            os.close(descriptor)
        return Lease(lease.gpus[:gpus], alone, [host, *locks[:gpus]])

    def _lock(self, name: str, operation: int) -> int | None:
        descriptor = os.open(self._folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return descriptor
