"""Learning-rate schedule: linear warm-up, then half a cosine (Loshchilov & Hutter, 2017), then constant."""

import math


def cosine_learning_rate(
    step: int, *, max_learning_rate: float, min_learning_rate: float, warmup_steps: int, cosine_steps: int
) -> float:
    """Return the learning rate of a step.

    Args:
        step: Counted from 0.
        max_learning_rate: Reached at step `warmup_steps`.
        min_learning_rate: Reached at step `cosine_steps`, and kept.
        warmup_steps: Steps of the linear rise from 0.
        cosine_steps: Step at which the cosine ends, counted from 0 as well.
    """
    if step < warmup_steps:
        return max_learning_rate * step / warmup_steps
    if step >= cosine_steps:
        return min_learning_rate
    progress = (step - warmup_steps) / (cosine_steps - warmup_steps)
    return min_learning_rate + 0.5 * (1 + math.cos(math.pi * progress)) * (max_learning_rate - min_learning_rate)
