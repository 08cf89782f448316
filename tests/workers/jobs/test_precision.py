"""Kinds that take a model of the user's own tell where it leaves the job's precision."""

import pytest

from app.specs import KINDS
from tests.workers.reporting import reported
from workers.jobs.profile import torch_profiler

FIELDS = {
    "model": {"size": "tiny", "num_layers": 1},
    "context_length": 8,
    "batch_size": 2,
    "warmup_steps": 1,
    "measure_steps": 2,
    "precision": "bf16",
    "device": "cpu",
}


def source(*, leaves: bool) -> str:
    return f"""
import torch

class Mine(torch.nn.Module):
    def __init__(self, vocab_size, context_length, d_model, num_layers, num_heads, d_ff, *, attention):
        super().__init__()
        self.embedding = torch.nn.Embedding(vocab_size, d_model)
        self.head = torch.nn.Linear(d_model, vocab_size, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        with torch.autocast("cpu", enabled={not leaves}, dtype=torch.bfloat16):
            return self.head(x)
"""


@pytest.mark.parametrize(
    ("kind", "leaves"), [("benchmark", False), ("benchmark", True), ("profile", True), ("memory", True)]
)
def test_a_model_of_ones_own_computes_in_the_jobs_precision(tmp_path, upload, monkeypatch, kind, leaves) -> None:
    monkeypatch.setattr(torch_profiler, "has_roofline", lambda spec: False)  # its ceilings take seconds to measure
    spec = KINDS[kind].model_validate({**FIELDS, "code": upload(source(leaves=leaves), "Mine")})
    checks = reported(spec, tmp_path).verdict_on()["checks"]
    found = [check["detail"] for check in checks if check["name"] == "precision"]
    assert found == ["bf16 was asked for, and the model's products are 100% fp32"] * leaves
