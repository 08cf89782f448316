"""Checks a rate against what the device can reach: the vendor's peak, and the measured ceiling."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from workers.measure.check import Check
from workers.model.accounting import peak_tflops

if TYPE_CHECKING:
    import torch


HALF = ("bf16", "fp16")
UNITS = {"fp32": ("fp32", "tf32", *HALF), "tf32": ("tf32", *HALF), "bf16": HALF, "fp16": HALF, "fp8": ("fp8",)}
"""The precisions whose units may compute a result of each precision on a GPU: float32 can be split into parts of 16
bits, as our own attention does. A CPU that is slow with 16 bits computes with 32, so there all of them may."""
FASTEST_FIRST = ("fp8", *HALF, "tf32", "fp32")
SPLIT_PRODUCTS = 3
"""Products of 16-bit parts that one of float32 takes at least: high by high, and each high by the other's low."""


def check_rate(tflops: float, precision: str, device: torch.device, ceilings: Path) -> Check:
    """Check that one device can reach a rate of matrix products: check `ceiling`. `tflops`: the rate in TFLOP/s, of
    this device alone."""
    from workers.measure.ceilings import Ceilings
    from workers.measure.environment import device_name
    from workers.measure.validity import check_ceiling

    on_gpu = device.type == "cuda"

    def products(unit: str) -> int:
        return SPLIT_PRODUCTS if on_gpu and unit in HALF and precision in ("fp32", "tf32") else 1

    units = UNITS[precision] if on_gpu else UNITS["fp32"]
    known = {unit: peak_tflops(device_name(device), unit)[0] for unit in units}
    peaks = [peak / products(unit) for unit, peak in known.items() if peak is not None]
    recorded = Ceilings(ceilings).read(device)
    measured = {} if recorded is None else {unit: recorded.tflops.get(unit) for unit in units}
    rates = [
        replace(rate, value=rate.value / products(unit), spread=rate.spread / products(unit))
        for unit, rate in measured.items()
        if rate is not None
    ]
    fastest_units = UNITS[precision] if precision in (*HALF, "fp8") else ("tf32",)
    fastest = (
        any(measured.get(unit) for unit in fastest_units)
        if on_gpu
        else measured.get("fp32") and measured.get(precision)
    )
    if not fastest:
        rates = []  # the fastest unit may not be measured
    highest = max(rates, key=lambda rate: rate.value, default=None)
    return check_ceiling(tflops, max(peaks, default=None), highest, device.type)
