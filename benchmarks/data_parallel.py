"""Times data parallelism, ours and torch's, in one run: step time, exposed communication and peak memory per strategy.

    python3 -m benchmarks.data_parallel --json data_parallel.json    # two GPUs, size xl, about 5 minutes
    python3 -m benchmarks.data_parallel --size tiny --backend gloo   # without GPUs

Needs torch only. The strategies run in turns, round by round, each with a model built anew; in fp32 and under bf16
autocast. A step is forward, backward, the end of the communication, a fused AdamW and dropping the
gradients. Ranks start each step together, and its time is the greatest of any rank. Exposed communication is the
difference of the median to that of the strategy `none`, which is the same step without communication. The loss after
the fp32 steps must be the same for all strategies; `none`, which learns each rank's batch alone, gets a lower one.

Strategies whose name begins with "torch" are torch's: DistributedDataParallel, ZeroRedundancyOptimizer, fully_shard.
"cast" shards and communicates in bf16, without autocast.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW, Optimizer

import parallel
from parallel.accounting import bus_bandwidth
from parallel.collectives import MIB, default_group, make_operation, over_ranks, time_operation
from parallel.process_group import Rank, RanksFailed, launch
from workers.model import TransformerLM
from workers.model.batches import RandomBatches
from workers.model.loss import cross_entropy
from workers.model.precision import PRECISIONS

GIB = 2**30
LEARNING_RATE = 1e-4
LOSS_TOLERANCE = 1e-3
"""Relative; the strategies add the same numbers in different orders."""
SIZES: dict[str, dict[str, int]] = {
    "xl": {"d_model": 1600, "d_ff": 6400, "num_layers": 48, "num_heads": 25, "vocab_size": 10_000},
    "large": {"d_model": 1280, "d_ff": 5120, "num_layers": 36, "num_heads": 20, "vocab_size": 10_000},
    "tiny": {"d_model": 64, "d_ff": 256, "num_layers": 2, "num_heads": 4, "vocab_size": 500},
}
PRECISION_NAMES = ("fp32", "bf16")


def nothing() -> None:
    """Finish no communication: there is none, or the backward pass has finished it."""


@dataclass
class Trained:
    """A model in its wrapper, with its optimizer."""

    model: nn.Module
    optimizer: Optimizer
    finish: Callable[[], None] = nothing
    autocasts: bool = True
    """Whether bf16 means autocast; if not, the wrapper casts."""


def adamw(parameters: Any) -> Optimizer:
    return AdamW(parameters, lr=LEARNING_RATE, fused=True)


def sharded_adamw(parameters: Any) -> Optimizer:
    return parallel.ShardedOptimizer(parameters, AdamW, lr=LEARNING_RATE, fused=True)


def alone(module: nn.Module) -> Trained:
    return Trained(module, adamw(module.parameters()))


def ours(
    wrap: Callable[[nn.Module], Any], make: Callable[[Any], Optimizer] = adamw, *, autocasts: bool = True
) -> Callable[[nn.Module], Trained]:
    def build(module: nn.Module) -> Trained:
        model = wrap(module)
        return Trained(model, make(model.parameters()), model.finish_gradient_synchronization, autocasts)

    return build


def bucketed(size_mb: float | None, first_mb: float | None = None, *, views: bool = True) -> Callable[[nn.Module], Any]:
    return lambda module: parallel.BucketedDataParallel(
        module, size_mb, first_bucket_size_mb=first_mb, gradients_as_views=views
    )


def torch_ddp(
    bucket_cap_mb: int, *, views: bool = False, make: Callable[[Any], Optimizer] = adamw
) -> Callable[[nn.Module], Trained]:
    def build(module: nn.Module) -> Trained:
        device = next(module.parameters()).device
        model = nn.parallel.DistributedDataParallel(
            module,
            device_ids=[device.index] if device.type == "cuda" else None,
            bucket_cap_mb=bucket_cap_mb,
            gradient_as_bucket_view=views,
        )
        return Trained(model, make(model.parameters()))

    return build


def zero_adamw(parameters: Any) -> Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    made: Optimizer = ZeroRedundancyOptimizer(parameters, optimizer_class=AdamW, lr=LEARNING_RATE, fused=True)
    return made


def torch_fsdp(dtype: torch.dtype | None = None) -> Callable[[nn.Module], Trained]:
    def build(module: nn.Module) -> Trained:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(next(module.parameters()).device.type, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=dtype)
        for block in module.layers:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(module, mesh=mesh, mp_policy=policy)
        return Trained(module, adamw(module.parameters()), autocasts=dtype is None)

    return build


def fsdp(dtype: torch.dtype | None = None) -> Callable[[nn.Module], Trained]:
    return ours(lambda module: parallel.FullyShardedDataParallel(module, compute_dtype=dtype), autocasts=dtype is None)


STRATEGIES: dict[str, Callable[[nn.Module], Trained]] = {
    "none": alone,
    "torch ddp 25": torch_ddp(25),
    "torch ddp 100 views": torch_ddp(100, views=True),
    "bucketed 25": ours(bucketed(25)),
    "bucketed 100": ours(bucketed(100)),
    "bucketed 100 in place": ours(bucketed(100, views=False)),
    "torch ddp 100 views + zero": torch_ddp(100, views=True, make=zero_adamw),
    "torch ddp 100 views + sharded": torch_ddp(100, views=True, make=sharded_adamw),
    "bucketed 100 + sharded": ours(bucketed(100), sharded_adamw),
    "torch fsdp": torch_fsdp(),
    "fsdp": ours(parallel.FullyShardedDataParallel),
    "torch fsdp cast": torch_fsdp(torch.bfloat16),
    "fsdp cast": fsdp(torch.bfloat16),
    "overlapped": ours(parallel.OverlappedDataParallel),
    "naive": ours(parallel.NaiveDataParallel),
    "flat": ours(parallel.FlatDataParallel),
    "bucketed 10": ours(bucketed(10)),
    "bucketed 1000": ours(bucketed(1000)),
    "bucketed 5 to 100": ours(bucketed(100, 5)),
}


def run_rank(rank: Rank, settings: Mapping[str, Any], tasks: list[str]) -> None:
    """Measure the tasks' strategies one after the other, and report each; stop when the time is over."""
    until = time.monotonic() + settings["budget_s"]
    longest = 0.0
    if settings["bandwidths"]:
        found = bandwidths(rank, settings["bandwidths"])
        if rank.index == 0:
            rank.report(found)
    for strategy in tasks:
        began = time.monotonic()
        # All ranks must agree on whether there is time for one more.
        enough = torch.tensor([int(began + longest < until)], device=rank.device)
        dist.all_reduce(enough, op=dist.ReduceOp.MIN)
        if not enough:
            break
        found = measure(rank, settings, strategy)
        longest = max(longest, time.monotonic() - began)
        if rank.index == 0:
            rank.report({"strategy": strategy, "seconds": time.monotonic() - began, **found})


def bandwidths(rank: Rank, sizes_mb: list[int]) -> dict[str, Any]:
    """Return the all-reduce's bus bandwidth in GB/s by size in MB: what the exposed times are to be compared with."""
    group = default_group()
    found = {}
    for size_mb in sizes_mb:
        operation = make_operation("all_reduce", size_mb * MIB, rank.device, group=group)
        times = time_operation(operation, rank.device, group=group, warmup=3, steps=7, stepped=rank.step_done)
        slowest = over_ranks(times, rank.device, group).slowest
        median_s = statistics.median(slowest) / 1e3
        found[size_mb] = bus_bandwidth("all_reduce", operation.size_bytes, median_s, rank.world_size) / 1e9
    return {"bus_gb_per_s": found}


def measure(rank: Rank, settings: Mapping[str, Any], strategy: str) -> dict[str, Any]:
    """Build a strategy's model, run it in each precision, and combine what the ranks have seen."""
    torch.manual_seed(0)
    shape = SIZES[settings["size"]]
    with rank.device:
        module = TransformerLM(context_length=settings["context_length"], **shape)  # type: ignore[arg-type]
    trained = STRATEGIES[strategy](module)
    batches = RandomBatches(
        shape["vocab_size"], settings["batch_size"], settings["context_length"], rank.device, seed=rank.index
    )
    precisions = PRECISION_NAMES if trained.autocasts else ("bf16",)
    found: dict[str, Any] = {}
    for precision in precisions:
        PRECISIONS[precision].apply()
        casts = PRECISIONS[precision].autocast(rank.device.type) if trained.autocasts else nullcontext()
        found[precision] = run_steps(rank, settings, trained, batches, casts)
    del trained, module
    gc.collect()
    if rank.device.type == "cuda":
        # Whatever a strategy leaves behind would count against the next one.
        found["left_gib"] = torch.cuda.memory_allocated(rank.device) / GIB
        torch.cuda.empty_cache()
    return found


def run_steps(
    rank: Rank,
    settings: Mapping[str, Any],
    trained: Trained,
    batches: RandomBatches,
    casts: AbstractContextManager[object],
) -> dict[str, Any]:
    """Run warm-up steps and measured ones; return all ranks' times, peaks and losses combined."""
    on_gpu = rank.device.type == "cuda"
    synchronize = functools.partial(torch.cuda.synchronize, rank.device) if on_gpu else nothing
    times: list[float] = []
    loss = torch.zeros(())
    # The same one in every step: a rank that averages nothing learns its own by heart, and its loss tells.
    inputs, targets = batches.next()
    for index in range(settings["warmup_steps"] + settings["measure_steps"]):
        if index == settings["warmup_steps"] and on_gpu:
            torch.cuda.reset_peak_memory_stats(rank.device)
        dist.barrier()
        synchronize()
        began = time.perf_counter()
        with casts:
            loss = cross_entropy(trained.model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        trained.finish()
        trained.optimizer.step()
        trained.optimizer.zero_grad(set_to_none=True)
        synchronize()
        times.append(1e3 * (time.perf_counter() - began))
        rank.step_done()
    peak = torch.cuda.max_memory_allocated(rank.device) / GIB if on_gpu else 0.0
    seen = [times[settings["warmup_steps"] :], [peak], [float(loss.detach())]]
    everybody: list[Any] = [None] * rank.world_size
    dist.all_gather_object(everybody, seen)
    return {
        "step_ms": [max(step) for step in zip(*(one[0] for one in everybody), strict=True)],
        "peak_gib": max(one[1][0] for one in everybody) if on_gpu else None,
        "loss": statistics.mean(one[2][0] for one in everybody),
    }


def run_all(settings: Mapping[str, Any], tasks: list[str], world_size: int, backend: str) -> list[dict[str, Any]]:
    """Run the tasks in as few launches as failures allow: a strategy that fails costs itself only."""
    results: list[dict[str, Any]] = []
    left = list(tasks)
    until = time.monotonic() + settings["budget_s"]

    def reported(index: int, result: Any) -> None:
        results.append(result)
        if "bus_gb_per_s" in result:
            rates = ", ".join(f"{size} MB {rate:.0f} GB/s" for size, rate in result["bus_gb_per_s"].items())
            print(f"all-reduce, bus bandwidth: {rates}", flush=True)
            return
        left.remove(result["strategy"])
        print(f"{result['strategy']}: {', '.join(summary(result))} ({result['seconds']:.1f} s)", flush=True)

    while left and time.monotonic() < until:
        with tempfile.TemporaryDirectory(prefix="flopwatch-") as folder:
            try:
                now = {**settings, "budget_s": until - time.monotonic()}
                if results:
                    now["bandwidths"] = []
                launch(
                    run_rank,
                    now,
                    list(left),
                    world_size=world_size,
                    backend=backend,
                    folder=Path(folder),
                    reported=reported,
                )
                break
            except RanksFailed as error:
                failed = left[0]
                print(f"{failed} failed: {error}", flush=True)
                results.append({"strategy": failed, "error": str(error)})
                left = [name for name in left if name != failed]
    if left:
        print(f"no time for: {', '.join(left)}", flush=True)
    return results


def summary(result: Mapping[str, Any]) -> Iterator[str]:
    """Write each precision's median."""
    for precision in PRECISION_NAMES:
        if precision in result:
            yield f"{precision} {statistics.median(result[precision]['step_ms']):.1f} ms"


def print_table(results: list[dict[str, Any]], names: list[str]) -> None:
    """Print a row per strategy: median step, exposed communication and peak per precision; and the fp32 loss."""
    medians = {(n, p): pooled(results, n, p, "step_ms") for n in names for p in PRECISION_NAMES}
    losses = [loss for name in names if name != "none" and (loss := pooled(results, name, "fp32", "loss")) is not None]
    usual = statistics.median(losses) if losses else 0.0
    heads = ["strategy", *(f"{p} {what}" for p in PRECISION_NAMES for what in ("ms", "exposed ms", "peak GiB")), "loss"]
    print("\n| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
    for name in names:
        cells = [name]
        for precision in PRECISION_NAMES:
            median, base = medians[name, precision], medians.get(("none", precision))
            peak = pooled(results, name, precision, "peak_gib")
            cells.append("" if median is None else f"{median:.1f}")
            cells.append("" if median is None or base is None else f"{median - base:+.1f}")
            cells.append("" if peak is None else f"{peak:.1f}")
        loss = pooled(results, name, "fp32", "loss")
        cells.append("" if loss is None else f"{loss:.4f}{'' if name == 'none' or agrees(loss, usual) else ' WRONG'}")
        print("| " + " | ".join(cells) + " |")


def agrees(loss: float, usual: float) -> bool:
    """Tell whether a loss is that of the other strategies, but for rounding."""
    return abs(loss - usual) <= LOSS_TOLERANCE * abs(usual)


def pooled(results: list[dict[str, Any]], name: str, precision: str, what: str) -> float | None:
    """Return the median over all rounds of a strategy, or None without any."""
    samples: list[float] = []
    for one in results:
        if one.get("strategy") == name and precision in one and (value := one[precision][what]) is not None:
            samples += value if isinstance(value, list) else [value]
    return statistics.median(samples) if samples else None


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="xl")
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=2, help="sequences per rank")
    parser.add_argument("--context-length", type=int, default=512)
    parser.add_argument("--warmup-steps", type=int, default=2)
    parser.add_argument("--measure-steps", type=int, default=6, help="per round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--budget-s", type=float, default=290.0, help="start no strategy that would end after this")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES), metavar="STRATEGY")
    parser.add_argument("--json", type=Path, help="a file for all samples")
    options = parser.parse_args()
    settings = {
        name: getattr(options, name)
        for name in ("size", "batch_size", "context_length", "warmup_steps", "measure_steps", "budget_s")
    }
    settings["bandwidths"] = [1, 10, 25, 100, 1024] if options.backend == "nccl" else [1]
    results = run_all(settings, options.strategies * options.rounds, options.world_size, options.backend)
    if options.json is not None:
        device = torch.cuda.get_device_name() if options.backend == "nccl" else "cpu"
        nccl = torch.cuda.nccl.version() if options.backend == "nccl" else None  # type: ignore[no-untyped-call]
        host = {"device": device, "torch": torch.__version__, "nccl": nccl, "world_size": options.world_size}
        options.json.write_text(json.dumps({"host": host, "settings": settings, "results": results}, indent=1))
    print_table(results, options.strategies)


if __name__ == "__main__":
    main()
