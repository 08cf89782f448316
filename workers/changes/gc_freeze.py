"""No objects that live to the end for the garbage collector to look at in each step."""

from workers.changes._base import Change, Look, own_only
from workers.torch_host import frozen_objects


def _why_not(look: Look) -> str | None:
    return own_only(look) or (None if look.collections else "the garbage collector did not run in the steps")


CHANGE = Change(
    causes=("host", "launches"),
    how="gc.collect(); gc.freeze() before the loop",
    why_not=_why_not,
    after=lambda _step: frozen_objects(),
)
