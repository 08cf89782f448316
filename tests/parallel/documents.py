"""Runs the Python code of documents, in the pool's ranks."""

import contextlib
import re
from pathlib import Path

import torch
from torch import Tensor

import parallel
from tests.parallel.models import batch, loss_of
from tests.parallel.training import device, first_ranks_model, part

CODE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def run(document: str, block: int, folder: str) -> dict[str, bool]:
    """Run a block of a document's code in a folder, with a model, inputs and a loss.

    Returns whether each parameter changed.
    """
    module = first_ranks_model()
    before = {name: value.detach().clone() for name, value in module.state_dict().items()}
    inputs, targets = (part(tensor) for tensor in batch(0))

    def loss(logits: Tensor) -> Tensor:
        return loss_of(logits, targets)

    names = {"model": module, "inputs": inputs, "loss_of": loss}
    code = CODE.findall(Path(document).read_text())[block]
    with contextlib.chdir(folder):
        exec(compile(code, document, "exec"), names)
    model = names["model"]
    sharded = isinstance(model, parallel.FullyShardedDataParallel)
    after = model.full_state_dict() if sharded else model.module.state_dict()
    return {name: not torch.equal(after[name].to(device()), value) for name, value in before.items()}
