"""Queries NVML about the GPU that torch uses. Without the library, the driver or an answer, the result is None: no
function raises."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MIG = "MIG-"
THROTTLE_REASONS = {
    0x04: "software power cap",
    0x08: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
"""NVML's clock event reasons that lower the clocks; the others (idle, application clocks, display) are settings."""


@dataclass(frozen=True)
class Reading:
    """A GPU's state at one moment. A field is None if the device does not report it."""

    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    temperature_c: int | None
    power_w: float | None
    throttle_reasons: int | None
    """NVML's bit mask."""
    process_ids: frozenset[int] | None
    """Processes with a compute context, as the host numbers them."""
    memory_used_mib: float | None = None
    """Memory in use on the device by anybody: processes' tensors, contexts and libraries, and the driver itself."""


class Gpu:
    """One GPU, or one MIG instance of a GPU, as NVML shows it.

    NVML reports no clocks, throttling, power and links for an instance, so they are those of the whole board.
    """

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        # None for a whole GPU: NVML refuses its handle here.
        self._board = ask(nvml, "DeviceGetDeviceHandleFromMigDeviceHandle", handle)

    def ask(self, function: str, *arguments: Any) -> Any:
        """Return the result of `nvml<function>` for this GPU; None if the GPU or the library has none."""
        answer = ask(self._nvml, function, self._handle, *arguments)
        if answer is None and self._board is not None:
            answer = ask(self._nvml, function, self._board, *arguments)
        return answer

    def read(self) -> Reading:
        """Read the present state. Takes a few milliseconds."""
        nvml = self._nvml
        power_mw = self.ask("DeviceGetPowerUsage")
        # The board's processes do not count: others may work on its other instances without harm.
        processes = ask(nvml, "DeviceGetComputeRunningProcesses", self._handle)
        memory = ask(nvml, "DeviceGetMemoryInfo", self._handle)
        return Reading(
            sm_clock_mhz=self.ask("DeviceGetClockInfo", nvml.NVML_CLOCK_SM),
            memory_clock_mhz=self.ask("DeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
            temperature_c=self.ask("DeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
            power_w=None if power_mw is None else power_mw / 1000,
            throttle_reasons=self.ask("DeviceGetCurrentClocksThrottleReasons"),
            process_ids=None if processes is None else frozenset(process.pid for process in processes),
            memory_used_mib=None if memory is None else memory.used / 2**20,
        )

    def load(self) -> dict[str, Any]:
        """Return the GPU's present load, JSON-ready: the values of `read`, memory and utilisation.

        Utilisation is the share of the driver's last sample period (up to 1 s) in which a kernel ran; a MIG instance
        has none of its own.
        """
        present = self.read()
        rates = ask(self._nvml, "DeviceGetUtilizationRates", self._handle)
        reasons = present.throttle_reasons
        return {
            "utilisation_percent": None if rates is None else rates.gpu,
            "memory_used_mib": None if present.memory_used_mib is None else int(present.memory_used_mib),
            "temperature_c": present.temperature_c,
            "power_w": present.power_w,
            "sm_clock_mhz": present.sm_clock_mhz,
            "memory_clock_mhz": present.memory_clock_mhz,
            "throttling": None if reasons is None else [why for bit, why in THROTTLE_REASONS.items() if reasons & bit],
        }

    def facts(self) -> dict[str, Any]:
        """Return the facts that do not change during a measurement."""
        nvml = self._nvml
        limit_mw = self.ask("DeviceGetEnforcedPowerLimit")
        persistence = self.ask("DeviceGetPersistenceMode")
        pci = self.ask("DeviceGetPciInfo")
        return {
            "driver": ask(nvml, "SystemGetDriverVersion"),
            "power_limit_w": None if limit_mw is None else limit_mw / 1000,
            "max_sm_clock_mhz": self.ask("DeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM),
            "max_memory_clock_mhz": self.ask("DeviceGetMaxClockInfo", nvml.NVML_CLOCK_MEM),
            "persistence_mode": None if persistence is None else bool(persistence),
            "pci_bus_id": None if pci is None else pci.busId,
            "pcie_generation": self.ask("DeviceGetCurrPcieLinkGeneration"),
            "pcie_width": self.ask("DeviceGetCurrPcieLinkWidth"),
            "vbios": self.ask("DeviceGetVbiosVersion"),
        }

    @property
    def uuid(self) -> str | None:
        """Return the UUID as NVML writes it, with "GPU-" or "MIG-" before it."""
        uuid: str | None = self.ask("DeviceGetUUID")
        return uuid

    def gpus_on_host(self) -> int | None:
        """Return the number of the host's GPUs, this one included."""
        count: int | None = ask(self._nvml, "DeviceGetCount")
        return count

    def nvlinks(self) -> int:
        """Return the number of active NVLink connections."""
        links = range(getattr(self._nvml, "NVML_NVLINK_MAX_LINKS", 0))
        active = 0
        for link in links:
            state = self.ask("DeviceGetNvLinkState", link)
            if state is None:  # the device has neither this link nor later ones
                break
            active += bool(state)
        return active


@functools.cache
def _library() -> Any | None:
    try:
        import pynvml
    except ImportError:  # GPU hosts that only run tests have torch and pytest
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def is_available() -> bool:
    return _library() is not None


def find_gpu(uuid: str, visible: str | None = None, library: Callable[[], Any | None] = _library) -> Gpu | None:
    """Find the GPU or MIG instance that torch uses; return None if NVML is absent or does not know it. `uuid`: as torch
    prints it, without a prefix; for an instance it is the instance's or the GPU's, depending on the version of CUDA's
    cuDeviceGetUuid. `visible`: CUDA_VISIBLE_DEVICES, which resolves that: a process sees at most one instance, under
    this name. `library`: gives pynvml, or None."""
    nvml = library()
    if nvml is None:
        return None
    first = (visible or "").split(",")[0].strip()
    instance = [first] if first.startswith(MIG) else []
    names = [uuid] if uuid.startswith(("GPU-", MIG)) else [f"GPU-{uuid}", f"{MIG}{uuid}"]
    handles = (ask(nvml, "DeviceGetHandleByUUID", name) for name in (*instance, *names))
    handle = next((handle for handle in handles if handle is not None), None)
    return None if handle is None else Gpu(nvml, handle)


def is_lost(uuid: str, library: Callable[[], Any | None] = _library) -> bool:
    """Return True if the driver says that this GPU fell off the bus, or can compute nothing before it is reset."""
    nvml = library()
    if nvml is None:
        return False
    try:
        nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByUUID(uuid))
    except nvml.NVMLError as error:
        return error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED)
    return False


def ask(nvml: Any, function: str, *arguments: Any) -> Any:
    """Return the result of `nvml<function>`, or None if the library has no such function or it fails."""
    call = getattr(nvml, f"nvml{function}", None)
    if call is None:
        return None
    try:
        return call(*arguments)
    except nvml.NVMLError:
        return None
