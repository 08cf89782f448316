"""Hardware counters of attention's kernels under Nsight Compute: `python -m benchmarks.ncu_attention`.

One `profile` job for each implementation, on a real server and worker, so that all the wrapping is the product's own.
Needs a GPU whose counters may be read, and ncu. Prints the jobs' tables `ncu-launches` as Markdown. The times in them
are of kernels that ran alone, with cold caches: they say nothing about speed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import httpx

from benchmarks._shared import started_service
from tools.service import submit, wait_for_job

KERNELS = {
    "triton": "forward_kernel|keys_kernel|queries_kernel|rows_kernel",
    "sdpa_flash": "flash",
    "sdpa_cudnn": "flash|fmha|sdpa",
    "eager": "softmax|gemm|nvjet|cutlass",
}
"""Implementations, and a regular expression of the names of their kernels."""
SHOWN = (
    *("function", "grid", "block", "duration_us", "sm_throughput_percent", "dram_throughput_percent"),
    *("l2_throughput_percent", "tensor_pipe_percent", "achieved_occupancy_percent", "registers_per_thread"),
)


def body(attention: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the job that measures one implementation."""
    spec = {
        "kind": "profile",
        "device": "cuda",
        "model": {"size": options.size},
        "context_length": options.context_length,
        "mode": options.mode,
        "precision": "bf16",
        "attention": attention,
        "profile_steps": 1,
        "stacks": False,
        "ncu": {"kernels": KERNELS[attention], "set": options.set, "launches": options.launches},
    }
    return {"spec": spec, "name": f"ncu {attention}"}


def show(client: httpx.Client, attention: str, options: argparse.Namespace) -> None:
    """Run one job, and print its table, or why it has none."""
    job_id = submit(client, body(attention, options))
    job = wait_for_job(client, job_id, timeout_s=options.timeout_s)
    print(f"\n### {attention}: {options.size}, context {options.context_length}, {options.mode}, bf16\n")
    if job["state"] != "succeeded":
        print(f"{job['state']}: {json.dumps({key: job['error'][key] for key in ('code', 'detail')})}")
        return
    rows = client.get(f"/jobs/{job_id}/tables/ncu-launches").raise_for_status().json()["rows"]
    print("| " + " | ".join(SHOWN) + " |\n|" + "---|" * len(SHOWN))
    for row in rows:
        print("| " + " | ".join("" if row[name] is None else f"{row[name]}" for name in SHOWN) + " |")
    files = client.get(f"/jobs/{job_id}/artifacts").raise_for_status().json()["data"]
    print("\n" + ", ".join(f"{file['name']}: {file['size'] / 2**20:.1f} MiB" for file in files), flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the jobs that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", nargs="+", choices=KERNELS, default=["triton", "sdpa_flash"])
    parser.add_argument("--size", default="small", help="of the model")
    parser.add_argument("--context-length", type=int, default=1024)
    parser.add_argument("--mode", choices=("forward", "forward_backward", "train_step"), default="forward_backward")
    parser.add_argument("--set", choices=("basic", "detailed", "full", "roofline"), default="basic")
    parser.add_argument("--launches", type=int, default=6)
    parser.add_argument("--timeout-s", type=float, default=300.0, help="of each job")
    options = parser.parse_args(arguments)
    with started_service() as service:
        service.start_worker()
        client = service.client()
        for attention in options.attention:
            show(client, attention, options)


if __name__ == "__main__":
    main()
