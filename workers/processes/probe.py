"""Computes something small on each GPU that this process sees, to find out whether they work at all."""

import os

from workers.outcome import InvalidEnvironment

SIZE = 64


def run() -> None:
    """Multiply matrices of ones on each GPU. Raises InvalidEnvironment: a GPU is not there, or computes something else;
    RuntimeError: CUDA's own errors."""
    import torch

    wanted = len(os.environ["CUDA_VISIBLE_DEVICES"].split(","))
    if (seen := torch.cuda.device_count()) < wanted:
        raise InvalidEnvironment(f"CUDA sees {seen} of {wanted} GPUs")
    for index in range(wanted):
        ones = torch.ones(SIZE, SIZE, device=f"cuda:{index}")
        if (total := (ones @ ones).sum().item()) != SIZE**3:
            raise InvalidEnvironment(f"a sum that is {SIZE**3} is {total} on GPU {index}")
