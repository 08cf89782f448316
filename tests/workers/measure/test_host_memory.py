"""How much memory is free, and the bound that keeps a job from taking all of it."""

import subprocess
import sys
from pathlib import Path

import pytest

from workers.measure.host_memory import free_memory

ROOT = Path(__file__).parents[3]
MEMINFO = "MemTotal: 4000 kB\nMemAvailable: 3000 kB\n"
TAKE_A_GIB = """
import os
import torch
from workers.measure import host_memory
from workers.measure.memory import is_out_of_memory
host_memory.host_memory = lambda name: 24 * 2**30  # 5 % of it are 1.2 GiB
for free_gib, processes in ((2, 1), (40, 1), (40, 40)):
    if os.fork():
        os.wait()
        continue
    host_memory.free_memory = lambda: free_gib * 2**30
    host_memory.bound_memory(processes)
    try:
        kept = torch.empty(2**28)
    except RuntimeError as error:
        assert is_out_of_memory(error), error
        print("out of memory")
    else:
        print("it fits")
    break
"""


@pytest.mark.parametrize(
    ("maximum", "used", "free_kib"),
    [("max", 5, 3000), (2000 * 1024, 500 * 1024, 1500), (2000 * 1024, 3000 * 1024, 0), (None, 0, 3000)],
)
def test_a_containers_limit_counts(tmp_path: Path, maximum: object, used: int, free_kib: int) -> None:
    (tmp_path / "meminfo").write_text(MEMINFO)
    if maximum is not None:
        (tmp_path / "memory.max").write_text(f"{maximum}\n")
        (tmp_path / "memory.stat").write_text(f"anon {used}\nfile 70000\n")
    assert free_memory(tmp_path, tmp_path / "meminfo") == 1024 * free_kib


def test_what_does_not_fit_beside_the_reserve_is_out_of_memory() -> None:
    done = subprocess.run([sys.executable, "-c", TAKE_A_GIB], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["out of memory", "it fits", "out of memory"], done.stderr
