"""The spec of `collective`."""

import json

from app.specs import spec_adapter
from app.specs.collective import CollectiveSpec
from tests.app.specs.refusals import refusals


def test_each_rank_of_nccl_needs_a_gpu() -> None:
    for device in ("auto", "cuda"):
        needs = CollectiveSpec(backend="nccl", world_size=4, device=device).resources()
        assert (needs.device_type, needs.devices) == ("cuda", 4)


def test_nodes_share_the_ranks_and_one_node_is_the_case_of_old() -> None:
    spec = CollectiveSpec(backend="nccl", world_size=8, nodes=2)
    needs = spec.resources()
    assert (needs.devices, needs.nodes) == (4, 2)
    assert spec.requirements() == {"nodes:2"}
    assert CollectiveSpec().requirements() == frozenset()
    keys = [CollectiveSpec(world_size=8, nodes=nodes).cases()[0].key for nodes in (1, 2)]
    assert keys[0] != keys[1]
    assert CollectiveSpec.added["nodes"] == 1


def test_a_size_is_one_case_however_it_is_written() -> None:
    texts = ('{"kind": "collective", "size_mb": [1]}', '{"kind": "collective", "size_mb": [1.0]}')
    whole, point = (spec_adapter.validate_json(text).cases() for text in texts)
    assert [case.key for case in whole] == [case.key for case in point]
    assert json.dumps(point[0].coordinates["size_mb"]) == "1"


test_what_makes_no_sense_is_refused = refusals(
    "collective",
    ({"backend": "nccl", "device": "cpu"}, "backend", "choose gloo, or device cuda"),
    ({"backend": "gloo", "device": "cuda"}, "backend", "choose nccl, or device cpu"),
    ({"world_size": 3, "nodes": 2}, "nodes", "3 ranks cannot be divided by 2"),
    ({"size_mb": [1, 1.0]}, "size_mb", "1 is there twice"),
)
