"""The GPU tables of docs/measurements.md: each row is a job that anybody can submit, run in a fresh process.

    python -m benchmarks.gpu_tables --tables training recipe [--save results.jsonl]
    python -m benchmarks.gpu_tables --list

Prints Markdown, and below each table the specs that are not `valid`, with the checks that failed. A job runs as with
`flopwatch run`, in this checkout and with this interpreter, without a queue. With `--save`, each job's reports are
appended to a file as a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.specs.ddp import DdpSpec

ROOT = Path(__file__).resolve().parent.parent
Spec = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """The jobs of a table, and the columns shown of each of their cases."""

    title: str
    specs: Sequence[Spec]
    coordinates: tuple[str, ...]
    metrics: tuple[str, ...]


TRAINING: Spec = {"kind": "benchmark", "device": "cuda"}
FAST: Spec = {**TRAINING, "context_length": 512, "precision": "bf16", "measure_steps": 20}
TIMES = ("forward_ms", "backward_ms", "optimizer_ms", "step_ms")
STEP = ("step_ms", "first_step_ms", "host_us", "gpu_busy_percent", "mfu", "peak_memory_mib")
COMPILED = ("compile", "compile_scope", "cuda_graph")
ATTENTION: Spec = {"kind": "attention", "device": "cuda"}
PASSES = ("forward_ms", "backward_ms", "forward_backward_ms")
CATEGORIES = ("parameter", "gradient", "optimizer_state", "activation", "input", "temporary", "unknown")
"""The categories of memory: the parts of its peak."""


DDP: Spec = {
    "kind": "ddp",
    "backend": "nccl",
    "model": {"size": "xl"},
    "context_length": 512,
    "batch_size": 2,
    "optimizer": "torch_fused_adamw",
    "warmup_steps": 5,
    "measure_steps": 20,
}
"""On two GPUs, about a minute each."""
DDP_COORDINATES = (
    *("strategy", "bucket_size_mb", "gradients_as_views", "sharded_optimizer", "cast_before_communication"),
)
DDP_METRICS = (
    *("step_ms", "exposed_communication_ms", "exposed_communication_error_ms", "communication_ms"),
    *("uncovered_communication_ms", "communication_mib", "mfu", "peak_memory_mib"),
    *("memory_after_init_mib", "memory_before_optimizer_mib", "memory_after_optimizer_mib"),
    *("gradient_error", "parameter_error"),
)


def data_parallel() -> Iterator[Spec]:
    """Jobs of every strategy, ours beside torch's, in both precisions."""
    sharded: Spec = {"sharded_optimizer": True}
    cast: Spec = {"cast_before_communication": True}
    for precision in ("fp32", "bf16"):
        for strategy in ("none", "naive", "flat", "overlapped"):
            yield {**DDP, "precision": precision, "strategy": strategy}
        for size in (25, 100):
            yield {**DDP, "precision": precision, "strategy": "bucketed", "bucket_size_mb": size}
            yield {**DDP, "precision": precision, "strategy": "torch_ddp", "bucket_size_mb": size}
        for strategy in ("bucketed", "torch_ddp"):
            yield {**DDP, "precision": precision, "strategy": strategy, "bucket_size_mb": 100, **sharded}
        for strategy in ("fsdp", "torch_fsdp"):
            yield {**DDP, "precision": precision, "strategy": strategy}
            if precision == "bf16":
                yield {**DDP, "precision": precision, "strategy": strategy, **cast}
    yield from compiled_data_parallel()


def compiled_data_parallel() -> Iterator[Spec]:
    """Jobs whose step the device limits in bf16, too: of an eager or a small one the host's time is the longer one."""
    compiled: Spec = {**DDP, "precision": "bf16", "compile": True, "batch_size": 8}
    yield {**compiled, "strategy": "none"}
    for size in (25, 100):
        yield {**compiled, "strategy": "bucketed", "bucket_size_mb": size}
        yield {**compiled, "strategy": "torch_ddp", "bucket_size_mb": size}
    yield {**compiled, "strategy": "bucketed", "bucket_size_mb": 100, "gradients_as_views": False}
    yield {**compiled, "strategy": "torch_fsdp"}


def largest() -> Iterator[Spec]:
    """Jobs of the 8-billion-parameter step: ours as the preset has it, with cuDNN's attention, and torch's parts."""
    preset: Spec = {"kind": "ddp", **DdpSpec.presets["8b"], "warmup_steps": 2, "measure_steps": 6}
    yield preset
    yield {**preset, "attention": "sdpa_cudnn"}
    whole_blocks: Spec = {"checkpoint_scope": "block", "checkpoint_layers": None}
    yield {**preset, "strategy": "torch_fsdp", "attention": "sdpa_cudnn", **whole_blocks}


def buckets() -> Iterator[Spec]:
    """Jobs with buckets of several sizes, and in several forms."""
    for size in (1, 10, 100, 1000, None):
        yield {**DDP, "strategy": "bucketed", "bucket_size_mb": size}
    yield {**DDP, "strategy": "bucketed", "bucket_size_mb": 100, "first_bucket_size_mb": 5}
    yield {**DDP, "strategy": "bucketed", "bucket_size_mb": 100, "gradients_as_views": False}


def recipe(size: str) -> list[Spec]:
    """Jobs from an eager step to the fastest one."""
    eager = {**FAST, "model": {"size": size}}
    fused = {**eager, "optimizer": "torch_fused_adamw"}
    blocks, model = {"compile": True}, {"compile": True, "compile_scope": "model"}
    graph: Spec = {"cuda_graph": True}
    ours: Spec = {"attention": "triton"}
    cudnn: Spec = {"attention": "sdpa_cudnn"}
    narrow: Spec = {"parameter_dtype": "bf16"}
    return [
        eager,
        fused,
        {**fused, **graph},
        {**fused, **blocks},
        {**fused, **blocks, **ours},
        {**fused, **blocks, **graph},
        {**fused, **blocks, **graph, **ours},
        {**fused, **blocks, **graph, **cudnn},
        {**fused, **blocks, **graph, **cudnn, **narrow},
        {**fused, **model},
        {**fused, **model, **graph, **cudnn},
        {**fused, **model, **graph, **cudnn, **narrow},
    ]


def variants() -> Iterator[Spec]:
    """Jobs that change one option each of a step of the small model."""
    small = {**TRAINING, "model": {"size": "small"}}
    for precision in ("tf32", "bf16", "fp16"):
        yield {**small, "precision": precision}
    for optimizer in ("torch_adamw", "torch_fused_adamw"):
        yield {**small, "optimizer": optimizer}
    for attention in ("sdpa_flash", "sdpa_cudnn"):
        yield {**small, "precision": "bf16", "attention": attention}
    yield {**small, "activation_checkpointing": True}
    yield {**small, "mode": "forward"}
    yield {**small, "mode": "forward_backward"}
    yield {**small, "mode": "generate", "precision": "bf16", "new_tokens": 64}
    yield {**TRAINING, "model": {"size": "2.7b"}, "batch_size": 64, "context_length": 2048}


LIBRARY_SHAPES = (
    *((1, 16, 16384, 64, True), (1, 16, 16384, 128, True), (2, 32, 32768, 128, True)),
    *((4, 16, 4096, 64, True), (4, 16, 4096, 128, False), (2, 32, 8192, 256, True)),
    *((4, 32, 2048, 80, True), (8, 16, 1024, 64, True), (4, 25, 512, 64, True)),
)
"""(batch, heads, length, head dimension, causal)."""


def libraries() -> Iterator[Spec]:
    """Jobs that compare our attention to the libraries', in bfloat16."""
    for batch, heads, length, head_dim, causal in LIBRARY_SHAPES:
        yield {
            **ATTENTION,
            "implementations": ["sdpa_flash", "flex", "sdpa_cudnn", "triton"],
            "batch_size": batch,
            "num_heads": heads,
            "sequence_lengths": [length],
            "head_dims": [head_dim],
            "dtypes": ["bf16"],
            "causal": [causal],
            "measure_steps": 31,
        }


def lengths() -> Iterator[Spec]:
    """Jobs that show attention's speed over the length, with as many positions in a batch at each: 16 384."""
    for length in (512, 1024, 2048, 4096, 8192, 16384):
        yield {
            **ATTENTION,
            "implementations": ["sdpa_flash", "flex", "sdpa_cudnn", "triton"],
            "batch_size": 16384 // length,
            "num_heads": 16,
            "sequence_lengths": [length],
            "head_dims": [64, 128],
            "dtypes": ["bf16"],
            "causal": [True],
            "mode": "forward_backward",
            "measure_steps": 20,
        }


def compiled_step() -> list[Spec]:
    """Jobs of the compiled step of xl with each attention."""
    step = {**FAST, "model": {"size": "xl"}, "optimizer": "torch_fused_adamw", "compile": True}
    attentions = ("triton", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "flex")
    return [{**step, "attention": attention} for attention in attentions]


def memory() -> Iterator[Spec]:
    """Jobs that show what takes the memory of the 2.7b model, in inference and in the full step."""
    for context_length in (128, 256, 512):
        for mode in ("forward", "train_step"):
            for precision in ("fp32", "bf16"):
                yield {
                    "kind": "memory",
                    "device": "cuda",
                    "model": {"size": "2.7b"},
                    "context_length": context_length,
                    "mode": mode,
                    "precision": precision,
                }


def collectives() -> Spec:
    """Job of every collective operation between two GPUs."""
    return {
        "kind": "collective",
        "backend": "nccl",
        "world_size": 2,
        "size_mb": [1, 10, 100, 1024],
        "measure_steps": 50,
    }


def short() -> Spec:
    """Jobs with lengths whose launch takes longer than their work."""
    return {
        **ATTENTION,
        "implementations": ["triton", "sdpa_flash", "sdpa_cudnn"],
        "num_heads": 16,
        "sequence_lengths": [128, 256, 512, 1024],
        "head_dims": [64],
        "dtypes": ["bf16"],
        "causal": [True],
        "measure_steps": 50,
    }


TABLES = {
    "training": Table(
        "Training step",
        [{**TRAINING, "model": {"size": size}, "warmup_steps": 5} for size in ("small", "medium", "large")],
        ("model",),
        (*TIMES, "first_step_ms", "tflops", "mfu", "peak_memory_mib"),
    ),
    "warmup": Table(
        "By warm-up",
        [
            {**TRAINING, "model": {"size": size}, "warmup_steps": steps}
            for size in ("small", "medium", "large")
            for steps in (0, 1, 2, 5, None)
        ],
        ("model", "warmup_steps"),
        (*TIMES, "first_step_ms"),
    ),
    "recipe": Table("Recipe, xl", recipe("xl"), (*COMPILED, "optimizer", "attention", "parameter_dtype"), STEP),
    "recipe-small": Table(
        "Recipe, small", recipe("small"), (*COMPILED, "optimizer", "attention", "parameter_dtype"), STEP
    ),
    "variants": Table(
        "Variants",
        list(variants()),
        ("mode", "precision", "optimizer", "attention", "activation_checkpointing"),
        (*TIMES, "prefill_ms", "decode_ms_per_token", "peak_memory_mib"),
    ),
    "libraries": Table(
        "Attention",
        list(libraries()),
        ("batch_size", "num_heads", "sequence_length", "head_dim", "implementation"),
        (*PASSES, "tflops", "host_us"),
    ),
    "lengths": Table(
        "Attention over the length",
        list(lengths()),
        ("batch_size", "sequence_length", "head_dim", "implementation"),
        ("forward_backward_ms", "tflops", "host_us"),
    ),
    "compiled-step": Table("Compiled step, xl", compiled_step(), ("attention",), STEP),
    "memory": Table(
        "Memory, 2.7b",
        list(memory()),
        ("context_length", "mode", "precision"),
        (
            "peak_memory_mib",
            "initialisation_peak_memory_mib",
            "forward_peak_memory_mib",
            "backward_peak_memory_mib",
            "optimizer_peak_memory_mib",
            *(f"{category}_mib" for category in CATEGORIES),
            "unknown_percent",
            "rounding_mib",
            "fragmentation_mib",
            "residual_stream_mib",
            "residual_stream_seen_mib",
            "history_entries",
            "snapshot_mib",
        ),
    ),
    "ddp": Table(
        "Data parallelism, xl, two GPUs",
        list(data_parallel()),
        ("precision", "compile", "batch_size", *DDP_COORDINATES),
        DDP_METRICS,
    ),
    "ddp-buckets": Table(
        "Sizes of buckets, xl, fp32, two GPUs",
        list(buckets()),
        ("bucket_size_mb", "first_bucket_size_mb", "gradients_as_views"),
        DDP_METRICS,
    ),
    "ddp-8b": Table(
        "8 billion parameters, 32 768 tokens per rank, two GPUs",
        list(largest()),
        ("strategy", "attention", "checkpoint_scope", "checkpoint_layers"),
        (
            *("step_ms", "forward_ms", "backward_ms", "synchronization_ms", "optimizer_ms", "tflops", "mfu"),
            *("tokens_per_s", "communication_ms", "uncovered_communication_ms", "host_us"),
            *("peak_memory_mib", "memory_reserved_mib", "memory_before_optimizer_mib"),
        ),
    ),
    "collective": Table(
        "Collective operations, two GPUs",
        [collectives()],
        ("operation", "size_mb", "world_size"),
        ("latency_ms", "skew_ms", "algorithm_gb_per_s", "bus_gb_per_s", "host_us"),
    ),
    "short": Table("Short attention", [short()], ("sequence_length", "implementation"), (*PASSES, "host_us")),
}
"""The tables by their names on the command line."""


def run(spec: Spec, timeout_s: float) -> dict[str, Any]:
    """Run a job in a fresh process, and return its reports.

    Raises:
        RuntimeError: the job failed; the message ends with its standard error.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "workers", "run", "-", "--json", "--output", folder]
        done = subprocess.run(
            command, input=json.dumps(spec), capture_output=True, text=True, cwd=ROOT, timeout=timeout_s, check=False
        )
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def rows_of(result: Mapping[str, Any], table: Table) -> Iterator[list[str]]:
    """Return the table's cells, a row per case: medians, with the spread where there are several samples."""
    cases: dict[str, list[Mapping[str, Any]]] = {}
    for measurement in result["measurements"]:
        cases.setdefault(measurement["case_key"], []).append(measurement)
    for measurements in cases.values():
        case, found = measurements[0]["case"], _by_name(measurements)
        yield [
            *("" if (value := case.get(name)) is None else str(value) for name in table.coordinates),
            *(cell(found.get(name)) for name in table.metrics),
            str(measurements[0].get("validity") or result["validity"]["verdict"]),
        ]


def _by_name(measurements: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The measurements by metric. Of a metric with several phases, the one without a phase covers the whole work."""
    found = {one["metric"]: one for one in sorted(measurements, key=lambda one: one["phase"] is None)}
    return found | {f"{one['phase']}_{one['metric']}": one for one in measurements if one["phase"] is not None}


def cell(measurement: Mapping[str, Any] | None) -> str:
    """Write the median, ± the standard deviation of several samples; or why there is none; or nothing."""
    if measurement is None:
        return ""
    if measurement["median"] is None:
        return str(measurement["outcome"])
    spread = "" if not measurement["std"] else f" ± {measurement['std']:.2g}"
    return f"{measurement['median']:.4g}{spread}"


def show(table: Table, timeout_s: float, save: Path | None) -> None:
    """Run the jobs, and print each row when its job is done."""
    columns = (*table.coordinates, *table.metrics, "validity")
    head, notes = False, []
    for spec in table.specs:
        try:
            result = run(spec, timeout_s)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            notes.append(f"{json.dumps(spec)}: {error}")
            continue
        if not head:
            head = True
            environment = result["environment"]
            software = environment["software"]
            print(
                f"\n### {table.title}: {environment['device']['name']}, driver {environment['device'].get('driver')},"
            )
            print(f"torch {software['torch']}, Triton {software['triton']}\n")
            print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
        for row in rows_of(result, table):
            print("| " + " | ".join(row) + " |", flush=True)
        failed = [check for check in result["validity"]["checks"] if not check["ok"] and check["severity"] != "note"]
        notes += [f"{json.dumps(spec)}: {check['name']}: {check['detail']}" for check in failed]
        if save is not None:
            with save.open("a") as file:
                file.write(json.dumps({"spec": spec, **result}) + "\n")
    print("\n" + "\n".join(f"- {note}" for note in notes), flush=True)


def main() -> None:
    """Run the tables that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=["training"])
    parser.add_argument("--rows", nargs="+", type=int, help="only these rows of each table, counted from 0")
    parser.add_argument("--list", action="store_true", help="print the specs instead of running them")
    parser.add_argument("--save", type=Path, help="a file to which everything that jobs report is appended")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="of each job")
    options = parser.parse_args()
    for name in options.tables:
        table = TABLES[name]
        specs = table.specs if options.rows is None else [table.specs[row] for row in options.rows]
        chosen = Table(table.title, specs, table.coordinates, table.metrics)
        if options.list:
            print("\n".join(json.dumps(spec) for spec in chosen.specs))
        else:
            show(chosen, options.timeout_s, options.save)


if __name__ == "__main__":
    main()
