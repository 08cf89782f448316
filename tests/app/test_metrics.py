import pytest

from app.metrics import better, gain, gain_name, headline


@pytest.mark.parametrize(
    ("metric", "unit", "direction"),
    [
        ("step_ms", "ms", "less"),
        ("decode_ms_per_token", "ms/token", "less"),
        ("peak_memory_mib", "MiB", "less"),
        ("tokens_per_s", "tokens/s", "more"),
        ("forward_tflops", "TFLOP/s", "more"),
        ("mfu", "fraction", "more"),
        ("gradient_error", "fraction", "less"),
        ("error", "1", None),
        ("exposed_communication_error_ms", "ms", "less"),
        ("matmul_share_percent", "%", None),
        ("parameters", "parameters", None),
        ("forward_largest_free_mib", "MiB", None),
        ("saved_by_sharding_gib", "GiB", "more"),
        ("tokens_per_s", None, "more"),
        ("tflops", None, "more"),
        ("sum", None, None),
        ("residual_stream_seen_mib", "MiB", None),
        ("an_own_percent", "%", None),
    ],
)
def test_direction(metric: str, unit: str, direction: str | None) -> None:
    assert better(metric, unit) == direction


def test_gain_is_named_by_what_it_is() -> None:
    assert gain_name("step_ms", "ms") == "step_ms_speedup"
    assert gain_name("tokens_per_s", "tokens/s") == "tokens_per_s_speedup"
    assert gain_name("peak_memory_mib", "MiB") == "peak_memory_mib_gain"
    assert gain_name("parameters", "parameters") == "parameters_ratio"
    assert gain_name("exposed_communication_error_ms", "ms") == "exposed_communication_error_ms_gain"


def test_gain_is_above_one_for_what_is_better() -> None:
    assert (gain(2.0, 1.0, "less"), gain(2.0, 1.0, "more"), gain(2.0, 1.0, None)) == (2.0, 0.5, 0.5)
    assert (gain(0.0, 1.0, "more"), gain(1.0, 0.0, "less"), gain(-1.0, -2.0, "less")) == (None, None, None)


def test_headline() -> None:
    assert headline(["forward_ms", "step_ms", "mfu"]) == "step_ms"
    assert (headline(["copy_gb_per_s", "tflops"]), headline([])) == ("copy_gb_per_s", None)
