"""Finds the outside profilers of this host: Nsight Systems (`nsys`) and Nsight Compute (`ncu`).

A tool counts only if it runs: one that cannot start would fail every job that asks for it.
"""

import functools
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

FAMILY = "tool"
"""Family of the tools' names among a worker's capabilities: "tool:ncu"."""
FOLDERS = {
    "nsys": ("/usr/local/cuda/bin", "/opt/nvidia/nsight-systems/*/bin", "/opt/nvidia/nsight-systems-cli/*/bin"),
    "ncu": ("/usr/local/cuda/bin", "/opt/nvidia/nsight-compute/*"),
}
"""Folders, beside those on PATH, in which NVIDIA's installers put each tool."""
VERSION = re.compile(r"\bversion\s+(\d[\w.]*)", re.IGNORECASE)
ANSWER_S = 30.0
"""Seconds in which a tool must print its version, even from a slow disk."""


@dataclass(frozen=True)
class Tool:
    """A tool of this host."""

    name: str
    path: str
    version: str | None
    """None if it runs but does not report a version."""


def find(name: str) -> Tool | None:
    """Return the tool, from PATH or else from one of its usual folders, the newest first; None if none of them runs."""
    answers = ((path, version_text(path)) for path in _candidates(name))
    return next((Tool(name, path, _version(answer)) for path, answer in answers if answer is not None), None)


def installed() -> dict[str, Tool]:
    return {name: tool for name in FOLDERS if (tool := find(name)) is not None}


@functools.cache
def version_text(path: str) -> str | None:
    """Return what a program says of its version, None if it does not run. It is asked once in the life of a process.

    An agent that has units must start no other process: its launcher reaps all children. So the agent asks when it
    registers, before it has any.
    """
    command = [path, "--version"]
    try:
        answer = subprocess.run(command, capture_output=True, timeout=ANSWER_S, check=True, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.decode(errors="replace")


def _version(answer: str) -> str | None:
    version = VERSION.search(answer)
    return None if version is None else version[1]


def _candidates(name: str) -> list[str]:
    on_path = shutil.which(name)
    elsewhere = [
        str(folder / name)
        for pattern in FOLDERS[name]
        for folder in sorted(
            Path("/").glob(pattern.removeprefix("/")),
            key=lambda path: [*map(int, re.findall(r"\d+", str(path)))],
            reverse=True,
        )
    ]
    executables = [path for path in (on_path, *elsewhere) if path is not None and shutil.which(path) is not None]
    return list(dict.fromkeys(executables))
