"""What changes by torch.compile share."""

from workers.changes._base import Look


def why_not_compiled(look: Look) -> str | None:
    """Return why a step cannot be compiled, or is compiled already."""
    if look.own is not None:
        return "it is compiled already, at least in part" if look.compiled else None
    if look.spec.mode == "generate":
        return "the cache grows with each token, and each length would be compiled anew"
    return "it is compiled already" if look.spec.compile else None
