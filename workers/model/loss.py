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

    Raises:
        ValueError: no such logits, of which gather would take a part, or say what names neither.
    """
    if not isinstance(logits, Tensor) or logits.shape[:-1] != targets.shape or not logits.is_floating_point():
        given = f"{logits.dtype} {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(
            f"the model returns {given} for tokens {tuple(targets.shape)}: let forward return logits alone, floating "
            f"point ({', '.join(map(str, targets.shape))}, vocabulary)"
        )
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    target_logits = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return (torch.logsumexp(logits, dim=-1) - target_logits).mean()
