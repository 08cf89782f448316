"""A model of four layers whose data types under autocast are known, and its random batches."""

import torch
from torch import Tensor, nn

IN_FEATURES = 16
HIDDEN_FEATURES = 32
CLASSES = 8


class ToyModel(nn.Module):
    """Linear, ReLU, layer norm, linear. Maps (rows, IN_FEATURES) to logits (rows, CLASSES)."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(IN_FEATURES, HIDDEN_FEATURES, bias=False)
        self.relu = nn.ReLU()
        self.ln = nn.LayerNorm(HIDDEN_FEATURES)
        self.fc2 = nn.Linear(HIDDEN_FEATURES, CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc2(self.ln(self.relu(self.fc1(x))))
        return logits


class ToyBatches:
    """Rows of normally distributed features, and random classes; made on the device."""

    def __init__(self, rows: int, device: torch.device, seed: int) -> None:
        self.rows = rows
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    def next(self) -> tuple[Tensor, Tensor]:
        """Return features (rows, IN_FEATURES) float32, and classes (rows,) int64."""
        features = torch.randn(self.rows, IN_FEATURES, device=self.device, generator=self.generator)
        classes = torch.randint(CLASSES, (self.rows,), device=self.device, generator=self.generator)
        return features, classes
