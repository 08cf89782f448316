"""Cross-entropy of next-token predictions, from logits."""

import torch
from torch import Tensor


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean of -log softmax(logits)[target], in nats, computed in float32 at least.

    Stable for logits of any size: the log-sum-exp subtracts each row's maximum before it exponentiates.

    Args:
        logits: (…, vocabulary).
        targets: (…), integers below vocabulary.

    Returns:
        A scalar, float32 (float64 for float64 logits).
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    target_logits = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return (torch.logsumexp(logits, dim=-1) - target_logits).mean()
