"""Training steps measured through the service: server, worker and `POST /jobs`, as a user runs them.

    python benchmarks/service_training_step.py                       small, medium, large at warm-ups 0, 1, 2 and 5
    python benchmarks/service_training_step.py --extras              also precisions, optimizers, compile, generate, OOM

Prints Markdown tables. The public figures are the course's for an RTX 4090 (fp32, context 256, batch 4).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.service import Service, wait_for_job

RTX_4090_MS = {
    "small": {"forward_ms": 21.3, "backward_ms": 30.5, "optimizer_ms": 13.0},
    "medium": {"forward_ms": 42.6, "backward_ms": 63.5, "optimizer_ms": 29.4},
    "large": {"forward_ms": 71.8, "backward_ms": 145.2, "optimizer_ms": 88.7},
}
TIMES = ("forward_ms", "backward_ms", "optimizer_ms", "step_ms", "first_step_ms")
OTHERS = ("prefill_ms", "decode_ms_per_token", "tokens_per_s", "tflops", "mfu", "peak_memory_mib")
JOB_TIMEOUT_S = 240.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["small", "medium", "large"])
    parser.add_argument("--warmup-steps", nargs="+", type=int, default=[0, 1, 2, 5])
    parser.add_argument("--measure-steps", type=int, default=10)
    parser.add_argument("--context-length", type=int, default=256)
    parser.add_argument("--replicates", type=int, default=1)
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument(
        "--extras", action="store_true", help="precisions, optimizers, compile, generate, out of memory"
    )
    options = parser.parse_args()
    base = {
        "kind": "benchmark",
        "context_length": options.context_length,
        "measure_steps": options.measure_steps,
        "device": options.device,
    }
    cases = [
        {"model": {"size": size}, "warmup_steps": steps, "replicates": options.replicates}
        for size in options.sizes
        for steps in options.warmup_steps
    ]
    with tempfile.TemporaryDirectory() as folder, Service(Path(folder)) as service:
        client = service.start_server()
        service.start_worker()
        try:
            jobs = run(client, [{**base, **case} for case in cases])
            show("Warm-up", jobs, ("model.size", "warmup_steps"), TIMES, beside_public=True)
            if options.extras:
                jobs = run(client, [{**base, **case} for case in extras(options.sizes[0])])
                fields = ("model.size", "mode", "precision", "optimizer", "compile", "attention")
                show("Variants", jobs, (*fields, "batch_size"), (*TIMES, *OTHERS))
        except BaseException:
            print(service.logs()[-8000:])
            raise


def extras(size: str) -> Iterable[dict[str, Any]]:
    """One variant of everything that the spec offers."""
    model = {"model": {"size": size}}
    for precision in ("tf32", "bf16", "fp16"):
        yield {**model, "precision": precision}
    for optimizer in ("torch_adamw", "torch_fused_adamw"):
        yield {**model, "optimizer": optimizer}
    for attention in ("sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "sdpa_math"):
        yield {**model, "precision": "bf16", "attention": attention}
    yield {**model, "precision": "bf16", "optimizer": "torch_fused_adamw", "compile": True}
    yield {**model, "activation_checkpointing": True}
    yield {**model, "mode": "forward"}
    yield {**model, "mode": "forward_backward"}
    yield {**model, "mode": "generate", "precision": "bf16", "new_tokens": 64}
    yield {"model": {"size": "2.7b"}, "batch_size": 64, "context_length": 2048}


def run(client: httpx.Client, specs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Submit all, wait for all; each job with its measurements by metric under `metrics`."""
    ids = [client.post("/jobs", json={"spec": spec}).raise_for_status().json()["id"] for spec in specs]
    jobs = []
    for job_id in ids:
        job = wait_for_job(client, job_id, timeout_s=JOB_TIMEOUT_S)
        rows = client.get(f"/jobs/{job_id}/measurements").raise_for_status().json()["rows"]
        job["metrics"] = {}
        for row in rows:
            job["metrics"].setdefault(row["metric"], []).append(row)
        jobs.append(job)
    return jobs


def show(
    title: str,
    jobs: list[dict[str, Any]],
    fields: tuple[str, ...],
    metrics: tuple[str, ...],
    *,
    beside_public: bool = False,
) -> None:
    """A Markdown table, one row per job."""
    device = next((job["environment"]["device"]["name"] for job in jobs if job["environment"]), "?")
    software: dict[str, Any] = next((job["environment"]["software"] for job in jobs if job["environment"]), {})
    print(f"\n### {title}: {device}, torch {software.get('torch')}\n")
    print("| " + " | ".join((*fields, *metrics, "validity")) + " |")
    print("|" + "---|" * (len(fields) + len(metrics) + 1))
    for job in jobs:
        cells = [str(value_at(job["spec"], field)) for field in fields]
        if job["state"] != "succeeded":
            print("| " + " | ".join(cells) + f" | {job['state']}: {job['error']['code']}: {job['error']['detail']} |")
            continue
        cells += [
            cell(job["metrics"].get(metric, []), metric, job["spec"], beside_public=beside_public) for metric in metrics
        ]
        failed = [check["name"] for check in job["validity"]["checks"] if not check["ok"]]
        print("| " + " | ".join(cells) + f" | {job['validity']['verdict']} {' '.join(failed)} |")


def cell(rows: list[dict[str, Any]], metric: str, spec: dict[str, Any], *, beside_public: bool) -> str:
    """Mean and standard deviation of the first replicate; in brackets the public figure where there is one."""
    if not rows:
        return "–"
    row = rows[0]
    if row["mean"] is None:
        return str(row["outcome"])
    text = f"{row['median']:.4g}" if row["n"] == 1 else f"{row['mean']:.4g} ± {row['std']:.2g}"
    public = RTX_4090_MS.get(spec["model"]["size"], {}).get(metric)
    return f"{text} ({public})" if public and beside_public and spec["context_length"] == 256 else text


def value_at(spec: dict[str, Any], path: str) -> Any:
    """The field at a dotted path."""
    value: Any = spec
    for name in path.split("."):
        value = value[name]
    return value


if __name__ == "__main__":
    main()
