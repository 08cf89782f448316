"""What changes by torch.compile share."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from workers.changes._base import Look
from workers.measure.compilation import compilation
from workers.outcome import Unsupported


def why_not_compiled(look: Look) -> str | None:
    """Return why a step cannot be compiled, or is compiled already."""
    if look.own is not None:
        return "it is compiled already, at least in part" if look.compiled else None
    if look.spec.mode == "generate":
        return "the cache grows with each token, and each length would be compiled anew"
    return "it is compiled already" if look.spec.compile else None


@contextmanager
def compiled(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Compile what calls of these modules do. Raises Unsupported, at the end: nothing was compiled."""
    from torch._dynamo import config, trace_rules

    before = compilation().graphs
    for module in modules:
        # Module.compile passes over forward passes of torch's own, such as an nn.Sequential's; torch.compile does not.
        with config.patch(wrap_top_frame=trace_rules.check(module.forward)):
            module.compile()
    yield
    if compilation().graphs == before:
        raise Unsupported("it compiles nothing: the step calls its model by other methods than forward, or not at all")
