"""A command that units run under, for tests: it does to its program what profilers do.

    wrapper.py [options] -- PROGRAM ARGUMENT…

It closes every descriptor that it inherits, gives the program an empty standard input, an environment without some
variables and a pipe instead of its own output, starts it by a shell in a session of its own, and writes its report
after the program has ended.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

DROPPED = ("CUDA_VISIBLE_DEVICES", "OF_THE_UNIT")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--report", type=Path, help="file to write when the program has ended")
    parser.add_argument("program", nargs="+")
    options = parser.parse_args()
    os.closerange(3, min(1 << 20, os.sysconf("SC_OPEN_MAX")))
    code = run(options.program)
    if options.report is not None:
        unfinished = options.report.with_suffix(".unfinished")
        unfinished.write_text(f"the program ended with {code}\n")
        unfinished.rename(options.report)
    return code


def run(program: list[str]) -> int:
    """Run the program; returns its exit code, as a shell tells it."""
    environment = {name: value for name, value in os.environ.items() if name not in DROPPED}
    with subprocess.Popen(
        ["sh", "-c", '"$@"; exit $?', "sh", *program],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        close_fds=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
    return process.returncode


if __name__ == "__main__":
    sys.exit(main())
