from typing import Any

import pytest

from workers.measure.profiling import usage
from workers.measure.profiling.attribution import Call, RecordedWork


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


@pytest.mark.parametrize(("on_gpu", "names"), [(True, ["mm", "view"]), (False, ["view", "mm"])])
def test_operators_are_ranked_by_device_time_or_host_time(on_gpu: bool, names: list[str]) -> None:
    calls = [Call("mm", 1, "forward", 10_000, 90_000), Call("view", 1, "forward", 30_000, 0)]
    assert [one.name for one in usage.operators(calls, 1, str, on_gpu=on_gpu)] == names


@pytest.mark.parametrize(("on_gpu", "ms"), [(True, 0.75), (False, 0.25)])
def test_convolutions_and_recurrent_layers_are_told_beside_the_products(on_gpu: bool, ms: float) -> None:
    names = ("aten::cudnn_convolution", "aten::convolution_backward", "aten::_cudnn_rnn", "aten::mm", "aten::copy_")
    calls = [
        Call(name, step, "forward", 125_000, 375_000) for step in (1, 2, 3) for name in names[: 3 if step < 3 else 0]
    ]
    calls += [Call(name, 1, "forward", 10**9, 10**9) for name in names[3:]]
    assert usage.unlisted_ms(calls, 3, on_gpu=on_gpu) == pytest.approx(ms)


def test_one_name_in_two_classes_has_two_rows() -> None:
    items = [work("vectorized_elementwise_kernel", 10), work("vectorized_elementwise_kernel", 5, ranges=("norm",))]
    assert [(one.class_name, one.calls) for one in usage.kernels(items, 1)] == [
        ("elementwise", 1),
        ("normalisation", 1),
    ]
