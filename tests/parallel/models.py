"""Models with everything that data parallelism must get right."""

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, WIDTH = 13, 8


class Everything(nn.Module):
    """Embeddings, layer norms, biases, a ModuleList; tied, frozen, unused parameters; several dtypes; buffers.

    Sizes are such that nothing divides evenly by two or three ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.wide = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(5, 7)
        self.norm = nn.LayerNorm(WIDTH)
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.rand(3))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("mask", torch.rand(4) > 0.5, persistent=False)
        self.scale: Tensor

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        x = x + self.frozen(x)
        x = x + self.wide(x.double()).to(x.dtype) * self.scale.sum()
        return self.head(self.norm(x)) * self.scalar


class Block(nn.Module):
    """A feed-forward block whose one weight is laid out column by column."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 11)
        self.down = nn.Linear(11, WIDTH)
        self.down.weight = nn.Parameter(self.down.weight.detach().t().contiguous().t())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class UsedOutside(nn.Module):
    """Uses parameters outside their modules: in its own forward, in another block, and in torch's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(WIDTH, 2, 11, dropout=0.0, batch_first=True)])
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).to(self.embedding.weight.device)
        x = x + self.attention(x, x, x)[0]
        for block in self.blocks:
            x = block(x)
        x = x + functional.linear(x, self.blocks[0].up.weight) @ self.blocks[1].down.weight.T
        for layer in self.layers:
            x = layer(x)
        return functional.linear(self.norm(x), self.embedding.weight)


class Branches(nn.Module):
    """Ranks use different branches, and no rank the last."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor, chosen: list[int]) -> Tensor:
        for index in chosen:
            x = self.branches[index](x)
        return x


class Fork(nn.Module):
    """One unit with branches."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.ModuleList([Branches()])

    def forward(self, x: Tensor, chosen: list[int]) -> Tensor:
        return self.only[0](x, chosen)


def batch(step: int, size: int = 24) -> tuple[Tensor, Tensor]:
    """The whole batch of a step, divisible by 2, 3, 4 and 8 ranks: tokens and targets."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (size, 6), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
