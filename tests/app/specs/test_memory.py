import json

import pytest
from pydantic import ValidationError

from app.specs.benchmark import OF_GENERATION, BenchmarkSpec
from app.specs.memory import DEFAULT_WARMUP_STEPS, MemorySpec


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"cuda_graph": True, "device": "cuda"}, "cuda_graph", "a replayed graph allocates nothing"),
        ({"cuda_graph": True}, "cuda_graph", "peak_memory_mib of kind benchmark"),
        ({"mode": "generate"}, "mode", "'forward', 'forward_backward' or 'train_step'"),
        ({"measure_steps": 11}, "measure_steps", "less than or equal to 10"),
        ({"measure_steps": 0}, "measure_steps", "greater than or equal to 1"),
        ({"history_entries": 999}, "history_entries", "greater than or equal to 1000"),
        ({"history_entries": 1_000_001}, "history_entries", "less than or equal to 1000000"),
        ({"largest_allocations": 0}, "largest_allocations", "greater than or equal to 1"),
        ({"snapshot_steps": [10]}, "snapshot_steps", "at least 2"),
        ({"snapshot_steps": [20, 10]}, "snapshot_steps", "the first one first"),
        ({"snapshot_steps": [10, 10, 20]}, "snapshot_steps", "each step once"),
        ({"snapshot_steps": [10, 13]}, "snapshot_steps", "at least 4 steps after the first"),
        ({"precision": "tf32", "device": "cpu"}, "precision", "choose fp32 or bf16"),
        ({"replicates": 2}, "replicates", "Extra inputs"),
    ],
)
def test_invalid_fields_are_refused_with_their_path(fields: dict[str, object], field: str, words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        MemorySpec.model_validate_json(json.dumps(fields))
    (error,) = caught.value.errors()
    assert words in error["msg"]
    assert field in str((error["loc"], error.get("ctx"))), error


def test_it_has_the_fields_of_benchmark() -> None:
    assert set(BenchmarkSpec.model_fields) - {"replicates", "pacing", *OF_GENERATION} <= set(MemorySpec.model_fields)


def test_how_much_is_recorded_changes_no_case() -> None:
    one = MemorySpec(
        history_entries=1_000, largest_allocations=7, measure_steps=3, snapshot_steps=[1, 9], seed=5, device="cpu"
    )
    assert one.case().key == MemorySpec().case().key
    assert not {"history_entries", "largest_allocations", "measure_steps", "snapshot_steps"} & set(
        one.case().coordinates
    )


def test_the_default_warmup_is_the_same_case_as_its_length() -> None:
    assert MemorySpec(warmup_steps=DEFAULT_WARMUP_STEPS).case().key == MemorySpec().case().key
    assert MemorySpec(warmup_steps=0).case().key != MemorySpec().case().key


def test_inference_and_the_full_step_are_different_cases() -> None:
    keys = {MemorySpec(mode=mode).case().key for mode in ("forward", "forward_backward", "train_step")}
    assert len(keys) == 3
    # What a mode does not use changes nothing.
    assert MemorySpec(mode="forward", optimizer="torch_adamw").case().key == MemorySpec(mode="forward").case().key


def test_memory_and_speed_of_one_step_are_different_cases() -> None:
    assert MemorySpec(warmup_steps=5).case().key != BenchmarkSpec(warmup_steps=5).case().key


def test_it_needs_the_device_that_was_asked_for() -> None:
    resources = MemorySpec(device="cuda").resources()
    assert (resources.device_type, resources.devices, resources.exclusive_host) == ("cuda", 1, False)


def test_its_table_has_no_times() -> None:
    assert not [column for column in MemorySpec.table_columns if column.endswith("_ms")]
