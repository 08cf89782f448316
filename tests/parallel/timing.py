"""Steps that the pool's ranks record."""

import time
from typing import Any

from parallel.collectives import recorded
from tests.parallel.models import batch, loss_of
from tests.parallel.training import WRAPPERS, device, first_ranks_model, part


def timeline(wrapper: str) -> dict[str, Any]:
    """Record one step of a wrapper, and another one without recording."""
    model = WRAPPERS[wrapper](first_ranks_model())
    inputs, targets = batch(0)
    with recorded(device()) as both:
        began = time.perf_counter()
        loss_of(model(part(inputs)), part(targets)).backward()
        model.finish_gradient_synchronization()
        took_ms = 1e3 * (time.perf_counter() - began)
    intervals = both.intervals()
    loss_of(model(part(inputs)), part(targets)).backward()
    model.finish_gradient_synchronization()
    return {
        "intervals": [(one.operation, one.size_bytes, one.start_ms, one.end_ms) for one in intervals],
        "after": len(both.intervals()),
        "took_ms": took_ms,
        "gradients": sum(p.nbytes for p in model.parameters() if p.requires_grad),
        "parameters": len([p for p in model.parameters() if p.requires_grad]),
    }
