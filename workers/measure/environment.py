"""Describes the environment of a measurement: hardware, software, and settings that change speed."""

import functools
import importlib.metadata
import os
import platform
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import torch

from kernels.versions import attention_kernels
from workers.measure import nvml
from workers.measure.host_memory import host_memory

CHECKOUT = Path(__file__).resolve().parents[2]
VARIABLES = (
    *("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING", "CUDA_VISIBLE_DEVICES"),
    *("CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"),
    *("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "KMP_BLOCKTIME", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "OMP_PROC_BIND"),
    *("LD_PRELOAD", "MALLOC_CONF"),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING"),
    *("TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_MAX_AUTOTUNE", "TORCH_COMPILE_DISABLE", "TRITON_CACHE_DIR"),
)
"""Environment variables that change what is measured; recorded where set."""
VARIABLE_PREFIXES = ("NCCL_", "GLOO_")


def fingerprint(device: torch.device, *others: torch.device) -> dict[str, Any]:
    """Return the known facts about this host and process, JSON-ready; unknown facts are None.

    Call it after precision and threads are set, since it records them. `others` are further devices of the same unit.
    """
    return {
        "host": host(),
        "software": software() | ({"nccl": _nccl_version()} if device.type == "cuda" else {}),
        "device": _facts(device),
        "other_devices": [_facts(other) for other in others],
        "attention_kernels": attention_kernels(device),
        "threads": {"intra_op": torch.get_num_threads(), "inter_op": torch.get_num_interop_threads()},
        "settings": {
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        },
        "variables": variables(),
    }


def device_name(device: torch.device) -> str:
    """Return a device's name for tables: the GPU's name from its driver, or the CPU's model."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return str(host()["cpu"])


def device_key(device: torch.device, count: int = 1) -> str:
    """Return number and model of the measured devices, "1x NVIDIA H200"; for a CPU the number is that of torch's
    threads.

    Results of one case with one device key can be compared.
    """
    number = count if device.type == "cuda" else torch.get_num_threads()
    return f"{number}x {device_name(device)}"


def gpu_by_nvml(device: torch.device) -> nvml.Gpu | None:
    """NVML's view of a torch device; None for a CPU, without NVML, and for a device that NVML does not know."""
    if device.type != "cuda":
        return None
    return nvml.find_gpu(str(torch.cuda.get_device_properties(device).uuid), os.environ.get("CUDA_VISIBLE_DEVICES"))


def variables() -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name in VARIABLES or name.startswith(VARIABLE_PREFIXES)
    }


@functools.cache
def host() -> dict[str, Any]:
    """Describe the machine. It does not change while it runs, so it is read once per process."""
    processors = _read("/proc/cpuinfo")
    fields = [line.partition(":") for line in processors.splitlines()]
    values = [(name.strip(), value.strip()) for name, _, value in fields]
    names = [value for name, value in values if name == "model name"]
    cores = _physical_cores(values)
    memory = host_memory("MemTotal")
    return {
        "hostname": socket.gethostname(),
        "system": platform.system(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cores": cores,
        "threads": os.cpu_count(),
        "usable_threads": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "cpu_quota": _read("/sys/fs/cgroup/cpu.max").strip() or None,
        "governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").strip() or None,
        "virtual": any(name == "flags" and "hypervisor" in value.split() for name, value in values),
        "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or None,
        "memory_gib": None if memory is None else round(memory / 2**30, 1),
    }


@functools.cache
def software() -> dict[str, Any]:
    """Return the versions of the software that computes, and this checkout's commit or the package's version."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "torchao": _version("torchao"),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if torch.version.cuda else None,  # type: ignore[no-untyped-call]
        "flopwatch": _version("flopwatch"),
        **_git(),
    }


def _physical_cores(values: list[tuple[str, str]]) -> int | None:
    cores = set()
    package = "0"
    for name, value in values:
        if name == "physical id":
            package = value
        elif name == "core id":
            cores.add((package, value))
    return len(cores) or None


def _git() -> dict[str, Any]:
    unknown = {"git_commit": None, "git_dirty": None}
    if not (CHECKOUT / ".git").exists() or shutil.which("git") is None:
        return unknown
    # One call for both: the branch header holds the commit, every other line is a change.
    command = ["git", "-C", str(CHECKOUT), "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return unknown
    commit = next((line.split()[-1] for line in answer if line.startswith("# branch.oid")), "(initial)")
    if commit == "(initial)":  # a repository without commits
        return unknown
    return {"git_commit": commit, "git_dirty": any(not line.startswith("#") for line in answer)}


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _nccl_version() -> str | None:
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def _facts(device: torch.device) -> dict[str, Any]:
    if device.type == "cuda":
        return _gpu(device)
    return {"type": "cpu", "name": host()["cpu"], "capability": torch.backends.cpu.get_cpu_capability()}


def _gpu(device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    facts: dict[str, Any] = {
        "type": "cuda",
        "name": properties.name,
        "uuid": str(properties.uuid),
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_mib": properties.total_memory // 2**20,
        "l2_cache_mib": properties.L2_cache_size / 2**20,
    }
    gpu = gpu_by_nvml(device)
    if gpu is None:
        words = _read("/proc/driver/nvidia/version").split()
        driver = next((word for word in words if word[:1].isdigit() and word.count(".") >= 1), None)
        return facts | {"nvml": None, "driver": driver}
    reading = gpu.read()
    clocks = {
        "sm_clock_mhz": reading.sm_clock_mhz,
        "memory_clock_mhz": reading.memory_clock_mhz,
        "temperature_c": reading.temperature_c,
    }
    topology = {"gpus_on_host": gpu.gpus_on_host(), "nvlinks": gpu.nvlinks()}
    return facts | gpu.facts() | {"at_start": clocks, "topology": topology}


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
