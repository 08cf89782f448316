"""The whole model through torch.compile."""

from collections.abc import Iterator
from contextlib import contextmanager

from workers.changes._base import Change, Look
from workers.changes._compile import why_not_compiled
from workers.measure.own_step import OwnStep


def _why_not(look: Look) -> str | None:
    if (reason := why_not_compiled(look)) is not None or look.own is None:
        return reason
    return None if any(True for _ in look.own.model.parameters()) else "the code makes no model with parameters"


@contextmanager
def _compiled(step: OwnStep) -> Iterator[None]:
    for root in step.roots:
        root.compile()
    yield


CHANGE = Change(
    causes=("launches", "kernels", "host", "attention"),
    how="model.compile()",
    why_not=_why_not,
    fields=lambda _: {"compile": True, "compile_scope": "model"},
    after=_compiled,
    slow=True,
    way="compile",
)
