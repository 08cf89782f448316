"""Pictures of what tables have kept."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.pictures import attention as draw_attention
from benchmarks.pictures import exposed_communication, svg


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


def test_strategies_are_in_the_order_of_what_they_expose() -> None:
    jobs = [ddp("torch_ddp", 9.0, bucket_size_mb=25, sharded_optimizer=True), ddp("none", None), ddp("fsdp", 3.0)]
    [bars] = exposed_communication(jobs)["data"]
    assert (bars["x"], bars["y"]) == (["fsdp", "torch ddp 25 + zero"], [3.0, 9.0])


def test_each_implementation_has_a_line_for_each_head_dimension() -> None:
    jobs = [*(attention(length, 64, 128) for length in (512, 1024, 2048)), attention(4096, 256)]
    figure = draw_attention(jobs)
    lines = {line["name"]: line for line in figure["data"]}
    names = ("ours", "FlashAttention-2", "cuDNN", "FlexAttention")
    assert list(lines) == [f"{name}, d = {width}" for width in (128, 64) for name in names], "a single shape is no line"
    assert [len(line["x"]) for line in lines.values()] == [3, 3, 3, 2] * 2
    assert [line["line"]["dash"] for line in lines.values()] == ["solid"] * 4 + ["dash"] * 4
    assert figure["layout"]["xaxis"]["ticktext"] == ["512", "1,024", "2,048"]


def test_a_file_without_such_jobs_is_refused() -> None:
    with pytest.raises(SystemExit, match="no such jobs"):
        svg("exposed-communication", [ddp("none", None)])
