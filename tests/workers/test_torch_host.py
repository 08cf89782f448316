"""What a unit finds in a process that has measured before."""

import platform

import psutil
import pytest

from workers import torch_host

MIB = 2**20


def held_mib() -> float:
    """MiB of this process that are resident and of no file."""
    found = psutil.Process().memory_info()
    return float(found.rss - found.shared) / MIB


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is asked to give memory back")
def test_memory_that_is_free_goes_back_to_the_system() -> None:
    blocks = [b"x" * 2**16 for _ in range(64 * 16)]  # 64 MiB in blocks that are too small to be mapped one by one
    kept = blocks[::16]  # so the heap cannot shrink by itself
    del blocks
    before = held_mib()
    torch_host.trim_free_memory()
    assert before - held_mib() > 48
    assert len(kept) == 64
