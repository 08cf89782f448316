from __future__ import annotations

import random

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded_torch(rng: random.Random) -> None:
    """Random tensors of a test follow the run's printed seed."""
    torch.manual_seed(rng.randrange(2**32))
