"""The whole model through torch.compile."""

from workers.changes._base import Change, Look
from workers.changes._compile import compiled, why_not_compiled


def _why_not(look: Look) -> str | None:
    if (reason := why_not_compiled(look)) is not None or look.own is None:
        return reason
    return None if any(True for _ in look.own.model.parameters()) else "the code makes no model with parameters"


CHANGE = Change(
    causes=("launches", "kernels", "host", "attention"),
    how="model.compile(), or torch.compile(model) of an nn.Sequential",
    why_not=_why_not,
    fields=lambda _: {"compile": True, "compile_scope": "model"},
    after=lambda step: compiled(step.roots),
    slow=True,
    way="compile",
)
