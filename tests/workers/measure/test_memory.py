from pathlib import Path

import pytest
import torch

from tests.address_space import little_left
from workers.measure.host_memory import trim_free_memory
from workers.measure.memory import MIB, HostMemory, OutOfMemory, is_out_of_memory, memory_meter, translate_oom


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried …"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_a_lack_of_memory_is_recognised_also_as_a_cause(error: Exception) -> None:
    assert is_out_of_memory(error)
    wrapper = ValueError("the compiler failed")
    wrapper.__cause__ = error
    assert is_out_of_memory(wrapper)


@pytest.mark.parametrize(
    "error", [None, RuntimeError("CUDA error: an illegal memory access was encountered"), ValueError("out of memory")]
)
def test_other_errors_are_none(error: Exception | None) -> None:
    assert not is_out_of_memory(error)


def test_the_allocators_own_refusal_is_recognised() -> None:
    """In a process with little address space, torch's CPU allocator really fails."""
    with little_left(2**30), pytest.raises(OutOfMemory) as refused, translate_oom("making the model"):
        torch.empty(2**31)
    assert str(refused.value).startswith("out of memory in making the model: ")
    assert "8589934592 bytes" in str(refused.value)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the kernel keeps no resettable peak")
def test_host_memory_measures_growth_up_to_the_peak() -> None:
    meter = memory_meter(torch.device("cpu"))
    meter.reset()
    torch.ones(256 * MIB // 4).sum()  # freed again: the peak stays
    peak, how = meter.peak_mib()
    assert peak == pytest.approx(256, rel=0.1)
    assert how == "growth of the process's anonymous memory"
    meter.reset()
    torch.ones(64 * MIB // 4).sum()
    second, _ = meter.peak_mib()
    assert second < 128, "reset forgets an earlier peak"


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the kernel keeps no resettable peak")
def test_memory_that_is_given_back_later_does_not_lessen_the_growth() -> None:
    freed = [bytes(1000) for _ in range(50_000)]
    last = bytes(1000)  # above them: the C library keeps what is below
    del freed
    meter = HostMemory()
    trim_free_memory()
    meter.reset()
    torch.ones(64 * MIB // 4).sum()
    assert meter.peak_mib()[0] == pytest.approx(64, rel=0.1)
    del last


def test_host_memory_that_is_not_known_is_none_with_a_reason(tmp_path: Path) -> None:
    meter = HostMemory(tmp_path)
    assert meter.peak_mib() == (None, "this system does not report a process's resident memory")
    (tmp_path / "status").write_text("VmHWM:\t 2048 kB\nVmRSS:\t 1024 kB\n")
    meter = HostMemory(tmp_path)
    assert meter.peak_mib() == (1.0, "growth of the process's anonymous memory")
    assert meter.peak_mib(records=MIB // 4)[0] == 0.75
    (tmp_path / "clear_refs").mkdir()
    meter.reset()
    assert meter.peak_mib() == (None, "this system does not let a process reset the peak of its resident memory")
    (tmp_path / "clear_refs").rmdir()
    meter.reset()
    (tmp_path / "status").write_text("VmHWM:\t 1024 kB\nVmRSS:\t 1024 kB\n")
    assert meter.peak_mib() == (None, "the work fitted into memory that the process held before")


def test_pages_of_files_do_not_count(tmp_path: Path) -> None:
    """A fork touches the libraries' pages while it measures, an exec'd interpreter before."""

    def say(peak: int, now: int, files: int) -> None:
        lines = {"VmHWM": peak, "VmRSS": now, "RssAnon": now - files, "RssFile": files - 1024, "RssShmem": 1024}
        (tmp_path / "status").write_text("".join(f"{name}:\t {value} kB\n" for name, value in lines.items()))

    peaks = []
    for before, after in ((2048, 8192), (8192, 8192)):
        say(10_240 + before, 10_240 + before, before)
        meter = HostMemory(tmp_path)
        say(20_480 + after, 15_360 + after, after)
        peaks.append(meter.peak_mib())
    assert peaks == [(10.0, "growth of the process's anonymous memory")] * 2


@pytest.mark.gpu
def test_cuda_memory_is_the_peak_since_reset() -> None:
    kept = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    meter = memory_meter(torch.device("cuda"))
    meter.reset()
    before = torch.cuda.memory_allocated() / MIB
    torch.empty(128 * MIB, dtype=torch.uint8, device="cuda")
    torch.cuda.reset_peak_memory_stats()  # as a step does that logs its memory
    torch.accelerator.memory.reset_peak_memory_stats()
    peak, how = meter.peak_mib()
    assert peak == pytest.approx(before + 128)
    assert how == "allocated by torch"
    assert (meter.reserved_mib() or 0) >= peak
    del kept
