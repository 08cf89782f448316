"""Finding a host's devices, as NVML lists them."""

import os
from types import SimpleNamespace
from typing import Any

import pytest

from app.errors import CannotRunHere
from tests.workers.nvml import NVMLError, told
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
    discovered(monkeypatch, driver(*GPUS), visible)
    assert discover().gpus == tuple(GPUS[index] for index in indices)


def discovered(monkeypatch, library, visible=None, order=None) -> None:
    """Let a host have this driver and these variables."""
    monkeypatch.setattr(discovery, "pynvml", library)
    for name, value in (("CUDA_VISIBLE_DEVICES", visible), ("CUDA_DEVICE_ORDER", order)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)


OLD, NEW = Gpu("GPU-old", "NVIDIA T400", 4096), Gpu("GPU-new", "NVIDIA H200", 143_771)


def test_an_index_follows_the_bus_where_cuda_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    discovered(monkeypatch, driver(NEW, OLD, buses=(9, 3)), "0", "PCI_BUS_ID")
    assert discover().gpus == (OLD,)


@pytest.mark.parametrize("order", [None, "FASTEST_FIRST"])
def test_an_index_among_mixed_gpus_is_refused(monkeypatch: pytest.MonkeyPatch, order: str | None) -> None:
    discovered(monkeypatch, driver(OLD, NEW), "0", order)
    with pytest.raises(CannotRunHere, match=r"index 0.*H200, NVIDIA T400.*CUDA_DEVICE_ORDER=PCI_BUS_ID") as caught:
        discover()
    assert "nvidia-smi -L" in str(caught.value)


SLICES = tuple(Gpu(f"MIG-{name}", "NVIDIA H200 MIG 1g.18gb", 16_384) for name in ("1a", "1b"))


def test_mig_instances_come_after_whole_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    discovered(monkeypatch, driver(NEW, GPUS[0], instances={NEW.uuid: SLICES}))
    host = discover()
    assert host.gpus == (GPUS[0], *SLICES)
    assert host.as_devices()[2] == {
        "type": "cuda", "uuid": "MIG-1a", "name": "NVIDIA H200 MIG 1g.18gb", "memory_mib": 16_384,
    }  # fmt: skip


@pytest.mark.parametrize(("visible", "gpus"), [("MIG-1b", SLICES[1:]), ("MIG-1b,MIG-1a", SLICES[::-1]), ("MIG-1", ())])
def test_instances_are_named_by_their_uuids(monkeypatch, visible, gpus) -> None:
    discovered(monkeypatch, driver(NEW, instances={NEW.uuid: SLICES}), visible)
    assert discover().gpus == gpus


@pytest.mark.parametrize("visible", ["0", "GPU-new"])
def test_a_gpu_in_mig_mode_cannot_be_named_itself(monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    discovered(monkeypatch, driver(NEW, instances={NEW.uuid: SLICES}), visible)
    with pytest.raises(CannotRunHere, match="in MIG mode"):
        discover()


def test_mig_mode_without_instances_offers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    discovered(monkeypatch, driver(NEW, instances={NEW.uuid: ()}))
    assert discover().gpus == ()


def driver(*gpus, buses=(), instances=None, lost=()) -> Any:
    """NVML with these GPUs, in its own order; without any, as where there is no driver.

    buses: each GPU's place on the PCI bus. instances: by UUID, those of GPUs in MIG mode. lost: UUIDs of GPUs that
    have fallen off the bus. Its `uses` are how often it has been opened and not closed.
    """
    of_mig, places = instances or {}, buses or range(len(gpus))
    uses: list[None] = []

    def instance(gpu: Gpu, index: int) -> Gpu | None:
        there = dict(zip(range(0, 7, 2), of_mig[gpu.uuid], strict=False))  # some indices have none
        return told(there.get(index), index in there)

    return SimpleNamespace(
        uses=uses,
        NVMLError=NVMLError,
        NVML_DEVICE_MIG_ENABLE=1,
        nvmlInit=lambda: uses.append(told(None, bool(gpus))),
        nvmlShutdown=uses.pop,
        nvmlDeviceGetCount=lambda: len(gpus),
        nvmlDeviceGetHandleByIndex=lambda index: told(gpus[index], gpus[index].uuid not in lost),
        nvmlDeviceGetPciInfo=lambda gpu: SimpleNamespace(domain=0, bus=places[gpus.index(gpu)], device=0),
        nvmlDeviceGetMigMode=lambda gpu: told([int(gpu.uuid in of_mig), 1], instances is not None),
        nvmlDeviceGetMaxMigDeviceCount=lambda _: 7,
        nvmlDeviceGetMigDeviceHandleByIndex=instance,
        nvmlDeviceGetMemoryInfo=lambda gpu: SimpleNamespace(total=(gpu.memory_mib << 20) + 1),
        nvmlDeviceGetUUID=lambda gpu: gpu.uuid,
        nvmlDeviceGetName=lambda gpu: gpu.name,
    )


def test_what_nvml_tells_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    library = driver(*GPUS)
    discovered(monkeypatch, library)
    host = discover()
    assert host.gpus == GPUS
    assert library.uses == [], "NVML must not stay open"
    cpu, *gpus = host.as_devices()
    assert cpu == {"type": "cpu", "count": len(os.sched_getaffinity(0)), "memory_mib": host.memory_mib}
    assert gpus[0] == {"type": "cuda", "uuid": "GPU-aaaa-0", "name": "NVIDIA H200", "memory_mib": 143_771}


@pytest.mark.parametrize("lost_whole", [False, True])
@pytest.mark.parametrize(
    ("visible", "indices"), [("0", [0]), ("1", []), ("2", [2]), ("1,2", [2]), ("2,0", [2, 0]), ("0,3", [0])]
)
def test_a_gpu_that_does_not_answer_keeps_its_index(monkeypatch, caplog, visible, indices, lost_whole) -> None:
    library = driver(*GPUS, lost={GPUS[1].uuid} if lost_whole else ())
    if not lost_whole:  # its handle and place are known
        library.nvmlDeviceGetMemoryInfo = lambda gpu: SimpleNamespace(total=told(gpu.memory_mib << 20, gpu != GPUS[1]))
    discovered(monkeypatch, library)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert discover().gpus == tuple(GPUS[index] for index in indices)
    assert "GPU 1 of NVML's order does not answer" in caplog.text


def test_a_host_without_a_driver_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    discovered(monkeypatch, driver())
    assert discover().gpus == ()
