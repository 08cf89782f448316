"""Shows how often `flopwatch versus` finds code that is 5 % slower, and how often it finds a difference of equal code.

    python -m benchmarks.versus [--equal 20] [--slower 5] [--replicates 8] [--load 1]

A real server and worker compare two files that repeat a matrix product: 40 and 42 times, or 40 and 40 times. A slower
file that is not found with `--replicates` processes is compared once more with as many as the answer asks for, and is
beyond this host if it asks for more than 100. `--load` processes that multiply matrices keep the host busy meanwhile.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from flopwatch import Flopwatch, alternating
from tools.service import Service

SOURCE = """
import torch

torch.set_num_threads(1)  # threads that wait for each other on a busy host would be most of its noise


def attention(q, k, v, is_causal):
    for _ in range({number}):
        scores = (q @ k.transpose(-2, -1)).softmax(-1)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
"""
SPEC = {
    "kind": "attention", "implementations": [], "head_dims": [64], "sequence_lengths": [32], "dtypes": ["fp32"],
    "causal": [False], "batch_size": 1, "num_heads": 4, "mode": "forward", "warmup_steps": 5, "measure_steps": 500,
    "device": "cpu",
}  # fmt: skip
LIMIT_PERCENT = 5.0
MOST = 100
"""Most processes of each version that a comparison can have."""
BUSY = "import torch\ntorch.set_num_threads(1)\nx = torch.rand(512, 512)\nwhile True: x @ x"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, default in (("equal", 20), ("slower", 5), ("replicates", 8), ("load", 1)):
        parser.add_argument(f"--{option}", type=int, default=default)
    arguments = parser.parse_args()
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(arguments.load)]
    try:
        with tempfile.TemporaryDirectory() as folder:
            _measure(Path(folder), arguments)
    finally:
        for process in busy:
            process.kill()


def _measure(folder: Path, arguments: argparse.Namespace) -> None:
    for name, number in (("base", 40), ("equal", 40), ("slower", 42)):
        (folder / f"{name}.py").write_text(f"{SOURCE.format(number=number)}\n# {name}\n")
    with Service(folder / "service", {"FLOPWATCH_ALLOW_CODE": "true"}) as service:
        service.start_server()
        service.start_worker()
        flopwatch = Flopwatch(service.url)
        for name in ("slower", "equal"):
            found: Counter[str] = Counter()
            files = str(folder / "base.py"), str(folder / f"{name}.py")
            for _ in range(getattr(arguments, name)):
                comparison = _compare(flopwatch, files, arguments.replicates)
                asked = alternating.replicates(comparison, LIMIT_PERCENT, MOST)
                if name == "slower" and comparison["conclusion"] == "inconclusive" and asked < MOST:
                    comparison = _compare(flopwatch, files, asked)
                found[comparison["conclusion"]] += 1
            print(f"{name}: {dict(found)}", flush=True)


def _compare(flopwatch: Flopwatch, files: tuple[str, str], replicates: int) -> dict[str, Any]:
    job = flopwatch.versus(*files, SPEC, implementation="attention.py:attention", replicates=replicates)
    flopwatch.wait(job, show=lambda *_: None)
    comparison: dict[str, Any] = flopwatch.get("/compare", job=job["id"])
    print(f"{Path(files[1]).stem}: {comparison['sentence']}", flush=True)
    return comparison


if __name__ == "__main__":
    main()
