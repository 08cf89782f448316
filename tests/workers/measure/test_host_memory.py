"""How much memory is free, and the bound that keeps a job from taking all of it."""

import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from workers.measure import host_memory
from workers.measure.host_memory import free_memory
from workers.measure.memory import is_out_of_memory

MEMINFO = "MemTotal: 4000 kB\nMemAvailable: 3000 kB\n"


def take_a_gib(free_gib: int, processes: int, answer: Connection) -> None:
    """Say whether a GiB fits into this process, once it is bound."""
    host_memory.host_memory = lambda name: 24 * 2**30  # type: ignore[assignment]  # 5 % of it are 1.2 GiB
    host_memory.free_memory = lambda: free_gib * 2**30  # type: ignore[assignment]
    host_memory.bound_memory(processes)
    try:
        kept = torch.empty(2**28)
    except RuntimeError as error:
        answer.send("out of memory" if is_out_of_memory(error) else repr(error))
    else:
        answer.send(f"it fits: {len(kept)}")


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


@pytest.mark.parametrize(
    ("free_gib", "processes", "said"),
    [(2, 1, "out of memory"), (40, 1, f"it fits: {2**28}"), (40, 40, "out of memory")],
)
def test_what_does_not_fit_beside_the_reserve_is_out_of_memory(free_gib: int, processes: int, said: str) -> None:
    context = multiprocessing.get_context("forkserver")  # which has imported torch
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=take_a_gib, args=(free_gib, processes, theirs))
    process.start()
    theirs.close()
    assert ours.recv() == said
    process.join()
