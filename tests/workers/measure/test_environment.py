import json
import os
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.workers.nvml import NVMLError, told
from workers.measure import environment, nvml

CPU = torch.device("cpu")


def test_the_fingerprint_names_host_software_and_device() -> None:
    facts = json.loads(json.dumps(environment.fingerprint(CPU)))
    assert facts["host"]["hostname"] == socket.gethostname()
    assert facts["host"]["threads"] == os.cpu_count()
    assert facts["host"]["cpu"] == facts["device"]["name"] == environment.device_name(CPU)
    assert facts["software"]["torch"] == torch.__version__
    assert facts["software"]["python"].count(".") == 2
    assert facts["threads"]["intra_op"] == torch.get_num_threads()
    assert facts["settings"]["float32_matmul_precision"] == torch.get_float32_matmul_precision()


def test_changed_files_make_a_checkout_dirty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=Test", "-c", "user.email=test@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    monkeypatch.setattr(environment, "CHECKOUT", tmp_path)
    assert environment._git() == {"git_commit": None, "git_dirty": None}
    git("init")
    assert environment._git() == {"git_commit": None, "git_dirty": None}
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-m", "First")
    clean = environment._git()
    assert clean["git_dirty"] is False
    assert len(clean["git_commit"]) == 40
    (tmp_path / "file").write_text("two")
    assert environment._git() == clean | {"git_dirty": True}


NVML = SimpleNamespace(
    NVMLError=NVMLError,
    NVML_CLOCK_SM=1,
    NVML_CLOCK_MEM=2,
    NVML_TEMPERATURE_GPU=0,
    NVML_NVLINK_MAX_LINKS=18,
    nvmlDeviceGetHandleByUUID=lambda uuid: told(int(uuid[-1]), uuid in ("GPU-0", "GPU-1")),
    nvmlDeviceGetCount=lambda: 2,
    nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}",
    nvmlDeviceGetClockInfo=lambda handle, clock: told({1: 1980, 2: 3201}[clock], handle == 0),
    nvmlDeviceGetPowerUsage=lambda _: 350_500,
    nvmlDeviceGetComputeRunningProcesses=lambda _: [SimpleNamespace(pid=4711)],
    nvmlDeviceGetUtilizationRates=lambda handle: told(SimpleNamespace(gpu=93, memory=40), handle == 0),
    nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(total=80 << 30, used=12 << 30),
    nvmlDeviceGetCurrentClocksThrottleReasons=lambda _: 0x04 | 0x40 | 0x01,
    nvmlSystemGetDriverVersion=lambda: "580.1",
    nvmlDeviceGetNvLinkState=lambda _, link: told(1, link != 4),
)
"""Two GPUs; the second knows nothing but its UUID."""
HANDLES = {"GPU-0": 0, "GPU-1": 1, "MIG-10": 10, "MIG-11": 11, "MIG-GPU-0/1/0": 10}
MIG_NVML = SimpleNamespace(**vars(NVML))
"""The first GPU is in MIG mode and has the instances 10 and 11, which know their processes only."""
MIG_NVML.nvmlDeviceGetHandleByUUID = lambda uuid: told(HANDLES.get(uuid), uuid in HANDLES)
MIG_NVML.nvmlDeviceGetDeviceHandleFromMigDeviceHandle = lambda handle: told(0, handle >= 10)
MIG_NVML.nvmlDeviceGetUUID = lambda handle: f"MIG-{handle}" if handle >= 10 else f"GPU-{handle}"
MIG_NVML.nvmlDeviceGetComputeRunningProcesses = lambda handle: [SimpleNamespace(pid=handle)]


def test_nvml_tells_what_it_knows_and_none_else() -> None:
    gpu = nvml.find_gpu("0", library=lambda: NVML)
    reading = gpu.read()
    assert (reading.sm_clock_mhz, reading.memory_clock_mhz, reading.power_w) == (1980, 3201, 350.5)
    assert reading.process_ids == {4711}
    assert reading.memory_used_mib == 12 << 10
    assert reading.temperature_c is None, "the library lacks the function"
    assert gpu.facts()["driver"] == "580.1"
    assert (gpu.nvlinks(), gpu.gpus_on_host()) == (4, 2)
    silent = nvml.find_gpu("1", library=lambda: NVML)
    assert silent.read().sm_clock_mhz is None, "the device refuses to tell"


def test_how_busy_a_gpu_is_in_plain_values() -> None:
    gpu = nvml.find_gpu("0", library=lambda: NVML)
    assert gpu.load() == {
        "utilisation_percent": 93,
        "memory_used_mib": 12 * 1024,
        "temperature_c": None,
        "power_w": 350.5,
        "sm_clock_mhz": 1980,
        "memory_clock_mhz": 3201,
        "throttling": ["software power cap", "hardware thermal slowdown"],
    }
    instance = nvml.find_gpu("10", library=lambda: MIG_NVML)
    assert instance.load()["utilisation_percent"] is None, "its board is busy with others' work, too"


@pytest.mark.parametrize(
    ("uuid", "visible", "expected"),
    [
        ("10", None, "MIG-10"),
        ("10", "MIG-10", "MIG-10"),
        ("0", "MIG-11", "MIG-11"),
        ("0", "MIG-GPU-0/1/0", "MIG-10"),
        ("11", "MIG-1", "MIG-11"),
        ("0", "GPU-0", "GPU-0"),
        ("1", "1", "GPU-1"),
        ("12", None, None),
    ],
)
def test_a_mig_instance_is_found_whichever_uuid_cuda_gives(uuid, visible, expected) -> None:
    gpu = nvml.find_gpu(uuid, visible, lambda: MIG_NVML)
    assert (None if gpu is None else gpu.uuid) == expected


def test_what_a_mig_instance_does_not_know_its_board_tells() -> None:
    gpu = nvml.find_gpu("10", library=lambda: MIG_NVML)
    reading = gpu.read()
    assert (reading.sm_clock_mhz, reading.memory_clock_mhz, reading.process_ids) == (1980, 3201, {10})


def test_nvml_may_be_absent_or_not_know_the_device() -> None:
    assert nvml.find_gpu("0", library=lambda: None) is None
    assert nvml.find_gpu("7", library=lambda: NVML) is None
    assert environment.gpu_by_nvml(CPU) is None


@pytest.mark.gpu
def test_the_fingerprint_of_a_gpu() -> None:
    device = torch.device("cuda", 0)
    facts = json.loads(json.dumps(environment.fingerprint(device)))
    assert facts["device"]["name"] == torch.cuda.get_device_name() == environment.device_name(device)
    assert facts["device"]["memory_mib"] > 1000
    assert facts["device"]["driver"]
    assert facts["software"]["nccl"]
    gpu = environment.gpu_by_nvml(device)
    if gpu is not None:
        assert facts["device"]["power_limit_w"] > 0
        assert gpu.read().sm_clock_mhz


def test_only_variables_that_matter_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("OMP_NUM_THREADS", "3"), ("NCCL_DEBUG", "WARN"), ("SECRET_TOKEN", "hunter2")):
        monkeypatch.setenv(name, value)
    recorded = environment.variables()
    assert (recorded["OMP_NUM_THREADS"], recorded["NCCL_DEBUG"]) == ("3", "WARN")
    assert "SECRET_TOKEN" not in recorded
