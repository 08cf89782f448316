"""Finds this host's devices through NVML, without touching CUDA."""

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psutil
import pynvml

from app.errors import CannotRunHere

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
    CUDA_VISIBLE_DEVICES is respected. Raises CannotRunHere: CUDA_VISIBLE_DEVICES is ambiguous."""
    memory_mib = psutil.virtual_memory().total >> 20
    gpus = _visible(_boards(), os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER"))
    gpus.sort(key=lambda gpu: gpu.uuid.startswith(MIG))
    return Host(gpus=tuple(gpus), cpu_count=len(os.sched_getaffinity(0)), memory_mib=memory_mib)


def has_gpu() -> bool:
    """Tell whether NVML lists a GPU on this host, whatever CUDA_VISIBLE_DEVICES lets a process see."""
    return bool(_boards())


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
    instances = []
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            instance = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except pynvml.NVMLError:  # there is no instance at this index
            continue
        instances.append(_gpu(instance))
    return tuple(instances)


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
            matching = [_at(boards, int(name), order)] if int(name) < len(boards) else []
        else:
            matching = [gpu for gpu in _devices(boards) if name and gpu.uuid.startswith(name)]
            if not matching and any(name and gpu.uuid.startswith(name) for gpu in _physical(boards)):
                raise CannotRunHere(_IN_MIG_MODE.format(name=name))
        if len(matching) != 1:
            break
        if matching[0] in chosen:
            return []
        chosen += matching
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
    """Return the GPU that CUDA means by an index. CUDA also orders GPUs of one model by their places on the bus. Raises
    CannotRunHere: the order is by speed, and only CUDA knows how fast each GPU is."""
    models = sorted({gpu.name for gpu in _physical(boards)})
    if order != PCI_ORDER and len(models) > 1:
        raise CannotRunHere(_AMBIGUOUS.format(index=index, models=", ".join(models)))
    if boards[index].instances is not None:
        raise CannotRunHere(_IN_MIG_MODE.format(name=f"the index {index}"))
    gpu = boards[index].gpu
    assert gpu is not None
    return gpu
