"""Tells in which precision a step's matrix products are computed, which only the step itself decides (autocast)."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable

import torch

from kernels.device_events import synchronize
from workers.measure.memory import short_message
from workers.measure.profiling.products import FACTORS, product_of

LEAST_SHARE = 0.9
"""Least share of the products' FLOPs in the precision of a step."""


def precision_of_products(run: Callable[[], object], device: torch.device) -> tuple[str | None, str]:
    """Run a step once under torch's profiler.

    Returns:
        "fp32", "tf32", "bf16", "fp16" or "fp64", and an empty text; or None and the reason why it is unknown.
    """
    flops: Counter[str] = Counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the profiler's warnings are about its use over several cycles
            activities = [torch.profiler.ProfilerActivity.CPU]
            with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
                run()
                if device.type == "cuda":
                    synchronize()
    except RuntimeError as error:
        return None, f"the precision of the step's products is unknown: the profiler failed: {short_message(error)}"
    for event in profiler.profiler.kineto_results.events():
        name = event.name()
        if name in FACTORS and (product := product_of(name, event.shapes(), event.dtypes())) is not None:
            flops[product.dtype] += int(product.cost.flops)
    if not flops:
        return None, "the precision of the step's products is unknown: the profiler saw none"
    (dtype, most), *_ = flops.most_common(1)
    if most < LEAST_SHARE * flops.total():
        shares = ", ".join(f"{count / flops.total():.0%} {name}" for name, count in flops.most_common())
        return None, f"the step's products are of several precisions: {shares}"
    if dtype == "fp32" and device.type == "cuda" and torch.get_float32_matmul_precision() != "highest":
        dtype = "tf32"
    return dtype, ""
