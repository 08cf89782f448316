"""Measures peak memory, and recognises out-of-memory errors."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from kernels.device_events import keep_peaks, reset_peaks
from workers.measure import position
from workers.measure.errors import NotMeasured, causes_of, text_of
from workers.measure.host_memory import kib_in, trim_free_memory

MIB = 2**20
MOST_CHARACTERS = 200
"""Of an allocator's message; the CPU's has 170."""
OUT_OF_MEMORY_MESSAGES = (
    *("out of memory", "can't allocate memory", "not enough memory"),
    *("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED"),
)
"""Parts of the messages of RuntimeErrors that libraries raise when out of memory, instead of torch's own class."""


class OutOfMemory(NotMeasured):
    """The case does not fit into the device's memory; the message says in which phase."""

    outcome = "oom"


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return True if an error, or one of its causes (compilers wrap errors), means that device or host lack memory."""
    for one in causes_of(error):
        if isinstance(one, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(one, RuntimeError) and any(message in text_of(one) for message in OUT_OF_MEMORY_MESSAGES):
            return True
    return False


def short_message(error: BaseException) -> str:
    """Return an error's first words on one line, since allocators add a page of advice."""
    text = " ".join(text_of(error).split()) or type(error).__name__
    if len(text) <= MOST_CHARACTERS:
        return text
    cut = text[: MOST_CHARACTERS - 1]
    return f"{cut.rpartition(' ')[0] or cut} …"


def out_of_memory(where: str, error: BaseException) -> OutOfMemory:
    """Return the outcome of a case whose memory ran out; its step is not done any more."""
    position.step_ends()
    return OutOfMemory(f"out of memory in {where}: {short_message(error)}")


@contextmanager
def translate_oom(what: object) -> Iterator[None]:
    """Turn out-of-memory errors of the context into OutOfMemory that names `what`, such as a
    `workers.measure.timing.StepPosition` at that moment; other errors pass."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            raise out_of_memory(str(what), error) from error
        raise


class CudaMemory:
    """Peak of tensors allocated by torch's allocator on the current GPU, the model's included."""

    def __init__(self) -> None:
        keep_peaks()

    def reset(self) -> None:
        reset_peaks()

    def peak_mib(self, records: int = 0) -> tuple[float | None, str]:
        """Return the peak in MiB and how it was measured, or None and the reason why it is unknown. `records`: bytes of
        the host that are not the work's, but kept for us."""
        return torch.cuda.max_memory_allocated() / MIB, "allocated by torch"

    def now_mib(self) -> float | None:
        return torch.cuda.memory_allocated() / MIB

    def reserved_mib(self) -> float | None:
        """Return the most memory that torch's allocator held; None if torch does not manage the device's memory."""
        return torch.cuda.max_memory_reserved() / MIB


class HostMemory:
    """Growth of this process's anonymous memory from the meter's creation to its peak after `reset`.

    Create it before the model, so that the growth includes the model. Pages of files, which are the code of libraries,
    do not count: an exec'd interpreter has touched most of them when it starts, and a fork touches them while it
    measures. The kernel records only the peak of all resident pages. Pages of files stay once they are resident, so
    their number at the end is subtracted from that peak.
    """

    def __init__(self, process: Path = Path("/proc/self")) -> None:
        trim_free_memory()  # what is given back later would be missing from the growth
        self._process = process
        self._before = self._anonymous_kib("VmRSS")
        self._reset_failed = False

    def reset(self) -> None:
        self._reset_failed = False
        try:
            (self._process / "clear_refs").write_text("5")  # resets the high-water mark to the present resident size
        except OSError:
            self._reset_failed = True

    def peak_mib(self, records: int = 0) -> tuple[float | None, str]:
        peak = self._anonymous_kib("VmHWM")
        if self._before is None or peak is None:
            return None, "this system does not report a process's resident memory"
        if self._reset_failed:
            return None, "this system does not let a process reset the peak of its resident memory"
        if (grown := peak - self._before - records // 1024) <= 0:
            return None, "the work fitted into memory that the process held before"
        return grown / 1024, "growth of the process's anonymous memory"

    def now_mib(self) -> float | None:
        now = self._anonymous_kib("VmRSS")
        return None if self._before is None or now is None or now <= self._before else (now - self._before) / 1024

    def reserved_mib(self) -> float | None:
        return None

    def _anonymous_kib(self, resident: str) -> int | None:
        """Return a field that counts resident pages, less the pages of files, in KiB; None if it is unknown."""
        kib, *of_files = (kib_in(self._process / "status", field) for field in (resident, "RssFile", "RssShmem"))
        return None if kib is None else kib - sum(one or 0 for one in of_files)


MemoryMeter = CudaMemory | HostMemory


def memory_meter(device: torch.device) -> MemoryMeter:
    return CudaMemory() if device.type == "cuda" else HostMemory()
