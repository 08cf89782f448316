"""Functions of the pool's ranks: a public course's test of full sharding in half precision, and whose rounding it sees.

The test trains two ranks with half of the batch each, and one process with the whole batch, whose weights hooks cast to
the dtype of computation; after each of three steps all weights must agree to 1e-4 (Stanford CS336, assignment 2,
tests/test_fsdp.py). The hooks leave the norms' weights in float32; full sharding, torch's too, casts all weights. Hence
one process trains twice more without any sharding: with the batch in parts, whose sums have another order, and with the
norms' weights cast. Either may change a sign before the ReLU, and with it a whole gradient.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import parallel

TOKENS, BATCH, LENGTH, STEPS = 100, 20, 8, 3


class Weight(nn.Module):
    """A linear layer or, for whole numbers, an embedding, which casts its weight to the dtype of computation."""

    def __init__(self, rows: int, columns: int, spread: float, cast: torch.dtype | None) -> None:
        super().__init__()
        self.cast = cast
        self.weight = nn.Parameter(torch.empty(rows, columns))
        nn.init.trunc_normal_(self.weight, std=spread, a=-3 * spread, b=3 * spread)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self.cast is None else self.weight.to(self.cast)
        return functional.linear(x, weight) if x.is_floating_point() else weight[x]


class Norm(nn.Module):
    """RMSNorm in float32 around an input of any dtype."""

    def __init__(self, width: int, cast: torch.dtype | None) -> None:
        super().__init__()
        self.cast = cast
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        weight = self.weight if self.cast is None else self.weight.to(self.cast)
        return (weight * wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


class Toy(nn.Module):
    """The model of the course's test."""

    def __init__(self, cast: torch.dtype | None = None, norms: torch.dtype | None = None) -> None:
        super().__init__()

        def linear(inputs: int, outputs: int) -> Weight:
            return Weight(outputs, inputs, math.sqrt(2 / (inputs + outputs)), cast)

        self.embedding = Weight(TOKENS, 64, 1.0, cast)
        self.norm1, self.linear1 = Norm(64, norms), linear(64, 128)
        self.norm2, self.linear2 = Norm(128, norms), linear(128, 64)
        self.lm_head = linear(64, TOKENS)
        self.before_relu = torch.empty(0)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.linear1(self.norm1(self.embedding(tokens)))
        self.before_relu = x.detach()
        return self.lm_head(self.linear2(self.norm2(torch.relu(x))))


def same_weights(device: torch.device, *casts: torch.dtype | None) -> Toy:
    torch.manual_seed(42)
    return Toy(*casts).to(device)


def batches(device: torch.device) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(123)
    draw = (torch.randint(TOKENS, (BATCH, LENGTH), generator=generator) for _ in range(STEPS))
    return [(tokens.to(device), tokens[:, 0].roll(1).to(device)) for tokens in draw]


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits[:, -1].float(), labels)


def trained(model, step, weights) -> list[dict[str, Tensor]]:
    """Train with `step`, and return the weights after each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    device = next(model.parameters()).device
    after = []
    for tokens, labels in batches(device):
        optimizer.zero_grad()
        step(tokens, labels)
        optimizer.step()
        after.append({name: value.detach().clone() for name, value in weights().items()})
    return after


def alone(device, cast, *, pieces=1, norms=None) -> tuple[list[dict[str, Tensor]], list[Tensor]]:
    """One process with each batch in pieces; return also the signs before the ReLU, of each step."""
    model = same_weights(device, cast, norms)
    signs = []

    def step(tokens: Tensor, labels: Tensor) -> None:
        seen = []
        for piece, wanted in zip(tokens.chunk(pieces), labels.chunk(pieces), strict=True):
            (loss_of(model(piece), wanted) / pieces).backward()
            seen.append(model.before_relu[:, -1] > 0)
        signs.append(torch.cat(seen))

    return trained(model, step, lambda: dict(model.named_parameters())), signs


def ours(device: torch.device, compute: torch.dtype | None) -> list[dict[str, Tensor]]:
    model = parallel.FullyShardedDataParallel(same_weights(device), compute)

    def step(tokens: Tensor, labels: Tensor) -> None:
        loss_of(model(mine(tokens)), mine(labels)).backward()
        model.finish_gradient_synchronization()

    return trained(model, step, model.full_state_dict)


def torchs(device: torch.device, compute: torch.dtype | None) -> list[dict[str, Tensor]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=compute, cast_forward_inputs=False)
    model = same_weights(device)
    for child in model.children():
        fully_shard(child, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)

    def step(tokens: Tensor, labels: Tensor) -> None:
        loss_of(model(mine(tokens)), mine(labels)).backward()

    def weights() -> dict[str, Tensor]:
        return {name: parameter.full_tensor() for name, parameter in model.named_parameters()}

    return trained(model, step, weights)


def mine(tensor: Tensor) -> Tensor:
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


def largest(one: list[dict[str, Tensor]], other: list[dict[str, Tensor]]) -> tuple[float, str]:
    """The largest difference of any weight after any step, and where it is."""
    differences = {
        f"{name}, step {step}": float((weights[name] - value).abs().max())
        for step, (weights, others) in enumerate(zip(one, other, strict=True))
        for name, value in others.items()
    }
    place = max(differences, key=differences.__getitem__)
    return differences[place], place


def course(compute: str | None) -> dict[str, Any]:
    """Train the course's test in every way; return pairs' largest differences, and how many signs before the ReLU
    differ from those of one process in all steps."""
    device = torch.device("cuda", dist.get_rank()) if dist.get_backend() == "nccl" else torch.device("cpu")
    dtype = getattr(torch, compute) if compute else None
    whole, signs = alone(device, dtype)
    parts, signs_of_parts = alone(device, dtype, pieces=dist.get_world_size())
    cast, signs_of_cast = alone(device, dtype, norms=dtype)
    ways = {
        "one process": whole,
        "one process in parts": parts,
        "one process, norms cast": cast,
        "ours": ours(device, dtype),
        "torch's": torchs(device, dtype),
    }
    exact, _ = alone(device, None)
    found: dict[str, Any] = {f"{name} - float32": largest(weights, exact) for name, weights in ways.items()}
    found |= {f"{name} - one process": largest(weights, whole) for name, weights in list(ways.items())[1:]}
    found["ours - torch's"] = largest(ways["ours"], ways["torch's"])
    for name, others in (("in parts", signs_of_parts), ("norms cast", signs_of_cast)):
        found[f"signs changed, {name}"] = [int((a != b).sum()) for a, b in zip(signs, others, strict=True)]
    return found
