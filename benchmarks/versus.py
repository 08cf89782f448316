"""Shows whether `flopwatch versus` finds code that is 5 % slower on a busy CPU host, and is silent about equal code.

    python -m benchmarks.versus [--equal 20] [--slower 3] [--replicates 8] [--load 1]

A real server and worker compare two files that repeat a matrix product: 60 and 63 times, or 60 and 60 times. A
comparison has as many cases as `--slower` or `--equal` says, each a sequence length of its own: a process takes seconds
to start and less than one for a case. It corrects for their number, so that it finds a difference in any of 20 equal
cases once in 20 times. If a slower case is not found, the comparison is measured once more with as many processes as it
asks for, at most `--most`, as `check --alternate` does. `--load` processes that multiply matrices keep the host busy
meanwhile.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tabulate import tabulate

from flopwatch import Flopwatch, alternating
from tools.service import Service

SOURCE = """
import torch

torch.set_num_threads(1)  # threads that wait for each other on a busy host would be most of its noise


def attention(q, k, v, is_causal):
    # Small products into one place: they stay in the core's own cache, which another process hardly disturbs.
    one, other = q[0, 0], k[0, 0].T
    scores = one @ other
    for _ in range({number}):
        torch.mm(one, other, out=scores)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
"""
NUMBERS = {"base": 60, "equal": 60, "slower": 63}
"""Steps of 0.2 ms: the longer a step, the fewer of them run undisturbed."""
SPEC = {
    "kind": "attention", "implementations": [], "head_dims": [64], "dtypes": ["fp32"], "causal": [False],
    "batch_size": 1, "num_heads": 1, "mode": "forward", "warmup_steps": 5, "measure_steps": 1200, "device": "cpu",
}  # fmt: skip
SHORTEST = 40
"""The first sequence length; each case has one more."""
LIMIT_PERCENT = 5.0
BUSY = "import torch\ntorch.set_num_threads(1)\nx = torch.rand(512, 512)\nwhile True: x @ x"
HEADINGS = ("sides", "cases", "processes of a side", "found", "not found", "ratios", "gate", "asks for", "seconds")


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, default in (("equal", 20), ("slower", 3), ("replicates", 8), ("load", 1), ("most", 40)):
        parser.add_argument(f"--{option}", type=int, default=default)
    arguments = parser.parse_args()
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(arguments.load)]
    try:
        with tempfile.TemporaryDirectory() as folder:
            rows = _measure(Path(folder), arguments)
    finally:
        for process in busy:
            process.kill()
    print(tabulate(rows, HEADINGS, tablefmt="pipe", disable_numparse=True))


def _measure(folder: Path, arguments: argparse.Namespace) -> list[tuple[Any, ...]]:
    for name, number in NUMBERS.items():
        (folder / f"{name}.py").write_text(f"{SOURCE.format(number=number)}\n# {name}\n")
    rows = []
    with Service(folder / "service", {"FLOPWATCH_ALLOW_CODE": "true"}) as service:
        service.start_server()
        service.start_worker()
        with Flopwatch(service.url) as flopwatch:
            row, asked = _compare(flopwatch, folder, "slower", arguments.slower, arguments.replicates)
            rows.append(row)
            if asked is not None and arguments.replicates < asked:
                rows.append(_compare(flopwatch, folder, "slower", arguments.slower, min(asked, arguments.most))[0])
            rows.append(_compare(flopwatch, folder, "equal", arguments.equal, arguments.replicates)[0])
    return rows


def _compare(
    flopwatch: Flopwatch, folder: Path, name: str, cases: int, replicates: int
) -> tuple[tuple[Any, ...], int | None]:
    """Measure one comparison; return its row, and how many processes it asks for, if it is inconclusive."""
    began = time.perf_counter()
    spec = {**SPEC, "sequence_lengths": list(range(SHORTEST, SHORTEST + cases))}
    files = str(folder / "base.py"), str(folder / f"{name}.py")
    job = flopwatch.versus(*files, spec, implementation="attention.py:attention", replicates=replicates)
    flopwatch.wait(job, show=lambda *_: None)
    comparison: dict[str, Any] = flopwatch.get("/compare", job=job["id"], fail_above_percent=LIMIT_PERCENT)
    print(f"{name}: {comparison['sentence']}", flush=True)
    tested = [row for row in comparison["rows"] if row["metric"] == comparison["headline"]]
    found = sum(row["finding"] in ("better", "worse") for row in tested)
    asked = None
    if any(row["finding"] == "inconclusive" for row in tested):
        asked = alternating.replicates({"rows": tested}, LIMIT_PERCENT, 10_000)
    ratios = [row["ratio"] for row in tested]
    row = (
        "5 % slower" if name == "slower" else "equal",
        len(tested),
        replicates,
        found,
        len(tested) - found,
        f"{min(ratios):.3f} … {max(ratios):.3f}",
        comparison["gate"]["outcome"],
        "–" if asked is None else asked,
        f"{time.perf_counter() - began:.0f}",
    )
    return row, asked


if __name__ == "__main__":
    main()
