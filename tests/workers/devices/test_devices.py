"""Devices and their locks. Two DeviceLocks on one folder are two agents of one host, also inside one process."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from app.errors import InvalidEnvironment
from workers.devices import locks
from workers.devices.locks import DeviceLocks, Gpu, Host, Lease, discover

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
    assert len(lease.descriptors) == 3 + len(GPUS), "the host's, that of choosing, the announcement, one for each GPU"
    modes = {path.name: path.stat().st_mode & 0o777 for path in [folder, *folder.iterdir()]}
    assert (modes.pop(folder.name), modes.pop("announced")) == (0o755, 0o644)
    assert set(modes.values()) == {0o600}, "nobody else can lock it"


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


def open_descriptors() -> list[str]:
    return os.listdir("/proc/self/fd")  # noqa: PTH208


class Failing:
    """Counts the calls of a function of the operating system, and lets one of them fail."""

    def __init__(self, module: Any, name: str, fails_at: int) -> None:
        self.function = getattr(module, name)
        self.left = fails_at

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return self.function(*args, **options)


@pytest.mark.parametrize("name", ["open", "scandir", "fchmod", "flock", "fcntl"])
def test_an_error_while_locking_holds_no_lock(
    folder: Path, leases: list[Lease], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    locks = DeviceLocks(GPU_HOST, folder)
    locks.take_free().release()
    before = open_descriptors()
    module = fcntl if name in ("flock", "fcntl") else os
    for fails_at in range(1, 50):
        failing = Failing(module, name, fails_at)
        with monkeypatch.context() as patched:
            patched.setattr(module, name, failing)
            with suppress(OSError, InvalidEnvironment):
                locks.take_free().release()
            assert len(open_descriptors()) == len(before), f"call {fails_at} of {name} failed"
        if failing.left > 0:
            break
    assert failing.left > 0, "each of its calls has failed once"
    assert fails_at > 1
    leases.append(locks.take_free())
    assert (leases[0].alone, leases[0].gpus) == (True, GPUS)


class Interrupted:
    """fcntl for workers.devices, which lets somebody else act wherever flock leaves room for it.

    "The conversion is not guaranteed to be atomic: the existing lock is first removed, and then a new lock is
    established. Between these two steps, a pending lock request by another process may be granted." (flock(2))
    """

    LOCK_EX, LOCK_SH, LOCK_NB = fcntl.LOCK_EX, fcntl.LOCK_SH, fcntl.LOCK_NB

    def __init__(self, other: Callable[[], None], waits: Callable[[], None]) -> None:
        self.other = other
        self.waits = waits
        """Called before a lock is waited for that somebody else holds."""
        self.acting = False

    def flock(self, descriptor: int, operation: int) -> None:
        if not self.acting:
            self.acting = True
            if operation & self.LOCK_SH:
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            self.other()
            self.acting = False
        try:
            fcntl.flock(descriptor, operation | self.LOCK_NB)
        except BlockingIOError:
            if operation & self.LOCK_NB:
                raise
            self.waits()
            fcntl.flock(descriptor, operation)


class WithoutChoosing(DeviceLocks):
    """Control: locks whose host is converted while anybody may take it, and waits for it."""

    def take_free(self) -> Lease:
        lease = super().take_free()
        if lease.descriptors:
            os.close(lease.descriptors.pop(0))
        return lease

    def keep_only(self, lease: Lease, *, gpus: int, alone: bool) -> Lease:
        if not alone:
            locks.fcntl.flock(lease.descriptors[0], fcntl.LOCK_SH)
        return Lease(lease.gpus[:gpus], alone, lease.descriptors)


def waits_for_a_job_that_is_alone(locks: type[DeviceLocks], folder: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Let an agent start a GPU job while another starts a CPU job whenever it can; whether the first then waits.

    The keeper of the CPU job ends when the test has seen enough.
    """
    ours, others = locks(GPU_HOST, folder), locks(GPU_HOST, folder)
    kept: list[Lease] = []

    def start_cpu_job() -> None:
        if (lease := others.take_free()).alone:
            kept.append(others.keep_only(lease, gpus=0, alone=True))
        else:
            lease.release()

    free = ours.take_free()
    assert free.alone
    waits, waits_or_has_it = threading.Event(), threading.Event()

    def wait() -> None:
        waits.set()
        waits_or_has_it.set()

    monkeypatch.setattr(locks, "fcntl", Interrupted(start_cpu_job, wait))
    with ThreadPoolExecutor(1) as pool:
        keeping = pool.submit(ours.keep_only, free, gpus=1, alone=False)
        keeping.add_done_callback(lambda _: waits_or_has_it.set())
        seen = waits_or_has_it.wait(60)
        for lease in kept:
            lease.release()
        ours_kept = keeping.result(timeout=10)
    monkeypatch.setattr(locks, "fcntl", fcntl)
    assert others.take_free().alone is False
    ours_kept.release()
    assert seen
    return waits.is_set()


def test_an_agent_never_waits_for_anothers_job(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not waits_for_a_job_that_is_alone(DeviceLocks, folder, monkeypatch)


def test_control_a_host_that_is_converted_unguarded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert waits_for_a_job_that_is_alone(WithoutChoosing, folder, monkeypatch)


def test_a_host_that_a_stranger_took_is_an_error_and_no_wait(folder: Path, leases: list[Lease]) -> None:
    """Such as an agent of a former version, which knows nothing of `choosing`."""
    locks = DeviceLocks(GPU_HOST, folder)
    free = locks.take_free()
    fcntl.flock(free.descriptors[1], fcntl.LOCK_UN)
    with (folder / "host.lock").open() as strangers:
        fcntl.flock(strangers, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError):
            locks.keep_only(free, gpus=1, alone=False)
    assert free.descriptors == []
    leases.append(locks.take_free())
    assert (leases[0].alone, leases[0].gpus) == (True, GPUS)


def test_two_agents_do_not_choose_at_the_same_time(folder: Path, leases: list[Lease]) -> None:
    first, second = DeviceLocks(GPU_HOST, folder), DeviceLocks(GPU_HOST, folder)
    free = first.take_free()
    assert second.take_free() == Lease()
    leases.append(first.keep_only(free, gpus=1, alone=False))
    leases.append(second.take_free())
    assert leases[1].gpus == GPUS[1:]


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
    found(monkeypatch, Driver(*GPUS), visible)
    assert discover().gpus == tuple(GPUS[index] for index in indices)


def found(
    monkeypatch: pytest.MonkeyPatch, driver: Driver, visible: str | None = None, order: str | None = None
) -> None:
    """Let a host have this driver and these variables."""
    monkeypatch.setattr(locks, "pynvml", driver)
    for name, value in (("CUDA_VISIBLE_DEVICES", visible), ("CUDA_DEVICE_ORDER", order)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)


OLD, NEW = Gpu("GPU-old", "NVIDIA T400", 4096), Gpu("GPU-new", "NVIDIA H200", 143_771)


def test_an_index_follows_the_bus_where_cuda_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch, Driver(NEW, OLD, buses=(9, 3)), "0", "PCI_BUS_ID")
    assert discover().gpus == (OLD,)


@pytest.mark.parametrize("order", [None, "FASTEST_FIRST"])
def test_an_index_among_mixed_gpus_is_refused(monkeypatch: pytest.MonkeyPatch, order: str | None) -> None:
    found(monkeypatch, Driver(OLD, NEW), "0", order)
    with pytest.raises(InvalidEnvironment, match=r"index 0.*H200, NVIDIA T400.*CUDA_DEVICE_ORDER=PCI_BUS_ID") as caught:
        discover()
    assert "nvidia-smi -L" in str(caught.value)


@pytest.mark.parametrize(("visible", "gpus"), [(None, (OLD, NEW)), ("GPU-new", (NEW,)), ("", ())])
def test_several_models_without_an_index_are_clear(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, gpus: tuple[Gpu, ...]
) -> None:
    found(monkeypatch, Driver(OLD, NEW), visible)
    assert discover().gpus == gpus


SLICES = tuple(Gpu(f"MIG-{name}", "NVIDIA H200 MIG 1g.18gb", 16_384) for name in ("1a", "1b"))


def test_mig_instances_come_after_whole_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch, Driver(NEW, GPUS[0], instances={NEW.uuid: SLICES}))
    host = discover()
    assert host.gpus == (GPUS[0], *SLICES)
    assert host.as_devices()[2] == {
        "type": "cuda", "uuid": "MIG-1a", "name": "NVIDIA H200 MIG 1g.18gb", "memory_mib": 16_384,
    }  # fmt: skip


@pytest.mark.parametrize(("visible", "gpus"), [("MIG-1b", SLICES[1:]), ("MIG-1b,MIG-1a", SLICES[::-1]), ("MIG-1", ())])
def test_instances_are_named_by_their_uuids(
    monkeypatch: pytest.MonkeyPatch, visible: str, gpus: tuple[Gpu, ...]
) -> None:
    found(monkeypatch, Driver(NEW, instances={NEW.uuid: SLICES}), visible)
    assert discover().gpus == gpus


@pytest.mark.parametrize("visible", ["0", "GPU-new"])
def test_a_gpu_in_mig_mode_cannot_be_named_itself(monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    found(monkeypatch, Driver(NEW, instances={NEW.uuid: SLICES}), visible)
    with pytest.raises(InvalidEnvironment, match="in MIG mode"):
        discover()


def test_mig_mode_without_instances_offers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch, Driver(NEW, instances={NEW.uuid: ()}))
    assert discover().gpus == ()


def test_instances_are_locked_each_by_itself(folder: Path, leases: list[Lease]) -> None:
    former = Gpu("MIG-GPU-aaaa/1/0", "NVIDIA A100 MIG 1g.5gb", 4864)
    host = Host((*SLICES, former), 2, 1000)
    locks = DeviceLocks(host, folder)
    leases.append(locks.keep_only(locks.take_free(), gpus=1, alone=False))
    leases.append(locks.take_free())
    assert leases[1].gpus == (SLICES[1], former)


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
    found(monkeypatch, driver)
    host = discover()
    assert host.gpus == GPUS
    assert driver.open == 0, "NVML must not stay open"
    cpu, *gpus = host.as_devices()
    assert cpu == {"type": "cpu", "count": len(os.sched_getaffinity(0)), "memory_mib": host.memory_mib}
    assert gpus[0] == {"type": "cuda", "uuid": "GPU-aaaa-0", "name": "NVIDIA H200", "memory_mib": 143_771}


def test_a_gpu_that_does_not_answer_costs_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found(monkeypatch, Driver(*GPUS, lost={GPUS[1].uuid}))
    assert discover().gpus == (GPUS[0], GPUS[2])
    assert "GPU 1 of NVML's order does not answer" in caplog.text


@pytest.mark.parametrize("lost_whole", [False, True])
@pytest.mark.parametrize(
    ("visible", "indices"), [("0", [0]), ("1", []), ("2", [2]), ("1,2", [2]), ("2,0", [2, 0]), ("0,3", [0])]
)
def test_a_gpu_that_does_not_answer_keeps_its_index(
    monkeypatch: pytest.MonkeyPatch, visible: str, indices: list[int], lost_whole: bool
) -> None:
    driver = Driver(*GPUS, lost={GPUS[1].uuid})
    if not lost_whole:  # its handle and place are known
        monkeypatch.setattr(driver, "nvmlDeviceGetHandleByIndex", lambda index: GPUS[index])

        def memory(gpu: Gpu) -> Any:
            if gpu.uuid in driver.lost:
                raise Driver.NVMLError("GPU is lost")
            return SimpleNamespace(total=gpu.memory_mib << 20)

        monkeypatch.setattr(driver, "nvmlDeviceGetMemoryInfo", memory)
    found(monkeypatch, driver)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert discover().gpus == tuple(GPUS[index] for index in indices)


def test_a_host_without_a_driver_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch, Driver())
    assert discover().gpus == ()


def test_the_fake_driver_has_what_the_real_library_has() -> None:
    names = [name for name in dir(Driver) if name.lower().startswith("nvml")]
    assert len(names) > 8
    assert all(hasattr(pynvml, name) for name in names)
