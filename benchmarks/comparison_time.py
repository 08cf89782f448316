"""Shows where the time of a comparison goes: seconds of each unit's process, by part.

    python -m benchmarks.comparison_time [SPEC.json]

A real server and worker run the comparison (by default, small's compiled step against itself, on a GPU). In each unit's
process a thread writes down the main thread's stack twenty times a second.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from tabulate import tabulate

from tools.service import FINAL_STATES, Service
from tools.waiting import wait_until

STEP = {
    "kind": "benchmark", "model": {"size": "small"}, "context_length": 512, "precision": "bf16", "compile": True,
    "cuda_graph": True, "attention": "triton", "device": "cuda",
}  # fmt: skip
SPEC = {"kind": "compare", "replicates": 4, "baseline": STEP, "candidate": STEP}
TIMEOUT_S = 900.0
SAMPLER = """
import os, sys, threading, time
from pathlib import Path

def sample(main, path):
    with path.open("w", buffering=1) as file:
        while True:
            frame, names = sys._current_frames().get(main), []
            while frame is not None:
                names.append(f"{frame.f_code.co_filename}:{frame.f_code.co_name}")
                frame = frame.f_back
            print(time.time(), *reversed(names), sep="\\t", file=file)
            time.sleep(0.05)

if b"child" in Path("/proc/self/cmdline").read_bytes().split(b"\\0"):
    path = Path(os.environ["STACKS"], str(os.getpid()))
    threading.Thread(target=sample, args=(threading.main_thread().ident, path), daemon=True).start()
"""
PARTS = {
    "clean-up": ("shutdown_compile_workers",),
    "import torch": (":_import_torch",),
    "compile": ("/_dynamo/", "/_inductor/", "/_functorch/"),
    "capture": ("graphed.py:_capture",),
    "steps": ("timing.py:", "busy.py:"),
    "wait for its turn": ("child.py:main",),
}
"""The parts of a process, with what their stacks hold, the first that fits. A process that waits is at the top of its
program: all other work is below `run_request`, which is the rest."""


def part_of(stack: str) -> str:
    """Return the part to which a sampled stack belongs."""
    for part, marks in PARTS.items():
        if part == "wait for its turn" and ":run_request" in stack:
            continue
        if any(mark in stack for mark in marks):
            return part
    return "rest"


def parts(lines: list[str]) -> defaultdict[str, float]:
    """Return the seconds of each part of a process, from its samples."""
    samples = [(float(time_s), stack) for time_s, _, stack in (line.partition("\t") for line in lines)]
    seconds: defaultdict[str, float] = defaultdict(float)
    for (begin, stack), (end, _) in itertools.pairwise(samples):
        seconds[part_of(stack)] += end - begin
    return seconds


def measure(spec: dict[str, Any], folder: Path) -> tuple[float, list[defaultdict[str, float]]]:
    """Run a comparison; return its seconds, and those of each unit's process by part, in the order they ran."""
    stacks = folder / "stacks"
    stacks.mkdir()
    (folder / "sitecustomize.py").write_text(SAMPLER)
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    with Service(folder / "service", {"PYTHONPATH": path, "STACKS": str(stacks)}) as service:
        client = service.start_server()
        service.start_worker()
        begun = time.perf_counter()
        job = client.post("/jobs", json={"spec": spec}).raise_for_status().json()["id"]
        wait_until(lambda: client.get(f"/jobs/{job}").json()["state"] in FINAL_STATES, "the comparison", TIMEOUT_S)
        seconds = time.perf_counter() - begun
        if error := client.get(f"/jobs/{job}").json()["error"]:
            raise RuntimeError(error["detail"])
    files = sorted(stacks.iterdir(), key=lambda file: file.stat().st_mtime)
    return seconds, [parts(file.read_text().splitlines()) for file in files]


def main() -> None:
    """Print the table."""
    spec = json.loads(Path(sys.argv[1]).read_text()) if len(sys.argv) > 1 else SPEC
    with tempfile.TemporaryDirectory() as folder:
        seconds, processes = measure(spec, Path(folder))
    rows = [[number, *(process[part] for part in (*PARTS, "rest"))] for number, process in enumerate(processes, 1)]
    print(tabulate(rows, ["process", *PARTS, "rest"], floatfmt=".1f", tablefmt="github"))
    print(f"\n{seconds:.1f} s for {len(processes)} processes")


if __name__ == "__main__":
    main()
