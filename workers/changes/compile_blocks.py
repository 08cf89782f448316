"""The blocks of a model through torch.compile: repeated modules are compiled once."""

from torch import nn

from workers.changes._base import Change, Look
from workers.changes._compile import compiled, why_not_compiled


def _why_not(look: Look) -> str | None:
    if (reason := why_not_compiled(look)) is not None or look.own is None:
        return reason
    return None if blocks(look.own.model) else "the model has no torch.nn.ModuleList or Sequential of equal modules"


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules of the model's lists whose members have one class, of the outermost such lists."""
    found: list[nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():
        children = list(module.children())
        alike = len(children) > 1 and len({type(child) for child in children}) == 1
        if isinstance(module, nn.ModuleList | nn.Sequential) and alike and id(module) not in inside:
            found += children
            inside |= {id(part) for part in module.modules()}
    return found


CHANGE = Change(
    causes=("launches", "kernels", "host", "attention"),
    how="block.compile(), or torch.compile(block) of an nn.Sequential, for each block of the model",
    why_not=_why_not,
    fields=lambda _: {"compile": True, "compile_scope": "blocks"},
    after=lambda step: compiled(blocks(step.model)),
    slow=True,
    way="compile",
)
