"""No search for NaN in each node of the backward pass, which somebody has forgotten."""

import torch

from workers.changes._base import Change, Elsewhere, Look, own_only


def _why_not(look: Look) -> str | None:
    return own_only(look) or (None if torch.is_anomaly_enabled() else Elsewhere("it does not detect anomalies"))


CHANGE = Change(
    causes=("kernels", "host", "launches", "synchronisation"),
    how="leave out torch.autograd.set_detect_anomaly(True)",
    why_not=_why_not,
    after=lambda _step: torch.autograd.set_detect_anomaly(False),
)
