"""Runs the tests: `make test` all of them on all cores, `make gpu-test` those that need a GPU.

Tests run at the same time as others, but for those marked `alone`, which judge times or fill a device: they come
afterwards, one by one. Every test is in one of the two parts and in no other, since all runs collect the same and
`--share` and `--slice` (tests/conftest.py) say which of it they run. Further arguments go to every run:
`make test ARGS="tests/app -k claim"`. Needs nothing but pytest for the GPU's tests, and pytest-xdist for all.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence

NO_TESTS = 5
"""pytest's exit code."""
MOST_ON_A_GPU = 12
"""Processes that share one GPU's memory. What they wait for is the compiler on the host, for minutes of each core."""


def main(arguments: Sequence[str]) -> int:
    """Run both parts, also when the first fails; returns the exit code."""
    if arguments[:1] == ["gpu"]:
        gpu = ["-m", "gpu", "--require-gpu", "-rs"]
        return worst(*run_slices([*gpu, *arguments[1:]]), run([*gpu, "--share=alone", *arguments[1:]]))
    workers = len(os.sched_getaffinity(0))
    together = ["--share=together", f"--numprocesses={workers}", "--dist=worksteal"]
    # A thread of torch's per core in each of as many processes would mostly wait for the others.
    return worst(run([*together, *arguments], OMP_NUM_THREADS="1"), run(["--share=alone", *arguments]))


def run(arguments: Sequence[str], **defaults: str) -> int:
    """One run of pytest; returns its exit code."""
    return subprocess.run(command(arguments), env=environment(defaults), check=False).returncode


def run_slices(arguments: Sequence[str]) -> list[int]:
    """Run what can run together in a few processes, without pytest-xdist; their output comes one after the other."""
    count = max(1, min(MOST_ON_A_GPU, len(os.sched_getaffinity(0)) - 2))
    started = []
    for number in range(count):
        output = tempfile.TemporaryFile()  # noqa: SIM115 - closed below
        part = command([*arguments, "--share=together", f"--slice={number + 1}/{count}"])
        started.append((subprocess.Popen(part, stdout=output, stderr=subprocess.STDOUT), output))
    for process, output in started:
        process.wait()
        with output:
            output.seek(0)
            sys.stdout.buffer.write(output.read())
            sys.stdout.flush()
    return [process.returncode for process, _ in started]


def command(arguments: Sequence[str]) -> list[str]:
    """pytest in this interpreter."""
    return [sys.executable, "-m", "pytest", *arguments]


def environment(defaults: Mapping[str, str]) -> dict[str, str]:
    """The user's environment, which outranks the defaults."""
    return {**defaults, **os.environ}


def worst(*codes: int) -> int:
    """One exit code of all: a run without tests counts only where the others have none either."""
    failed = [code for code in codes if code not in (0, NO_TESTS)]
    return failed[0] if failed else min(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
