"""Devices and their locks. Two DeviceLocks on one folder are two agents of one host, also inside one process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from workers import devices
from workers.devices import DeviceLocks, Gpu, Host, Lease, discover

GPUS = tuple(Gpu(f"GPU-{name}", "NVIDIA H200", 143_771) for name in ("aaaa-0", "aabb-1", "cccc-2"))
CPU_HOST = Host((), 2, 1000)
GPU_HOST = Host(GPUS, 16, 1000)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "locks"


@pytest.fixture
def leases() -> Iterator[list[Lease]]:
    """Leases that are released at the end of the test."""
    taken: list[Lease] = []
    yield taken
    for lease in taken:
        lease.release()


def test_an_idle_host_is_taken_whole(folder: Path, leases: list[Lease]) -> None:
    lease = DeviceLocks(GPU_HOST, folder).take_free()
    leases.append(lease)
    assert lease.alone
    assert lease.gpus == GPUS
    assert len(lease.descriptors) == 1 + len(GPUS)
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("host", [CPU_HOST, GPU_HOST])
def test_nothing_is_free_beside_a_job_that_is_alone(host: Host, folder: Path, leases: list[Lease]) -> None:
    first, second = DeviceLocks(host, folder), DeviceLocks(host, folder)
    leases.append(first.keep_only(first.take_free(), gpus=0, alone=True))
    assert second.take_free() == Lease()
    leases[0].release()
    leases.append(second.take_free())
    assert leases[1].alone


def test_gpu_jobs_share_a_host_and_no_gpu(folder: Path, leases: list[Lease]) -> None:
    first, second = DeviceLocks(GPU_HOST, folder), DeviceLocks(GPU_HOST, folder)
    leases.append(first.keep_only(first.take_free(), gpus=2, alone=False))
    assert leases[0].gpus == GPUS[:2]
    leases.append(second.take_free())
    assert not leases[1].alone
    assert leases[1].gpus == GPUS[2:]
    leases[0].release()
    leases[1].release()
    leases.append(second.take_free())
    assert (leases[2].alone, leases[2].gpus) == (True, GPUS)


def test_a_process_that_inherited_a_lock_holds_it(folder: Path, leases: list[Lease]) -> None:
    locks = DeviceLocks(CPU_HOST, folder)
    lease = locks.take_free()
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=lease.descriptors) as keeper:
        lease.release()
        assert lease.descriptors == []
        assert locks.take_free() == Lease()
        keeper.communicate(b"\n")
    leases.append(locks.take_free())
    assert leases[0].alone


def test_a_cleaned_temporary_folder_stops_nobody(folder: Path, leases: list[Lease]) -> None:
    locks = DeviceLocks(GPU_HOST, folder)
    locks.take_free().release()
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    leases.append(locks.take_free())
    assert leases[-1].gpus == GPUS


def test_locks_are_not_inherited_by_accident(folder: Path, leases: list[Lease]) -> None:
    leases.append(DeviceLocks(GPU_HOST, folder).take_free())
    assert not any(os.get_inheritable(descriptor) for descriptor in leases[0].descriptors)


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("1", [1]),
        ("2,0", [2, 0]),
        (" 2 , 0 ", [2, 0]),
        ("0,7,1", [0]),
        ("GPU-cccc", [2]),
        ("GPU-aabb-1,0", [1, 0]),
        ("GPU-dddd,0", []),
    ],
)
def test_cuda_visible_devices_is_obeyed(monkeypatch: pytest.MonkeyPatch, visible: str | None, indices: Any) -> None:
    monkeypatch.setattr(devices, "_gpus", lambda: list(GPUS))
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert discover().gpus == tuple(GPUS[index] for index in indices)


class Driver:
    """NVML with these GPUs; without any, as where there is no driver."""

    class NVMLError(Exception):
        """As pynvml's."""

    def __init__(self, *gpus: Gpu) -> None:
        self.gpus = gpus
        self.open = 0

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.gpus:
            raise self.NVMLError("Driver Not Loaded")
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:  # noqa: N802
        return self.gpus[index]

    def nvmlDeviceGetMemoryInfo(self, gpu: Gpu) -> Any:  # noqa: N802
        return SimpleNamespace(total=(gpu.memory_mib << 20) + 1)

    def nvmlDeviceGetUUID(self, gpu: Gpu) -> str:  # noqa: N802
        return gpu.uuid

    def nvmlDeviceGetName(self, gpu: Gpu) -> str:  # noqa: N802
        return gpu.name


def test_what_nvml_tells_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    driver = Driver(*GPUS)
    monkeypatch.setattr(devices, "pynvml", driver)
    host = discover()
    assert host.gpus == GPUS
    assert driver.open == 0, "NVML must not stay open"
    cpu, *gpus = host.as_devices()
    assert cpu == {"type": "cpu", "count": len(os.sched_getaffinity(0)), "memory_mib": host.memory_mib}
    assert gpus[0] == {"type": "cuda", "uuid": "GPU-aaaa-0", "name": "NVIDIA H200", "memory_mib": 143_771}


def test_a_host_without_a_driver_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "pynvml", Driver())
    assert discover().gpus == ()
