from typing import Any

import pytest

from workers.measure.profiling import usage
from workers.measure.profiling.attribution import Call, RecordedWork
from workers.measure.profiling.classes import CLASSES, class_of_operator


def work(name: str, time_ns: int, phase: str = "forward", **fields: Any) -> RecordedWork:
    return RecordedWork(name, "kernel", 0, time_ns, time_ns, fields.pop("step", 1), phase, **fields)


def test_kernels_are_summed_up_by_name_per_step() -> None:
    items = [
        work("sgemm", 1_000_000, launch_to_start_us=5.0),
        work("sgemm", 3_000_000, step=2, launch_to_start_us=7.0),
        work("reduce_kernel", 1_000_000, step=2),
    ]
    first, second = usage.kernels(items, steps=2)
    assert (first.name, first.class_name, first.total_ms, first.calls) == ("sgemm", "matmul", 2.0, 1.0)
    assert first.share_percent == pytest.approx(80)
    assert (first.mean_us, first.median_us, first.min_us, first.max_us) == (2000, 2000, 1000, 3000)
    assert first.std_us == pytest.approx(1414.2136)
    assert first.launch_to_start_us == 6.0
    assert (second.std_us, second.launch_to_start_us) == (None, None), "unknown of one call"


def test_one_name_in_two_classes_has_two_rows() -> None:
    items = [work("vectorized_elementwise_kernel", 10), work("vectorized_elementwise_kernel", 5, ranges=("norm",))]
    assert [(one.class_name, one.calls) for one in usage.kernels(items, 1)] == [
        ("elementwise", 1),
        ("normalisation", 1),
    ]


def test_the_shares_of_the_classes_add_up() -> None:
    items = [
        work("sgemm", 60),
        work("softmax_warp_forward", 30),
        work("Memset (Device)", 10),
        work("x", 5, "optimizer"),
    ]
    by_class = {one.class_name: one for one in usage.classes(usage.in_phases(items, ["forward"]), 1)}
    assert tuple(by_class) == CLASSES
    shares = {name: one.share_percent for name, one in by_class.items() if one.calls}
    assert shares == {"matmul": 60, "softmax": 30, "copy": 10}
    whole = {one.class_name: one.share_percent for one in usage.classes(items, 1)}
    assert whole["matmul"] == pytest.approx(100 * 60 / 105)
    assert sum(share for share in whole.values() if share is not None) == pytest.approx(100)


def test_operators_are_ranked_by_device_time_or_host_time() -> None:
    calls = [Call("aten::mm", 1, "forward", 10_000, 90_000), Call("aten::view", 1, "forward", 30_000, 0)]
    first, second = usage.operators(calls, 1, class_of_operator, on_gpu=True)
    assert (first.name, first.device_ms, first.host_ms, first.share_percent) == ("aten::mm", 0.09, 0.01, 100)
    assert (second.name, second.device_ms, second.mean_us) == ("aten::view", 0.0, 0.0)
    first, _ = usage.operators(calls, 1, class_of_operator, on_gpu=False)
    assert (first.name, first.device_ms, first.share_percent, first.mean_us) == ("aten::view", None, 75, 30)


def test_parts_are_summed_over_layers() -> None:
    items = [
        work("a", 1_000_000, ranges=("layers.10", "scores")),
        work("a", 2_000_000, ranges=("layers.2", "scores")),
        work("a", 4_000_000, "backward", ranges=("layers.2",)),
        work("a", 8_000_000),
    ]
    ranges = usage.by_range(items, ("forward", "backward"), steps=1)
    assert [name for name, _ in ranges] == [
        *("layers.2", "layers.2/scores", "layers.10", "layers.10/scores", "scores", "outside")
    ]
    assert dict(ranges)["layers.2"] == {"forward": 2.0, "backward": 4.0}
    assert dict(ranges)["scores"] == {"forward": 3.0, "backward": 0.0}
    assert dict(ranges)["outside"] == {"forward": 8.0, "backward": 0.0}
    scores = usage.work_in(items, "scores", "forward")
    assert (usage.time_of(scores), usage.time_of(scores, "matmul")) == (3_000_000, 0)
    assert usage.time_of([work("sgemm", 5), work("add", 7)], "matmul") == 5


def test_calls_of_the_top_kernel() -> None:
    items = [work("sgemm", 10), work("sgemm", 10), work("add", 15), work("add", 90, "backward")]
    assert usage.top_calls(items, "forward", 1) == ("sgemm", 2.0)
