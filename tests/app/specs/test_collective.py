"""The spec of `collective`."""

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


test_what_makes_no_sense_is_refused = refusals(
    "collective",
    ({"backend": "nccl", "device": "cpu"}, "backend", "choose gloo, or device cuda"),
    ({"backend": "gloo", "device": "cuda"}, "backend", "choose nccl, or device cpu"),
    ({"world_size": 3, "nodes": 2}, "nodes", "3 ranks cannot be divided by 2"),
    ({"size_mb": [1, 1.0]}, "size_mb", "1 is there twice"),
)
