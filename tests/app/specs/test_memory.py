from app.specs.benchmark import OF_GENERATION, BenchmarkSpec
from app.specs.memory import DEFAULT_WARMUP_STEPS, MemorySpec
from tests.app.specs.refusals import refusals

test_invalid_fields_are_refused_with_their_path = refusals(
    "memory",
    ({"cuda_graph": True, "device": "cuda"}, "cuda_graph", "a replayed graph allocates nothing"),
    ({"snapshot_steps": [10]}, "snapshot_steps", "at least 2"),
    ({"snapshot_steps": [20, 10]}, "snapshot_steps", "the first one first"),
    ({"snapshot_steps": [10, 10, 20]}, "snapshot_steps", "each step once"),
    ({"snapshot_steps": [10, 13]}, "snapshot_steps", "at least 4 steps after the first"),
    ({"precision": "tf32", "device": "cpu"}, "precision", "choose fp32 or bf16"),
)


def test_it_has_the_fields_of_benchmark() -> None:
    assert set(BenchmarkSpec.model_fields) - {"replicates", "pacing", *OF_GENERATION} <= set(MemorySpec.model_fields)


def test_the_default_warmup_is_the_same_case_as_its_length() -> None:
    assert MemorySpec(warmup_steps=DEFAULT_WARMUP_STEPS).case().key == MemorySpec().case().key
    assert MemorySpec(warmup_steps=0).case().key != MemorySpec().case().key


def test_it_needs_the_device_that_was_asked_for() -> None:
    resources = MemorySpec(device="cuda").resources()
    assert (resources.device_type, resources.devices, resources.exclusive_host) == ("cuda", 1, False)
