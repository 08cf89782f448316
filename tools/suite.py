"""Runs the tests: `make test` runs them on all cores, `make long-test` those that take minutes, `make gpu-test` those
that need a GPU.

Tests run at the same time as others, except those marked `alone`, which judge times or fill a device: they run
afterwards, one by one. A few that have failed run once more, one by one: those that pass then are named as unstable,
and do not fail the run. Further arguments go to pytest: `make test ARGS="tests/app -k claim"`.

On a GPU host each process collects for itself and takes a slice of the tests (`--slice` in tests/conftest.py), because
CUDA does not survive a fork.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

FAILED, NO_TESTS = 1, 5
"""pytest's exit codes."""
MOST_AGAIN = 3
"""Most failures that run once more. Chance fails hardly more of some 8000 tests, a fault of the product does."""
LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")
"""pytest's own record of failures, in the folder where it runs."""
ONE_THREAD = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
"""With a worker per core, further threads of torch in each would mostly wait for each other."""
MOST_ON_A_GPU = 12
"""Most processes that share one GPU's memory. They mostly wait for the compiler on the host, for minutes of each core.
"""


def main(arguments: Sequence[str]) -> int:
    """Run the tests, those that run alone also when others fail; returns the exit code."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or each process compiles the tests anew
    if arguments[:1] == ["gpu"]:
        gpu = ["-m", "gpu and not long", "--require-gpu", "-rs"]
        return exit_code_of(*run_slices([*gpu, *arguments[1:]]), run([*gpu, "--share=alone", *arguments[1:]]))
    # Many tests wait for other processes, or for a time to pass: with more workers the cores are busy meanwhile.
    cores = len(os.sched_getaffinity(0))
    workers = cores + max(3, cores // 2)
    picked = [*([] if "-m" in arguments else ["-m", "not long"]), *arguments]
    LAST_FAILED.unlink(missing_ok=True)
    return again(picked, run([f"--processes={workers}", *picked], **ONE_THREAD))


def again(picked: Sequence[str], code: int) -> int:
    """Run the tests that have failed once more, if they are few and nothing else went wrong; returns the exit code."""
    failed = sorted(json.loads(LAST_FAILED.read_text())) if LAST_FAILED.exists() else []
    if code != FAILED or not 0 < len(failed) <= MOST_AGAIN:
        return code
    print("These have failed, and run once more, alone:", *failed, sep="\n  ", flush=True)
    code = run(["--last-failed", "--last-failed-no-failures=none", *picked, "--processes=1"])
    if code == 0:
        print("UNSTABLE: failed beside others (see above), and passed alone:", *failed, sep="\n  ", flush=True)
    return code


def run(arguments: Sequence[str], **environment: str) -> int:
    return subprocess.run(command(arguments), env={**os.environ, **environment}, check=False).returncode


def run_slices(arguments: Sequence[str]) -> list[int]:
    """Run the tests that can run together in a few processes; print their outputs in order."""
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
    return [sys.executable, "-m", "pytest", *arguments]


def exit_code_of(*codes: int) -> int:
    """Return one exit code for all runs: a run without tests counts only if no run has any."""
    failed = [code for code in codes if code not in (0, NO_TESTS)]
    return failed[0] if failed else min(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
