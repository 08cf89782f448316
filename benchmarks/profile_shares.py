"""The profile tables of docs/measurements.md: where the time goes in inference and in a full training step.

    python -m benchmarks.profile_shares [--sizes small xl] [--contexts 128 256 512 1024] [--save results.jsonl]

Each line of the tables is a job of kind `profile` that anybody can submit, run in a fresh process as with
`flopwatch run`. Prints as Markdown: the share of each class of kernels, the top kernel of each phase, softmax beside
attention's products in time and FLOPs, and what the profiler costs. Below them stand the jobs that failed. With
`--save`, each job's reports are appended to a file as a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from benchmarks.gpu_tables import Spec, run

MODES = ("forward", "train_step")
SCOPES = {
    ("forward", "forward"): "inference",
    ("train_step", "forward"): "forward",
    ("train_step", "forward_backward"): "forward + backward",
    ("train_step", "step"): "full step",
}
"""The names of the scopes of each mode's table `classes`."""
Result = Mapping[str, Any]
Row = dict[str, str]


def specs(sizes: Sequence[str], contexts: Sequence[int], base: Spec) -> list[Spec]:
    """Return the jobs, in the order in which they run."""
    return [
        {**base, "kind": "profile", "model": {"size": size}, "context_length": context, "mode": mode}
        for size in sizes
        for context in contexts
        for mode in MODES
    ]


def table(result: Result, name: str) -> list[dict[str, Any]]:
    """Return the rows of one of the job's tables, keyed by column."""
    (found,) = [one for one in result["tables"] if one["name"] == name]
    names = [column["name"] for column in found["columns"]]
    return [dict(zip(names, row, strict=True)) for row in found["rows"]]


def measured(result: Result, metric: str, phase: str | None = None) -> float | None:
    """Return a metric's median; None if it is unknown."""
    rows = [row for row in result["measurements"] if (row["metric"], row["phase"]) == (metric, phase)]
    value: float | None = rows[0]["median"] if rows else None
    return value


def case_of(spec: Spec) -> Row:
    """Return the first columns of every table."""
    return {"size": str(spec["model"]["size"]), "context": str(spec["context_length"])}


def class_rows(spec: Spec, result: Result) -> Iterator[Row]:
    """Yield a row for each scope: the share of each class in percent, and the forward pass's top kernel."""
    shares: dict[str, dict[str, float | None]] = {}
    for row in table(result, "classes"):
        shares.setdefault(row["scope"], {})[row["class"]] = row["share_percent"]
    for scope, found in shares.items():
        percent = {name: number(share) for name, share in found.items()}
        yield {**case_of(spec), "work": SCOPES[spec["mode"], scope], **percent}


def top_kernel_rows(spec: Spec, result: Result) -> Iterator[Row]:
    """Yield the kernel that takes most of each phase."""
    for phase in ("forward", "backward", "optimizer"):
        if any(one["name"] == f"kernels-{phase}" for one in result["tables"]):
            for row in table(result, f"kernels-{phase}")[:1]:
                yield {
                    **case_of(spec),
                    "mode": spec["mode"],
                    "phase": phase,
                    "top kernel": f"`{row['name'][:100]}`",
                    "class": row["class"],
                    "share %": number(row["share_percent"]),
                    "calls": number(row["calls"]),
                }


def attention_rows(spec: Spec, result: Result) -> Iterator[Row]:
    """Yield a row for each phase: softmax beside the two products, in time and in FLOPs."""
    phases: dict[str, dict[str, dict[str, Any]]] = {}
    for row in table(result, "attention"):
        phases.setdefault(row["phase"], {})[row["part"]] = row
    for phase, parts in phases.items():
        # Scaling and masking the scores is no part of the product.
        times = {name: row["total_ms" if name == "softmax" else "product_ms"] for name, row in parts.items()}
        flops = {name: row["gflop"] for name, row in parts.items()}
        yield {
            **case_of(spec),
            "mode": spec["mode"],
            "phase": phase,
            **{f"{name} ms": number(row["total_ms"]) for name, row in parts.items()},
            **{f"{name}'s product ms": number(times[name]) for name in parts if name != "softmax"},
            "softmax / products, time": ratio(times),
            "softmax / products, FLOPs": ratio(flops),
            **{f"{name} TFLOP/s": number(row["tflops"]) for name, row in parts.items()},
            **{f"{name} is": row["bound"] or "unknown" for name, row in parts.items()},
        }


def cost_rows(spec: Spec, result: Result) -> Iterator[Row]:
    """Yield what the profiler costs, and how busy the device is without it."""
    metrics = (
        *("unprofiled_step_ms", "profiled_step_ms", "profiler_overhead_percent", "gpu_busy_percent", "launches"),
        *("profiled_idle_ms", "largest_gap_ms", "trace_steps"),
    )
    found = {metric: number(measured(result, metric)) for metric in metrics}
    yield {**case_of(spec), "mode": spec["mode"], **found, "validity": str(result["validity"]["verdict"])}


TABLES = {
    "Share of each class, %": class_rows,
    "Top kernel of each phase": top_kernel_rows,
    "Softmax beside attention's products": attention_rows,
    "Cost of the profiler": cost_rows,
}


def ratio(parts: Mapping[str, float | None]) -> str:
    """Write softmax by both products together."""
    products = (parts["scores"], parts["values"])
    if parts["softmax"] is None or None in products or not sum(one or 0.0 for one in products):
        return "unknown"
    return number(parts["softmax"] / sum(one or 0.0 for one in products))


def number(value: float | None) -> str:
    """Write a number with three digits that count; "unknown" for none."""
    return "unknown" if value is None else f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def measure(jobs: Sequence[Spec], timeout_s: float, save: Path | None) -> None:
    """Run the jobs and print the tables."""
    rows: dict[str, list[Row]] = {title: [] for title in TABLES}
    failures: list[str] = []
    environment: Mapping[str, Any] | None = None
    for place, spec in enumerate(jobs, start=1):
        print(f"{place} of {len(jobs)}: {json.dumps(spec)}", flush=True)
        try:
            result = run(spec, timeout_s)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            failures.append(f"{json.dumps(spec)}: {error}")
            continue
        environment = environment or result["environment"]
        if save is not None:
            with save.open("a") as file:
                file.write(json.dumps({"spec": spec, **result}) + "\n")
        if not result["tables"]:
            reasons = {row["reason"] for row in result["measurements"] if row["reason"]}
            failures.append(f"{json.dumps(spec)}: {'; '.join(sorted(reasons))}")
            continue
        for title, rows_of in TABLES.items():
            rows[title] += rows_of(spec, result)
    if environment is not None:
        software = environment["software"]
        print(f"\n{environment['device']['name']}, torch {software['torch']}, Triton {software['triton']}")
    for title, found in rows.items():
        print(f"\n### {title}\n\n{tabulate(found, headers='keys', tablefmt='pipe', disable_numparse=True)}")
    print("\n" + "\n".join(f"- {failure}" for failure in failures), flush=True)


def main() -> None:
    """Run the jobs that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["small", "xl"])
    parser.add_argument("--contexts", nargs="+", type=int, default=[128, 256, 512, 1024])
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--profile-steps", type=int, default=3)
    parser.add_argument("--trace-max-mib", type=int, default=50)
    parser.add_argument("--save", type=Path, help="a file to which everything that jobs report is appended")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="of each job")
    options = parser.parse_args()
    base: Spec = {
        "device": options.device,
        "batch_size": options.batch_size,
        "precision": options.precision,
        "profile_steps": options.profile_steps,
        "trace_max_mib": options.trace_max_mib,
        "stacks": False,
    }
    measure(specs(options.sizes, options.contexts, base), options.timeout_s, options.save)


if __name__ == "__main__":
    main()
