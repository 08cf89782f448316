"""Programs that nobody here wrote, which read traces: Holistic Trace Analysis and torch's TensorBoard plugin.

They are installed into a folder of their own, without what they depend on: their parsers need pandas only, which the
tests have.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

WHEELS = ("HolisticTraceAnalysis==0.5.0", "torch-tb-profiler==0.4.3")
INSTALL_TIMEOUT_S = 30
ANALYSIS = """
import json, sys
from pathlib import Path
from hta.common.trace import Trace

trace = Trace(trace_dir=str(Path(sys.argv[1]).parent))
trace.load_traces(include_last_profiler_step=True, use_multiprocessing=False)
print(json.dumps([trace.get_ranks(), [int(step) for step in trace.get_iterations()]]))
"""
PLUGIN = """
import json, sys
from torch_tb_profiler.io import Cache
from torch_tb_profiler.profiler.data import RunProfileData

if __name__ == "__main__":
    with Cache() as cache:
        run = RunProfileData.parse("worker", "1", sys.argv[1], cache)
    print(json.dumps([int(step) for step in run.steps_names]))
"""


def install(folder: Path) -> Path:
    """Install the wheels from the package index, or skip the test."""
    options = ["--no-deps", "--disable-pip-version-check", "--retries", "0", "--target", str(folder), *WHEELS]
    try:
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "-q", *options],
            check=True,
            capture_output=True,
            timeout=INSTALL_TIMEOUT_S,
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"{', '.join(WHEELS)} cannot be installed: {error}")
    return folder


def ranks_and_steps(readers: Path, trace: Path) -> tuple[list[int], list[int]]:
    """Return the ranks and the numbers of the steps that Holistic Trace Analysis sees in the folder of a trace."""
    ranks, steps = _read(readers, "analysis", ANALYSIS, trace)
    return ranks, steps


def steps_of_plugin(readers: Path, trace: Path) -> list[int]:
    """Return the numbers of the steps that torch's TensorBoard plugin sees in a trace."""
    return _read(readers, "plugin", PLUGIN, trace)


def _read(readers: Path, name: str, code: str, trace: Path) -> Any:
    script = readers / f"read_{name}.py"
    script.write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(readers)}
    command = [sys.executable, "-W", "ignore", str(script), str(trace)]
    output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    return json.loads(output.splitlines()[-1])
