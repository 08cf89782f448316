"""What changes of scaled_dot_product_attention share."""

from workers.changes._base import Look, own_gpu_only

OPERATOR = "aten::scaled_dot_product_attention"


def why_not(look: Look) -> str | None:
    """Return why no other implementation can be chosen for the attention of a user's step."""
    if reason := own_gpu_only(look):
        return reason
    if look.names[OPERATOR] or look.compiled:
        return None
    if look.names["aten::_softmax"]:
        return "its attention is written out"
    return "the step calls no scaled_dot_product_attention"
