import gc
import weakref

import torch

from workers.measure.saved import saved_tensors


def test_the_pass_is_released() -> None:
    """Its tensors would be memory of unknown use in whatever the process records next."""
    model, outputs = torch.nn.Linear(2, 2), []
    # exp saves its own output.
    found = saved_tensors(model, lambda: outputs.append(weakref.ref(model(torch.ones(1, 2)).exp())))
    gc.collect()
    assert [one.made_by for one in found] == ["input", "ExpBackward0"]
    assert outputs[0]() is None
