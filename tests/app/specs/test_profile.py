import json

import pytest
from pydantic import ValidationError

from app.specs import spec_adapter
from app.specs._training import PHASES
from app.specs.benchmark import BenchmarkSpec
from app.specs.profile import ProfileSpec


def parse(**fields: object) -> ProfileSpec:
    spec = spec_adapter.validate_json(json.dumps({"kind": "profile", **fields}))
    assert isinstance(spec, ProfileSpec)
    return spec


def test_the_defaults_profile_a_training_step_with_stacks() -> None:
    spec = parse()
    assert (spec.mode, spec.profile_steps, spec.stacks, spec.phases) == ("train_step", 3, True, None)
    assert (spec.nsys, spec.ncu) == (False, None)


@pytest.mark.parametrize("mode", PHASES)
def test_every_phase_of_the_mode_may_be_chosen(mode: str) -> None:
    assert parse(mode=mode, phases=list(PHASES[mode])).phases == list(PHASES[mode])


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"mode": "forward", "phases": ["backward"]}, "phases", "no phase 'backward', only forward"),
        ({"phases": ["prefill"]}, "phases", "only forward, backward, optimizer"),
        ({"phases": ["forward", "forward"]}, "phases", "twice"),
        ({"phases": []}, "phases", "at least 1 item"),
        ({"phases": ["graph"]}, "phases", "Input should be"),
        ({"cuda_graph": True, "phases": ["forward"]}, "phases", "one phase to a profiler"),
        ({"profile_steps": 0}, "profile_steps", "greater than or equal to 1"),
        ({"profile_steps": 21}, "profile_steps", "less than or equal to 20"),
        ({"trace_max_mib": 0}, "trace_max_mib", "greater than or equal to 1"),
        ({"trace_max_mib": 1025}, "trace_max_mib", "less than or equal to 1024"),
        ({"ncu": {"set": "everything"}}, "set", "Input should be"),
        ({"ncu": {"launches": 0}}, "launches", "greater than or equal to 1"),
        ({"ncu": {"kernels": ""}}, "kernels", "at least 1 character"),
        ({"stacks": "yes"}, "stacks", "boolean"),
        ({"replicates": 2}, "replicates", "Extra inputs"),
    ],
)
def test_invalid_fields_are_refused_with_their_path(fields: dict[str, object], field: str, words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        parse(**fields)
    (error,) = caught.value.errors()
    assert words in error["msg"]
    assert field in str((error["loc"], error.get("ctx"))), error


def test_how_it_is_profiled_is_no_part_of_the_case() -> None:
    plain = parse().case()
    fields = {"profile_steps": 5, "phases": ["forward"], "stacks": False, "trace_max_mib": 7, "nsys": True}
    assert parse(**fields, ncu={"set": "full"}).case().key == plain.key
    assert parse(context_length=128).case().key != plain.key
    assert parse(warmup_steps=3).case().key != plain.key


def test_a_profile_and_a_benchmark_are_different_cases() -> None:
    assert parse().case().key != BenchmarkSpec().case().key


def test_the_resources_are_those_of_the_step() -> None:
    assert parse().resources() == BenchmarkSpec().resources()
    assert parse(cuda_graph=True).resources().device_type == "cuda"
