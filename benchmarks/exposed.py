"""Compares the processor time of a step of kind `ddp` with that of the same step over a group that moves nothing.

    python -m benchmarks.exposed                # two ranks over gloo, each strategy, 40 steps of each side: 2 minutes
    python -m benchmarks.exposed --model mid --steps 24

Other load hardly changes processor time, unlike the exposed communication itself. Both sides compute the same, so the
first must take more; if the second does, the silent group has changed what is computed with. Its weights' standard
deviation shows whether it has.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
import time
from typing import Any

from app.specs.ddp import FULLY_SHARDED, DdpSpec
from parallel.process_group import Rank, launch

MODELS: dict[str, dict[str, Any]] = {
    "tiny": {"size": "tiny"},
    "mid": {"d_model": 256, "d_ff": 1024, "num_layers": 4, "num_heads": 8, "vocab_size": 8192},
}
STRATEGIES = ("naive", "flat", "overlapped", "bucketed", "fsdp", "torch_ddp", "torch_fsdp")


def measure(rank: Rank, spec: dict[str, Any], steps: int) -> list[Any]:
    """Return, for the strategy and then for the silent group, the processor time of a step in ms, the mean over the
    later half, and the standard deviation of the weights behind it."""
    import torch
    from torch.distributed.tensor import DTensor

    from parallel.silent_group import silent_group
    from workers.jobs.ddp import strategies
    from workers.jobs.ddp.context import RankContext
    from workers.measure.timing import run_step

    parsed, silent = DdpSpec(**spec), silent_group()
    context = RankContext(rank, parsed)
    found = []
    for side in (parsed.strategy, strategies.SILENT):
        batches = strategies.rank_batches(parsed, rank.index, rank.device)
        group = silent if side == strategies.SILENT else None
        trained = strategies.build(parsed, side, rank.device, batches, group)
        times = []
        for _ in range(steps):
            trained.step.prepare()
            context.exchange(0.0)
            before = time.process_time()
            run_step(trained.step.phases, ())
            times.append(1e3 * (time.process_time() - before))
            rank.step_done()
        later = times[steps // 2 :]
        parts = (one.to_local() if isinstance(one, DTensor) else one for one in trained.model.parameters())
        weights = torch.cat([part.detach().flatten() for part in parts])
        found += [sum(later) / len(later), float(weights.std())]
    return found


def main() -> None:
    """Print a row for each strategy: the rank that took longest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="tiny")
    parser.add_argument("--steps", type=int, default=40)
    chosen = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(f"{'strategy':28}{'step, ms':>10}{'silent, ms':>12}{'weights':>10}{'silent':>10}")
    for strategy in STRATEGIES:
        for sharded in (False,) if strategy in FULLY_SHARDED else (False, True):
            spec = DdpSpec.model_validate(
                {
                    "strategy": strategy,
                    "sharded_optimizer": sharded,
                    "model": MODELS[chosen.model],
                    "context_length": 64,
                    "measure_steps": chosen.steps,
                }
            )
            with tempfile.TemporaryDirectory() as folder:
                ranks = launch(
                    measure, spec.model_dump(mode="json"), chosen.steps, world_size=2, backend="gloo", folder=folder
                )
            own, silent = (max(rank[place] for rank in ranks) for place in (0, 2))
            weights = [max((rank[place] for rank in ranks), key=lambda one: abs(math.log(one))) for place in (1, 3)]
            name = f"{strategy}, sharded optimizer" if sharded else strategy
            print(f"{name:28}{own:10.1f}{silent:12.1f}{weights[0]:10.3f}{weights[1]:10.3f}", flush=True)


if __name__ == "__main__":
    main()
