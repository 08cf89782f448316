"""Attention of one query to a long cache of keys, beside torch's own: times on this GPU, and ratios.

    python -m benchmarks.attention_decoding --lengths 1024 8192 131072

One row per problem: microseconds of the device for each implementation with a cold L2 cache, the best of torch's
relative to ours, the rate at which ours reads keys and values, and the host's time of a call.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import warnings
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kernels.attention.flash_triton import flash_attention
from kernels.device_clock import DeviceClock

TORCH = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
COLUMNS = ("batch, heads, key heads, keys, head dim", "ours", *TORCH, "best ÷ ours", "TB/s", "host")
WARMUP = 3


def torch_call(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """Return a call of one of torch's backends."""

    def call() -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])

    return call


def times(clock: DeviceClock, call: Callable[[], Tensor], samples: int) -> tuple[float, float]:
    """Return medians: microseconds of the device, and of the host."""
    clock.forget()

    def work() -> None:
        call()

    laps = [clock.lap(work) for _ in range(WARMUP + samples)][WARMUP:]
    return 1e3 * statistics.median(lap.device_ms for lap in laps), statistics.median(lap.host_us for lap in laps)


def row(clock: DeviceClock, q: Tensor, k: Tensor, v: Tensor, samples: int) -> list[str]:
    """Measure all implementations, and return a row of the table."""
    device_us, host_us = times(clock, lambda: flash_attention(q, k, v), samples)
    found = {}
    for name, backend in TORCH.items():
        with suppress(RuntimeError):  # this backend refuses the inputs
            found[name] = times(clock, torch_call(backend, q, k, v), samples)[0]
    rate = (k.nbytes + v.nbytes) / device_us / 1e6
    return [
        ", ".join(map(str, (*q.shape[:2], *k.shape[1:]))),
        f"{device_us:.1f}",
        *(f"{found[name]:.1f}" if name in found else "–" for name in TORCH),
        f"{min(found.values()) / device_us:.2f}",
        f"{rate:.2f}",
        f"{host_us:.0f}",
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--key-heads", type=int, nargs="+", default=[32, 8])
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16_384, 65_536, 131_072])
    parser.add_argument("--samples", type=int, default=15)
    given = parser.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning)  # torch says why a backend refuses a call
    clock = DeviceClock(torch.device("cuda", torch.cuda.current_device()))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: µs of the device; one query, bf16, no mask\n")
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for head_dim, batch, key_heads, keys in itertools.product(
        given.head_dims, given.batches, given.key_heads, given.lengths
    ):
        shapes = ((batch, given.heads, 1, head_dim), *[(batch, key_heads, keys, head_dim)] * 2)
        q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
        print(f"| {' | '.join(row(clock, q, k, v, given.samples))} |", flush=True)


if __name__ == "__main__":
    main()
