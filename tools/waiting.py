"""Waits for what another thread or process does."""

import time
from collections.abc import Callable
from typing import TypeVar

LATE_BY = 0.05
"""A condition is seen at most so much later than it is true, as a share of the time waited."""
MAX_POLL_S = 0.2

T = TypeVar("T")


def wait_until(
    condition: Callable[[], T | None], what: str = "a condition", timeout_s: float = 60.0, *, poll_s: float = 0.02
) -> T:
    """Poll until `condition` returns a true value; returns it.

    It polls every `poll_s` seconds, and after a while less often: asking takes processor time from what it waits for.
    Raises TimeoutError: the time is over; the message names `what`.
    """
    started = time.monotonic()
    while not (result := condition()):
        waited = time.monotonic() - started
        if waited > timeout_s:
            raise TimeoutError(f"waited {timeout_s:g} s for {what}")
        time.sleep(max(poll_s, min(waited * LATE_BY, MAX_POLL_S)))
    return result
