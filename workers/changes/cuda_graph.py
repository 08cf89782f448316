"""Our model's step as a CUDA graph, which the host launches at once."""

from __future__ import annotations

from typing import Any

from workers.changes._base import Change, Look


def _why_not(look: Look) -> str | None:
    if look.own is not None:
        return "only our model's step is captured from outside"
    if not look.on_gpu:
        return "a CPU has no CUDA graphs"
    if look.spec.mode == "generate":
        return "generation's cache grows with each token, and a graph repeats one step"
    return "it is a CUDA graph already" if look.spec.cuda_graph else None


def _fields(_look: Look) -> dict[str, Any]:
    return {"cuda_graph": True}


CHANGE = Change(causes=("launches", "host"), how="cuda_graph=true", why_not=_why_not, fields=_fields)
