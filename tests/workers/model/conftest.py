import os
import random

import pytest
import torch

# Before anything imports a kernel: without a GPU, Triton's interpreter runs them.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def seeded_torch(rng: random.Random) -> None:
    """Random tensors of a test follow the run's printed seed."""
    torch.manual_seed(rng.randrange(2**32))
