"""No search for NaN in each node of the backward pass, which somebody has forgotten."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from workers.changes._base import Change, Elsewhere, Look, own_only, replaced
from workers.measure.own_step import OwnStep


def _why_not(look: Look) -> str | None:
    return own_only(look) or (None if look.detects_anomalies else Elsewhere("it does not detect anomalies"))


@contextmanager
def _undetected(_step: OwnStep) -> Iterator[None]:
    torch.set_anomaly_enabled(False)
    with replaced(torch, "set_anomaly_enabled", lambda *_arguments: None):  # the step may turn it on
        yield


CHANGE = Change(
    causes=("kernels", "launches"),
    how="leave out torch.autograd.set_detect_anomaly(True), and with torch.autograd.detect_anomaly():",
    why_not=_why_not,
    after=_undetected,
)
