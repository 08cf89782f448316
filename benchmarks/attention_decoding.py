"""Attention of one query to a long cache of keys, beside torch's own: times on this GPU, and ratios.

    python -m benchmarks.attention_decoding --lengths 1024 8192 131072

One line per problem: microseconds of the device for each implementation with a cold L2 cache, the best of torch's, ours
relative to it, the share of the device's copy bandwidth that ours reads keys and values at, and the host's time of a
call. `--plans` instead compares the sizes of programs that `kernels.attention.triton.decoding` could take.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kernels.attention.flash_triton import flash_attention
from kernels.attention.triton import decoding
from kernels.attention.triton.decoding import Plan
from kernels.device_clock import DeviceClock

TORCH = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
WARMUP = 3
THREADS = 16


@dataclass(frozen=True)
class Problem:
    """One query of each head, and a cache."""

    batch: int
    heads: int
    key_heads: int
    keys: int
    head_dim: int

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (batch, heads, 1, head_dim), keys and values."""
        q = torch.randn(self.batch, self.heads, 1, self.head_dim, device="cuda", dtype=torch.bfloat16)
        k, v = (
            torch.randn(self.batch, self.key_heads, self.keys, self.head_dim, device="cuda", dtype=torch.bfloat16)
            for _ in range(2)
        )
        return q, k, v

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values."""
        return 2 * 2 * self.batch * self.key_heads * self.keys * self.head_dim

    def __str__(self) -> str:
        return f"{self.batch} × {self.heads}/{self.key_heads} × {self.keys} × {self.head_dim}"


def torch_call(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """A call of one of torch's backends."""

    def call() -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])

    return call


def times(clock: DeviceClock, call: Callable[[], object], samples: int) -> tuple[float, float]:
    """Medians: microseconds of the device, and of the host."""
    clock.forget()

    def work() -> None:
        call()

    laps = [clock.lap(work) for _ in range(WARMUP + samples)][WARMUP:]
    return 1e3 * statistics.median(lap.device_ms for lap in laps), statistics.median(lap.host_us for lap in laps)


def compare(problem: Problem, clock: DeviceClock, samples: int) -> str:
    """The problem's line."""
    q, k, v = problem.inputs()
    calls: dict[str, Callable[[], Tensor]] = {"ours": lambda: flash_attention(q, k, v)}
    calls |= {name: torch_call(backend, q, k, v) for name, backend in TORCH.items()}
    found: dict[str, tuple[float, float]] = {}
    for name, call in calls.items():
        try:
            call()
        except RuntimeError:  # this backend does not take it
            continue
        found[name] = times(clock, call, samples)
    ours, host_us = found.pop("ours")
    best = min(device_us for device_us, _ in found.values())
    cells = [f"{found[name][0]:8.1f}" if name in found else "       –" for name in TORCH]
    rate = problem.cache_bytes / ours / 1e6
    return f"{problem!s:28} {ours:8.1f} {' '.join(cells)} {best:8.1f} {best / ours:6.2f}× {rate:7.2f} {host_us:7.0f}"


def plans(width: int) -> Iterator[Plan]:
    """The plans that are compared: first the present one."""
    yield decoding.PLANS[width]
    yield replace(decoding.PLANS[width], ahead=False)
    for keys, warps, stages, programs in itertools.product((32, 64, 128), (4, 8), (2, 3, 4), (2, 3, 4, 6)):
        if 2 * 2 * stages * keys * width <= 200 << 10 and keys * width >= 64 * 64:
            yield from (Plan(keys, warps, stages, programs, tma) for tma in (True, False))


def compare_plans(head_dim: int, clock: DeviceClock, samples: int) -> Iterator[str]:
    """Lines: the best plans by the geometric mean over some problems, and the present one."""
    problems = [
        Problem(1, 32, 8, 8192, head_dim),
        Problem(1, 32, 32, 2048, head_dim),
        Problem(8, 32, 8, 16384, head_dim),
    ]
    listed = list(dict.fromkeys(plans(head_dim)))
    inputs = [problem.inputs() for problem in problems]
    rooms = [(torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)) for q, _, _ in inputs]

    def run(plan: Plan, index: int) -> None:
        decoding.decode(*inputs[index], *rooms[index], plan)

    def compile_all(plan: Plan) -> str:
        try:
            for index in range(len(problems)):
                run(plan, index)
        except Exception as failure:  # noqa: BLE001 - whatever Triton says, the plan is left out
            return f"{plan} is left out: {type(failure).__name__}: {str(failure).splitlines()[0][:100]}"
        return ""

    with ThreadPoolExecutor(THREADS) as pool:
        reasons = dict(zip(listed, pool.map(compile_all, listed), strict=True))
    torch.cuda.synchronize()
    yield from filter(None, reasons.values())
    found: dict[Plan, list[float]] = {}
    for plan in listed:
        if not reasons[plan]:
            found[plan] = [
                times(clock, lambda plan=plan, index=index: run(plan, index), samples)[0]  # type: ignore[misc]
                for index in range(len(problems))
            ]
    ranked = sorted(found, key=lambda plan: math.prod(found[plan]))
    yield f"head dimension {head_dim}: microseconds of {', '.join(map(str, problems))}"
    for plan in [*ranked[:12], listed[0]]:
        yield f"    {plan}: {', '.join(f'{one:.1f}' for one in found.get(plan, []))}"


def main() -> None:
    """Print the table, or the comparison of plans."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--key-heads", type=int, nargs="+", default=[32, 8])
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16_384, 65_536, 131_072])
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--plans", action="store_true", help="compare plans instead")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "There is no CUDA device here.\n")
    warnings.filterwarnings("ignore", category=UserWarning)  # torch tells why a backend does not take a call
    clock = DeviceClock(torch.device("cuda", torch.cuda.current_device()))
    if given.plans:
        for head_dim in given.head_dims:
            for line in compare_plans(head_dim, clock, given.samples):
                print(line, flush=True)
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: µs of the device; one query, bf16")
    names = " ".join(f"{name:>8}" for name in TORCH)
    print(f"{'batch × heads × keys × dim':28} {'ours':>8} {names} {'best':>8} {'ratio':>7} {'TB/s':>7} {'host µs':>7}")
    shapes = itertools.product(given.head_dims, given.batches, given.key_heads, given.lengths)
    for head_dim, batch, key_heads, keys in shapes:
        print(compare(Problem(batch, given.heads, key_heads, keys, head_dim), clock, given.samples), flush=True)


if __name__ == "__main__":
    main()
