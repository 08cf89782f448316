"""An installed distribution with models that go wrong, for the acceptance tests.

They come to a worker as any user's model does: the folder is on the worker's path, and its metadata registers them as
entry points `flopwatch.models`. Files below $MISBEHAVE_FOLDER tell the test what happened and hold jobs back.
"""

import os
from pathlib import Path
from typing import Any

import misbehaviour
from torch import Tensor, nn


class Plain(nn.Module):
    """A model with one embedding and one projection that does as it should."""

    def __init__(self, vocab_size: int, d_model: int, **_others: Any) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.folder = Path(os.environ["MISBEHAVE_FOLDER"])
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.projection = nn.Linear(d_model, vocab_size, bias=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        self.misbehave()
        logits: Tensor = self.projection(self.embedding(token_ids))
        return logits

    def misbehave(self) -> None:
        """What a subclass does wrong."""


class Counted(Plain):
    """Writes down that it ran; its vocabulary's size says which job it is."""

    def misbehave(self) -> None:
        misbehaviour.count(self.folder, self.vocab_size)


class Gated(Plain):
    """Waits in its forward pass until the file `open`, or `open-PID`, is there; its pid tells that it has started."""

    def misbehave(self) -> None:
        misbehaviour.wait_at_gate(self.folder)


class Stubborn(Plain):
    """Ignores SIGTERM, as does a daemon that it starts: in a session of its own, orphaned. Neither ends by itself."""

    def misbehave(self) -> None:
        misbehaviour.never_end(self.folder)


class Segfault(Plain):
    """Dies by SIGSEGV."""

    def misbehave(self) -> None:
        misbehaviour.fall_over()


class Exits(Plain):
    """Leaves with exit code 3."""

    def misbehave(self) -> None:
        os._exit(3)


class Raises(Plain):
    """Raises an error of its own."""

    def misbehave(self) -> None:
        raise ValueError("the loss is a pineapple")


class Curious(Plain):
    """Writes down every variable that it can find."""

    def misbehave(self) -> None:
        misbehaviour.write_down_variables(self.folder)
