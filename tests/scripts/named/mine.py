"""A kernel and a model of one's own, which import others of the project."""

import torch

import kernels
from workers import NAME


def rms_norm(x, weight):
    assert NAME == "workers of the project"
    return kernels.rms_norm(x, weight)


class Model(torch.nn.Module):
    def __init__(self, vocab_size, context_length, d_model, num_layers, num_heads, d_ff, rope_theta=10_000.0):
        super().__init__()
        self.embedding = torch.nn.Embedding(vocab_size, d_model)
        self.head = torch.nn.Linear(d_model, vocab_size)

    def forward(self, token_ids):
        from app import NAME  # found when it is called, too

        assert NAME == "app of the project"
        return self.head(kernels.rms_norm(self.embedding(token_ids)))
