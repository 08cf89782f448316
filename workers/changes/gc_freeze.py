"""No objects that live to the end for the garbage collector to look at in each step."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from workers.changes._base import Change, Look, own_only
from workers.measure.own_step import OwnStep


def _why_not(look: Look) -> str | None:
    return own_only(look) or (None if look.collections else "the garbage collector did not run in the steps")


@contextmanager
def _frozen(_step: OwnStep) -> Iterator[None]:
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


CHANGE = Change(
    causes=("host", "launches"), how="gc.collect(); gc.freeze() before the loop", why_not=_why_not, after=_frozen
)
