"""Training steps on one GPU, without the service: what the `benchmark` job measures, with torch alone installed.

    python benchmarks/gpu_training_step.py                    small, medium, large at warm-ups 0, 1, 2 and 5
    python benchmarks/gpu_training_step.py --sizes small --measure-steps 50

Every configuration runs in a fresh process. Prints one Markdown table, last. Times are means ± standard deviations
in ms, batch 4, context 256, vocabulary 10 000.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"d_model": 128, "d_ff": 512, "num_layers": 2, "num_heads": 4},
    "small": {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12},
    "medium": {"d_model": 1024, "d_ff": 4096, "num_layers": 24, "num_heads": 16},
    "large": {"d_model": 1280, "d_ff": 5120, "num_layers": 36, "num_heads": 20},
}
"""Of app/presets.py; this script runs where the service is not installed."""
VOCABULARY_SIZE = 10_000
PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class Configuration:
    """One row of the table."""

    size: str
    warmup_steps: int
    precision: str = "fp32"
    optimizer: str = "adamw"
    context_length: int = 256
    batch_size: int = 4
    measure_steps: int = 10
    device: str = "cuda"


def configurations(options: argparse.Namespace) -> list[Configuration]:
    """The rows: every warm-up in fp32, then bf16 and the fused optimizer with the longest warm-up."""
    common = {"measure_steps": options.measure_steps, "device": options.device}
    longest = max(options.warmup_steps)
    rows = []
    for size in options.sizes:
        rows += [Configuration(size, steps, **common) for steps in options.warmup_steps]
        rows.append(Configuration(size, longest, precision="bf16", **common))
        rows.append(Configuration(size, longest, optimizer="torch_fused_adamw", **common))
        rows.append(Configuration(size, longest, precision="bf16", optimizer="torch_fused_adamw", **common))
    return rows


def measure(configuration: Configuration) -> dict[str, Any]:
    """Run one configuration in this process: samples in ms, and what they were measured on."""
    import torch

    from kernels.registry import ATTENTION
    from workers.measure import environment
    from workers.measure.memory import OutOfMemory, memory_meter, memory_needed_for
    from workers.measure.timing import make_clock, time_steps
    from workers.model import TransformerLM, accounting
    from workers.model.batches import RandomBatches
    from workers.model.optimizer import make_optimizer
    from workers.model.precision import PRECISIONS
    from workers.model.steps import TrainStep

    device = torch.device(configuration.device)
    precision = PRECISIONS[configuration.precision]
    precision.apply()
    torch.manual_seed(0)
    context, batch = configuration.context_length, configuration.batch_size
    total = configuration.warmup_steps + configuration.measure_steps
    meter = memory_meter(device)
    facts = {"device": environment.device_name(device), "torch": torch.__version__}
    try:
        with memory_needed_for("making the model"), device:
            model = TransformerLM(
                VOCABULARY_SIZE, context, attention=ATTENTION.load("eager").function, **SHAPES[configuration.size]
            )
        batches = RandomBatches(VOCABULARY_SIZE, batch, context, device, seed=0)
        optimizer = make_optimizer(configuration.optimizer, model)
        step = TrainStep(model, batches, precision, model, optimizer, total)
        times = time_steps(
            step.phases,
            make_clock(device, len(step.phases)),
            prepare=step.prepare,
            warmup_steps=configuration.warmup_steps,
            measure_steps=configuration.measure_steps,
            measuring=meter.reset,
        )
    except OutOfMemory as error:
        return facts | {"outcome": str(error)}
    flops = accounting.training_flops(model.forward_flops(batch, context))
    return facts | {
        "outcome": "ok",
        "first_step": times.first_step,
        "step": list(times.step),
        "phases": {name: list(samples) for name, samples in times.phases.items()},
        "peak_memory_mib": meter.peak_mib()[0],
        "flops": flops,
        "peak_tflops": accounting.peak_tflops(facts["device"], configuration.precision)[0],
    }


def in_a_fresh_process(configuration: Configuration) -> dict[str, Any]:
    """`measure` in a new interpreter.

    Raises:
        RuntimeError: it failed; its errors are on standard error.
    """
    command = [sys.executable, __file__, "--configuration", json.dumps(asdict(configuration))]
    finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if finished.returncode:
        raise RuntimeError(f"{configuration} ended with exit code {finished.returncode}")
    result: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return result


def row(configuration: Configuration, result: dict[str, Any]) -> list[str]:
    """Cells of the table."""
    from workers.measure.statistics import summarize

    head = [
        configuration.size,
        configuration.precision,
        configuration.optimizer,
        str(configuration.warmup_steps),
    ]
    if result["outcome"] != "ok":
        return [*head, *["out of memory"] * len(PHASES), *[""] * 6]

    def cell(samples: list[float]) -> str:
        summary = summarize(samples)
        return f"{summary.mean:.1f}" if summary.std is None else f"{summary.mean:.1f} ± {summary.std:.1f}"

    tflops = 1e-9 * result["flops"] / summarize(result["step"]).median
    peak, memory = result["peak_tflops"], result["peak_memory_mib"]
    return [
        *head,
        *(cell(result["phases"][phase]) for phase in PHASES),
        cell(result["step"]),
        f"{summarize(result['step']).median:.1f}",
        f"{result['first_step']:.0f}",
        f"{tflops:.1f}",
        "" if peak is None else f"{tflops / peak:.1%}",
        "" if memory is None else f"{memory:.0f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SHAPES, default=["small", "medium", "large"])
    parser.add_argument("--warmup-steps", nargs="+", type=int, default=[0, 1, 2, 5])
    parser.add_argument("--measure-steps", type=int, default=10)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--configuration", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.configuration:
        print(json.dumps(measure(Configuration(**json.loads(options.configuration)))))
        return
    rows, device = [], ""
    for configuration in configurations(options):
        print(configuration, file=sys.stderr, flush=True)
        result = in_a_fresh_process(configuration)
        device = f"{result['device']}, torch {result['torch']}"
        rows.append(row(configuration, result))
    heads = ["size", "precision", "optimizer", "warm-up", "forward ms", "backward ms", "optimizer ms", "step ms"]
    heads += ["step median", "first step", "TFLOP/s", "MFU", "peak MiB"]
    print(f"\n{device}; batch 4, context 256\n")
    print("| " + " | ".join(heads) + " |")
    print("|" + "|".join(["---"] * 3 + ["---:"] * (len(heads) - 3)) + "|")
    for cells in rows:
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
