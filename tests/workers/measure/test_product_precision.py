from contextlib import nullcontext

import pytest
import torch

from workers.measure.product_precision import precision_of_products

CPU = torch.device("cpu")


def step(*dtypes: torch.dtype | None) -> None:
    """Forward and backward passes of a layer, each under autocast of a dtype; None: without it."""
    layer = torch.nn.Linear(64, 64)
    for dtype in dtypes:
        with nullcontext() if dtype is None else torch.autocast("cpu", dtype):
            loss = layer(torch.randn(32, 64)).float().sum()
        loss.backward()


@pytest.mark.parametrize(("dtype", "precision"), [(None, "fp32"), (torch.bfloat16, "bf16"), (torch.float16, "fp16")])
def test_the_products_own_precision_is_seen(dtype: torch.dtype | None, precision: str) -> None:
    assert precision_of_products(lambda: step(dtype), CPU) == ({precision: 1.0}, "")


def test_of_several_precisions_each_has_its_share() -> None:
    shares, reason = precision_of_products(lambda: step(None, torch.bfloat16), CPU)
    assert (shares, reason) == ({"fp32": 0.5, "bf16": 0.5}, "")


@pytest.mark.parametrize(
    ("of_convolution", "products", "told"),
    [
        (None, [], ({"fp32": 1.0}, "")),
        (torch.bfloat16, [torch.bfloat16], ({"bf16": 1.0}, "")),
        (None, [torch.bfloat16], ({"bf16": 1.0}, "layers are in fp32, its products in bf16, and the FLOPs of each")),
    ],
)
def test_convolutions_in_another_precision_leave_the_steps_unknown(of_convolution, products, told) -> None:
    def work() -> None:
        step(*products)
        with torch.autocast("cpu", of_convolution, enabled=of_convolution is not None):
            torch.nn.Conv2d(3, 8, 3)(torch.randn(2, 3, 8, 8))

    shares, reason = precision_of_products(work, CPU)
    assert (shares, bool(reason)) == (told[0], bool(told[1]))
    assert told[1] in reason


def test_a_step_without_products_or_with_a_profiler_of_its_own_has_a_reason() -> None:
    assert "saw none" in precision_of_products(lambda: torch.ones(3).add(1), CPU)[1]

    def profiles() -> None:
        with torch.profiler.profile():
            step(None)

    shares, reason = precision_of_products(profiles, CPU)
    assert (not shares) == bool(reason)
