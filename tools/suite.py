"""`make test`: the whole suite, in two runs of pytest.

Tests run on all cores at the same time, but for those marked `alone`, which judge times: they come afterwards, one by
one. Every test is in exactly one of the two, since both runs collect the same and `--share` (tests/conftest.py) says
which part of it runs. All arguments go to both: `make test ARGS="tests/app -k claim"`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

NO_TESTS = 5
"""pytest's exit code."""


def main(arguments: Sequence[str]) -> int:
    """Run both parts, also when the first fails; returns the exit code."""
    workers = len(os.sched_getaffinity(0))
    # A thread of torch's per core in each of as many processes would only wait for the others.
    together = {"OMP_NUM_THREADS": "1", **os.environ}
    return worst(
        run(["--share=together", f"--numprocesses={workers}", "--dist=worksteal"], arguments, together),
        run(["--share=alone"], arguments, os.environ),
    )


def run(part: Sequence[str], arguments: Sequence[str], environment: os._Environ[str] | dict[str, str]) -> int:
    """The exit code of one run of pytest; what the user gives comes last, so that it wins."""
    return subprocess.run([sys.executable, "-m", "pytest", *part, *arguments], env=environment, check=False).returncode


def worst(*codes: int) -> int:
    """One exit code of both: a run without tests counts only where the other has none either."""
    failed = [code for code in codes if code not in (0, NO_TESTS)]
    if failed:
        return failed[0]
    return min(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
