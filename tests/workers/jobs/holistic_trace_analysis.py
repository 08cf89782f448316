"""Holistic Trace Analysis (https://hta.readthedocs.io), in a folder of its own: its wheel without what it depends on.

Its parser needs pandas only, which the tests have.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WHEEL = "HolisticTraceAnalysis==0.5.0"
INSTALL_TIMEOUT_S = 30
CODE = """
import json, sys
from hta.common.trace import Trace
trace = Trace(trace_dir=sys.argv[1])
trace.load_traces(include_last_profiler_step=True, use_multiprocessing=False)
frame = trace.get_trace(0)
steps = {str(step): int((frame["iteration"] == step).sum()) for step in trace.get_iterations()}
print(json.dumps([trace.get_ranks(), steps]))
"""


def install(folder: Path) -> Path:
    """Install the wheel from the package index, or skip the test."""
    options = ["--no-deps", "--disable-pip-version-check", "--retries", "0", "--target", str(folder), WHEEL]
    try:
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "-q", *options],
            check=True,
            capture_output=True,
            timeout=INSTALL_TIMEOUT_S,
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"{WHEEL} cannot be installed: {error}")
    return folder


def ranks_and_steps(package: Path, traces: Path) -> tuple[list[int], dict[str, int]]:
    """Return the ranks that it sees in a folder of traces, and the number of events of each step."""
    environment = {**os.environ, "PYTHONPATH": str(package)}
    command = [sys.executable, "-W", "ignore", "-c", CODE, str(traces)]
    output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    ranks, steps = json.loads(output.splitlines()[-1])
    return ranks, steps
