"""Pictures of what tables have kept."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from benchmarks.pictures import svg


def ddp(strategy: str, exposed_ms: float | None, **fields: Any) -> dict[str, Any]:
    rows = {"exposed_communication_ms": exposed_ms, "exposed_communication_error_ms": 0.5}
    measurements = [{"metric": name, "median": median} for name, median in rows.items()]
    return {"spec": {"kind": "ddp", "strategy": strategy, **fields}, "measurements": measurements}


def attention(implementation: str, length: int, tflops: float) -> dict[str, Any]:
    case = {"implementation": implementation, "sequence_length": length, "head_dim": 64}
    measured = {"metric": "tflops", "phase": None, "median": tflops, "case": case}
    return {"spec": {"kind": "attention"}, "measurements": [measured]}


def words(picture: str) -> list[str]:
    return [text.text or "" for text in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]


def test_strategies_are_in_the_order_of_what_they_expose() -> None:
    jobs = [ddp("torch_ddp", 9.0, bucket_size_mb=25, sharded_optimizer=True), ddp("none", None), ddp("fsdp", 3.0)]
    shown = words(svg("exposed-communication", jobs))
    assert [name for name in shown if name in ("fsdp", "torch ddp 25 + zero", "none")] == [
        "fsdp",
        "torch ddp 25 + zero",
    ]


def test_each_implementation_has_a_line() -> None:
    jobs = [attention(name, length, 100.0) for name in ("triton", "sdpa_flash") for length in (1024, 2048)]
    assert {"triton, 64", "sdpa_flash, 64", "sequence length"} <= set(words(svg("attention", jobs)))


def test_a_file_without_such_jobs_is_refused() -> None:
    with pytest.raises(SystemExit, match="no such jobs"):
        svg("exposed-communication", [ddp("none", None)])
