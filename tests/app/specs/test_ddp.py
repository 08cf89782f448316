"""What can be asked of `ddp`, and what cannot go together."""

import json
from typing import Any

import pytest

from app.specs import spec_adapter
from app.specs.ddp import DdpSpec
from tests.app.specs.refusals import refusals

FSDP = {"strategy": "fsdp"}
CAST = {"precision": "bf16", "cast_before_communication": True}


def spec(**fields: Any) -> DdpSpec:
    return spec_adapter.validate_json(json.dumps({"kind": "ddp", **fields}))


test_invalid_fields_are_refused_with_their_path = refusals(
    "ddp",
    ({"cuda_graph": True}, "cuda_graph", "choose backend nccl"),
    ({"cuda_graph": True, "backend": "nccl", "snapshot": True}, "snapshot", "or cuda_graph"),
    ({"cuda_graph": True, "backend": "nccl", "precision": "fp16"}, "optimizer", "torch_fused_adamw"),
    ({"backend": "nccl", "device": "cpu"}, "backend", "choose backend gloo"),
    ({"backend": "gloo", "device": "cuda"}, "backend", "choose backend nccl"),
    ({"backend": "gloo", "precision": "tf32"}, "precision", "or backend nccl"),
    ({**FSDP, "sharded_optimizer": True}, "sharded_optimizer", "leave sharded_optimizer out"),
    ({"strategy": "none", "sharded_optimizer": True}, "sharded_optimizer", "choose another strategy"),
    ({"strategy": "torch_fsdp", "precision": "fp16"}, "precision", "choose bf16 or fsdp"),
    ({**FSDP, "cast_before_communication": True}, "cast_before_communication", "choose precision bf16"),
    ({**CAST, "strategy": "flat"}, "cast_before_communication", "choose fsdp"),
    ({"snapshot": True}, "snapshot", "choose backend nccl"),
    ({"fused": ["rope"]}, "fused", "choose backend nccl, or leave it out"),
    ({"optimizer": "triton_adamw", "backend": "gloo"}, "optimizer", "choose adamw, or backend nccl"),
    ({"reshard_after_forward": False}, "reshard_after_forward", "bucketed keeps parameters whole: choose fsdp"),
    ({"prefetch": 2}, "prefetch", "bucketed has no such setting: choose fsdp"),
    ({**FSDP, "compile": True, "compile_scope": "model"}, "compile_scope", "fsdp gathers block by block"),
    ({"first_bucket_size_mb": 1}, "first_bucket_size_mb", "was removed"),
    ({"gradients_as_views": False}, "gradients_as_views", "was removed"),
)


def test_each_rank_needs_a_device() -> None:
    on_cpu, on_gpus = spec(world_size=3).resources(), spec(world_size=3, backend="nccl").resources()
    assert (on_cpu.device_type, on_cpu.devices) == ("cpu", 3)
    assert (on_gpus.device_type, on_gpus.devices) == ("cuda", 3)
    assert spec(backend="nccl", device="cuda").resources().device_type == "cuda"


def test_removed_fields_are_read_as_release_0_1_0_stored_them() -> None:
    assert spec(first_bucket_size_mb=None, gradients_as_views=True).case().key == spec().case().key


@pytest.mark.parametrize("strategy", ["fsdp", "torch_fsdp"])
def test_sharded_bf16_casts_before_it_communicates(strategy: str) -> None:
    by_default = spec(strategy=strategy, precision="bf16")
    assert by_default.casts
    assert by_default.case().key == spec(strategy=strategy, **CAST).case().key
    kept = spec(strategy=strategy, precision="bf16", cast_before_communication=False)
    assert not kept.casts
    assert kept.case().key != by_default.case().key
    assert not spec(strategy=strategy).casts
    assert not spec(strategy="flat", precision="bf16").casts
