"""Finding a host's devices, as NVML lists them."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from app.errors import CannotRunHere
from workers.devices import discovery
from workers.devices.discovery import Gpu, discover

GPUS = tuple(Gpu(f"GPU-{name}", "NVIDIA H200", 143_771) for name in ("aaaa-0", "aabb-1", "cccc-2"))


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
        ("0,0", []),
        ("GPU-cccc", [2]),
        ("GPU-aabb-1,0", [1, 0]),
        ("GPU-dddd,0", []),
        ("GPU-aa,0", []),
        ("2,,0", [2]),
    ],
)
def test_cuda_visible_devices_is_obeyed(monkeypatch: pytest.MonkeyPatch, visible: str | None, indices: Any) -> None:
    discovered(monkeypatch, Driver(*GPUS), visible)
    assert discover().gpus == tuple(GPUS[index] for index in indices)


def discovered(
    monkeypatch: pytest.MonkeyPatch, driver: Driver, visible: str | None = None, order: str | None = None
) -> None:
    """Let a host have this driver and these variables."""
    monkeypatch.setattr(discovery, "pynvml", driver)
    for name, value in (("CUDA_VISIBLE_DEVICES", visible), ("CUDA_DEVICE_ORDER", order)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)


OLD, NEW = Gpu("GPU-old", "NVIDIA T400", 4096), Gpu("GPU-new", "NVIDIA H200", 143_771)


def test_an_index_follows_the_bus_where_cuda_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    discovered(monkeypatch, Driver(NEW, OLD, buses=(9, 3)), "0", "PCI_BUS_ID")
    assert discover().gpus == (OLD,)


@pytest.mark.parametrize("order", [None, "FASTEST_FIRST"])
def test_an_index_among_mixed_gpus_is_refused(monkeypatch: pytest.MonkeyPatch, order: str | None) -> None:
    discovered(monkeypatch, Driver(OLD, NEW), "0", order)
    with pytest.raises(CannotRunHere, match=r"index 0.*H200, NVIDIA T400.*CUDA_DEVICE_ORDER=PCI_BUS_ID") as caught:
        discover()
    assert "nvidia-smi -L" in str(caught.value)


@pytest.mark.parametrize(("visible", "gpus"), [(None, (OLD, NEW)), ("GPU-new", (NEW,)), ("", ())])
def test_several_models_without_an_index_are_clear(monkeypatch, visible, gpus) -> None:
    discovered(monkeypatch, Driver(OLD, NEW), visible)
    assert discover().gpus == gpus


SLICES = tuple(Gpu(f"MIG-{name}", "NVIDIA H200 MIG 1g.18gb", 16_384) for name in ("1a", "1b"))


def test_mig_instances_come_after_whole_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    discovered(monkeypatch, Driver(NEW, GPUS[0], instances={NEW.uuid: SLICES}))
    host = discover()
    assert host.gpus == (GPUS[0], *SLICES)
    assert host.as_devices()[2] == {
        "type": "cuda", "uuid": "MIG-1a", "name": "NVIDIA H200 MIG 1g.18gb", "memory_mib": 16_384,
    }  # fmt: skip


@pytest.mark.parametrize(("visible", "gpus"), [("MIG-1b", SLICES[1:]), ("MIG-1b,MIG-1a", SLICES[::-1]), ("MIG-1", ())])
def test_instances_are_named_by_their_uuids(monkeypatch, visible, gpus) -> None:
    discovered(monkeypatch, Driver(NEW, instances={NEW.uuid: SLICES}), visible)
    assert discover().gpus == gpus


@pytest.mark.parametrize("visible", ["0", "GPU-new"])
def test_a_gpu_in_mig_mode_cannot_be_named_itself(monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    discovered(monkeypatch, Driver(NEW, instances={NEW.uuid: SLICES}), visible)
    with pytest.raises(CannotRunHere, match="in MIG mode"):
        discover()


def test_mig_mode_without_instances_offers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    discovered(monkeypatch, Driver(NEW, instances={NEW.uuid: ()}))
    assert discover().gpus == ()


class Driver:
    """NVML with these GPUs, in its own order; without any, as where there is no driver.

    buses: each GPU's place on the PCI bus. instances: by UUID, those of GPUs in MIG mode. lost: UUIDs of GPUs that
    have fallen off the bus.
    """

    NVML_DEVICE_MIG_ENABLE = 1

    class NVMLError(Exception):
        """As pynvml's."""

    def __init__(
        self,
        *gpus: Gpu,
        buses: Sequence[int] = (),
        instances: Mapping[str, Sequence[Gpu]] | None = None,
        lost: Collection[str] = (),
    ) -> None:
        self.gpus = gpus
        self.buses = buses or range(len(gpus))
        self.instances = instances
        self.lost = lost
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
        if self.gpus[index].uuid in self.lost:
            raise self.NVMLError("GPU is lost")
        return self.gpus[index]

    def nvmlDeviceGetPciInfo(self, gpu: Gpu) -> Any:  # noqa: N802
        return SimpleNamespace(domain=0, bus=self.buses[self.gpus.index(gpu)], device=0)

    def nvmlDeviceGetMigMode(self, gpu: Gpu) -> list[int]:  # noqa: N802
        if self.instances is None:
            raise self.NVMLError("Not Supported")
        return [int(gpu.uuid in self.instances), 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, _gpu: Gpu) -> int:  # noqa: N802
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: Gpu, index: int) -> Gpu:  # noqa: N802
        # Instances are not made in the order of their indices.
        there = {2 * position: one for position, one in enumerate((self.instances or {})[gpu.uuid])}
        if index not in there:
            raise self.NVMLError("Not Found")
        return there[index]

    def nvmlDeviceGetMemoryInfo(self, gpu: Gpu) -> Any:  # noqa: N802
        return SimpleNamespace(total=(gpu.memory_mib << 20) + 1)

    def nvmlDeviceGetUUID(self, gpu: Gpu) -> str:  # noqa: N802
        return gpu.uuid

    def nvmlDeviceGetName(self, gpu: Gpu) -> str:  # noqa: N802
        return gpu.name


def test_what_nvml_tells_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(*GPUS)
    discovered(monkeypatch, driver)
    host = discover()
    assert host.gpus == GPUS
    assert driver.open == 0, "NVML must not stay open"
    cpu, *gpus = host.as_devices()
    assert cpu == {"type": "cpu", "count": len(os.sched_getaffinity(0)), "memory_mib": host.memory_mib}
    assert gpus[0] == {"type": "cuda", "uuid": "GPU-aaaa-0", "name": "NVIDIA H200", "memory_mib": 143_771}


def test_a_gpu_that_does_not_answer_costs_no_other(monkeypatch, caplog) -> None:
    discovered(monkeypatch, Driver(*GPUS, lost={GPUS[1].uuid}))
    assert discover().gpus == (GPUS[0], GPUS[2])
    assert "GPU 1 of NVML's order does not answer" in caplog.text


@pytest.mark.parametrize("lost_whole", [False, True])
@pytest.mark.parametrize(
    ("visible", "indices"), [("0", [0]), ("1", []), ("2", [2]), ("1,2", [2]), ("2,0", [2, 0]), ("0,3", [0])]
)
def test_a_gpu_that_does_not_answer_keeps_its_index(monkeypatch, visible, indices, lost_whole) -> None:
    driver = Driver(*GPUS, lost={GPUS[1].uuid})
    if not lost_whole:  # its handle and place are known
        monkeypatch.setattr(driver, "nvmlDeviceGetHandleByIndex", lambda index: GPUS[index])

        def memory(gpu: Gpu) -> Any:
            if gpu.uuid in driver.lost:
                raise Driver.NVMLError("GPU is lost")
            return SimpleNamespace(total=gpu.memory_mib << 20)

        monkeypatch.setattr(driver, "nvmlDeviceGetMemoryInfo", memory)
    discovered(monkeypatch, driver)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert discover().gpus == tuple(GPUS[index] for index in indices)


def test_a_host_without_a_driver_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    discovered(monkeypatch, Driver())
    assert discover().gpus == ()


def test_the_fake_driver_has_what_the_real_library_has() -> None:
    names = [name for name in dir(Driver) if name.lower().startswith("nvml")]
    assert len(names) > 8
    assert all(hasattr(pynvml, name) for name in names)
