"""The scripts that time kernels of a training step, with small shapes on the CPU and a clock that stands still."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():  # before anything imports a kernel
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from benchmarks import fused_kernels
from kernels import compiling, operations
from kernels.device_clock import Lap


class Clock:
    """Each call takes 10 µs."""

    def forget(self) -> None: ...

    def lap(self, work: Callable[[], None], prepare: Callable[[], None]) -> Lap:
        prepare()
        work()
        return Lap(device_ms=0.01, host_us=5.0, hidden=True)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(fused_kernels, "DEVICE", "cpu")
    monkeypatch.setattr(fused_kernels, "WARMUP", 0)
    monkeypatch.setattr(fused_kernels, "COPY_BYTES", 2**10)
    monkeypatch.setattr(operations, "VOCABULARY", 61)
    monkeypatch.setattr(compiling, "compiled", lambda function: function)
    return fused_kernels.Bench(Clock(), samples=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", fused_kernels.NAMES)
def test_a_line_has_every_implementation_with_its_error_and_both_passes(
    name: str, bench: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    fused_kernels.lines(bench, name, 12, 128, torch.bfloat16)
    printed = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()]
    names = [line[3] for line in printed]
    assert {"torch", "compiled", *(["triton"] if name != "swiglu" else [])} <= set(names)
    for line in printed:
        assert len(line) == len(printed[0])
        assert float(line[4]) < 2e-2
    if name == "rms_norm":
        moved = 2 * (12 * 128 + 128 + 12 * 128)
        assert printed[0][5:7] == ["10.0", f"{1e-4 * moved:.0f}"]
