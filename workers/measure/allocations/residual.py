"""Records the residual stream: the outputs of a model's blocks in a forward pass."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from workers.measure.allocations.ledger import Allocation
from workers.measure.timing import Observer


class ResidualStream(Observer):
    """An observer of steps that records the storages of the blocks' outputs in the forward pass."""

    def __init__(self) -> None:
        self.storages: list[tuple[int, int]] = []
        """Address and bytes of each block's output, in the order of the last forward pass."""
        self._forward = False

    def step_begins(self) -> None:
        self.storages = []

    def phase_begins(self, name: str) -> None:
        # Under activation checkpointing the blocks run again in the backward pass.
        self._forward = name == "forward"

    def phase_ends(self, name: str) -> None:
        self._forward = False

    @contextmanager
    def of(self, model: nn.Module, attribute: str = "layers") -> Iterator[None]:
        """Record the outputs of a model's blocks inside the context."""

        def look(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if self._forward and isinstance(output, Tensor):
                storage = output.untyped_storage()
                self.storages.append((storage.data_ptr(), storage.nbytes()))

        with ExitStack() as hooks:
            for block in getattr(model, attribute, ()):
                hooks.callback(block.register_forward_hook(look).remove)
            yield

    def sizes_among(self, made: Sequence[Allocation]) -> list[int]:
        """Return the sizes in bytes of the blocks' outputs that are among the allocations of the forward pass."""
        allocations = {(one.address, one.size) for one in made}
        return [size for address, size in self.storages if (address, size) in allocations]
