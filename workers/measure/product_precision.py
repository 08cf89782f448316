"""Tells in which precisions a step's matrix products are computed, which only the step itself decides (autocast)."""

import re
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from kernels.device_events import synchronize
from workers.measure.memory import short_message
from workers.measure.profiling.products import DTYPES, FACTORS, product_of

OTHERS = re.compile(r"aten::(convolution|_cudnn_rnn|mkldnn_rnn_layer)")
"""Operators that multiply matrices, too, and of which nobody counts the FLOPs."""
LEAST_SHARE = 0.9
"""A precision with this share of the products' FLOPs is that of the whole step."""


def precision_of_products(run: Callable[[], object], device: torch.device) -> tuple[dict[str, float], str]:
    """Run a step once under torch's profiler. Returns the share of each precision in their FLOPs ("fp32", "tf32",
    "bf16", "fp16", "fp8", "fp64"), and an empty text; or none and the reason why they are unknown; or those of the
    products alone and the reason why the step's are not known: convolutions or recurrent layers in another one."""
    flops: Counter[str] = Counter()
    others: set[str] = set()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the profiler's warnings are about its use over several cycles
            activities = [torch.profiler.ProfilerActivity.CPU]
            with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
                run()
                if device.type == "cuda":
                    synchronize()
    except RuntimeError as error:
        return {}, f"the precision of the step's products is unknown: the profiler failed: {short_message(error)}"
    for event in profiler.profiler.kineto_results.events():
        name = event.name()
        if name in FACTORS and (product := product_of(name, event.shapes(), event.dtypes())) is not None:
            flops[product.dtype] += int(product.cost.flops)
        elif OTHERS.fullmatch(name) and event.dtypes():
            others.add(DTYPES.get(event.dtypes()[0], ("another",))[0])
    if device.type == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32":
        flops["tf32"] += flops.pop("fp32", 0)
    cudnn: Any = torch.backends.cudnn
    if device.type == "cuda" and cudnn.conv.fp32_precision == "tf32":  # as by default
        others = {"tf32" if one == "fp32" else one for one in others}
    if not flops:
        if len(others) == 1 and "another" not in others:
            return dict.fromkeys(others, 1.0), ""
        return {}, "the precision of the step's products is unknown: the profiler saw none"
    shares = {dtype: count / flops.total() for dtype, count in flops.most_common() if count}
    dtype, most = next(iter(shares.items()))
    if most >= LEAST_SHARE:
        shares = {dtype: 1.0}
    if others and {*others, *shares} != {dtype}:
        each = f"{' and '.join(sorted(others))}, its products in {' and '.join(shares)}"
        return shares, f"the step's convolutions or recurrent layers are in {each}, and the FLOPs of each are unknown"
    return shares, ""
