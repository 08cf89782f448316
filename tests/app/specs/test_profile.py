import json

import pytest

from app.specs import spec_adapter
from app.specs._training import PHASES
from app.specs.profile import ProfileSpec
from tests.app.specs.refusals import refusals


def parse(**fields: object) -> ProfileSpec:
    return spec_adapter.validate_json(json.dumps({"kind": "profile", **fields}))


@pytest.mark.parametrize("mode", PHASES)
def test_every_phase_of_the_mode_may_be_chosen(mode: str) -> None:
    assert parse(mode=mode, phases=list(PHASES[mode])).phases == list(PHASES[mode])


test_invalid_fields_are_refused_with_their_path = refusals(
    "profile",
    ({"mode": "forward", "phases": ["backward"]}, "phases", "no phase 'backward', only forward"),
    ({"phases": ["prefill"]}, "phases", "only forward, backward, optimizer"),
    ({"phases": ["forward", "forward"]}, "phases", "twice"),
    ({"cuda_graph": True, "phases": ["forward"]}, "phases", "one phase to a profiler"),
)


def test_how_it_is_profiled_is_no_part_of_the_case() -> None:
    plain = parse().case()
    fields = {"profile_steps": 5, "phases": ["forward"], "stacks": False, "trace_max_mib": 7, "nsys": True}
    assert parse(**fields, ncu={"set": "full"}).case().key == plain.key
    assert parse(context_length=128).case().key != plain.key
    assert parse(warmup_steps=3).case().key != plain.key
