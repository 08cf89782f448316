"""Our model's attention in one kernel, which keeps no scores."""

from workers.changes._base import Change, Elsewhere, Look

FUSED = "sdpa_flash"
PLAIN = ("eager", "compiled", "tiled", "sdpa_math")


def _why_not(look: Look) -> str | None:
    if look.own is not None:
        return Elsewhere("only our model's attention can be replaced from outside")
    if look.spec.attention_code is not None or look.spec.attention not in PLAIN:
        return f"attention {look.spec.attention} keeps no scores either"
    return None


CHANGE = Change(
    causes=("attention", "kernels", "launches"),
    how=f"attention={FUSED}",
    why_not=_why_not,
    fields=lambda _: {"attention": FUSED},
)
