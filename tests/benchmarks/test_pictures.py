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


def attention(length: int, *head_dims: int) -> dict[str, Any]:
    measurements = [
        {
            "metric": "tflops",
            "phase": None,
            "median": 100.0 * place if name != "flex" or length < 2048 else None,
            "case": {"implementation": name, "sequence_length": length, "head_dim": head_dim},
        }
        for place, name in enumerate(("triton", "sdpa_flash", "sdpa_cudnn", "flex"), 1)
        for head_dim in head_dims
    ]
    spec = {"kind": "attention", "sequence_lengths": [length], "head_dims": list(head_dims)}
    return {"spec": spec, "measurements": measurements}


def words(picture: str) -> list[str]:
    return [text.text or "" for text in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]


def test_strategies_are_in_the_order_of_what_they_expose() -> None:
    jobs = [ddp("torch_ddp", 9.0, bucket_size_mb=25, sharded_optimizer=True), ddp("none", None), ddp("fsdp", 3.0)]
    shown = words(svg("exposed-communication", jobs))
    assert [name for name in shown if name in ("fsdp", "torch ddp 25 + zero", "none")] == [
        "fsdp",
        "torch ddp 25 + zero",
    ]


def test_each_implementation_has_a_line_for_each_head_dimension() -> None:
    jobs = [*(attention(length, 64, 128) for length in (512, 1024, 2048)), attention(4096, 256)]
    picture = svg("attention", jobs)
    shown = words(picture)
    assert [word for word in shown if word.endswith("128")] == [
        f"{name}, d = 128" for name in ("ours", "FlashAttention-2", "cuDNN", "FlexAttention")
    ]
    assert "ours, d = 64" in shown
    assert not any("256" in word for word in shown), "a single shape is no line"
    assert {"512", "1,024", "2,048", "forward + backward, TFLOP/s"} <= set(shown)
    lines = list(ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}polyline"))
    assert [len(str(line.get("points")).split()) for line in lines] == [3, 3, 3, 2] * 2
    assert [line.get("stroke-dasharray") is None for line in lines] == [True] * 4 + [False] * 4


def test_a_file_without_such_jobs_is_refused() -> None:
    with pytest.raises(SystemExit, match="no such jobs"):
        svg("exposed-communication", [ddp("none", None)])
