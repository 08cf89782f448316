"""Every test here starts the real server and real workers over a folder of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tools.service import Service

PLUGINS = Path(__file__).resolve().parent.parent / "plugins"
PROJECT = PLUGINS.parent.parent


@pytest.fixture
def misbehave_folder(tmp_path: Path) -> Path:
    """Where the models of tests/plugins tell what they did."""
    folder = tmp_path / "misbehave"
    folder.mkdir()
    return folder


@pytest.fixture
def service(tmp_path: Path, misbehave_folder: Path) -> Iterator[Service]:
    """A service that is not started yet, with tests/plugins installed and short times."""
    environment = {
        "PYTHONPATH": os.pathsep.join([str(PROJECT), str(PLUGINS), os.environ.get("PYTHONPATH", "")]),
        "MISBEHAVE_FOLDER": str(misbehave_folder),
        "FLOPWATCH_GRACE_S": "1",
        "FLOPWATCH_LEASE_S": "3",
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(tmp_path),  # locks of this test's own: tests do not wait for each other
    }
    with Service(tmp_path / "service", environment) as running:
        try:
            yield running
        finally:
            print(running.logs()[-20_000:])


def short_job(model: str, *, vocab_size: int = 16, replicates: int = 1, **fields: Any) -> dict[str, Any]:
    """The body of a job of one step with one of tests/plugins' models.

    One replicate is forked from the warm parent; of several, each is a new interpreter.
    """
    shape = {"d_model": 8, "d_ff": 8, "num_layers": 1, "num_heads": 1}
    spec = {
        "kind": "benchmark",
        "model": {"name": model, "vocab_size": vocab_size, **shape},
        "batch_size": 1,
        "context_length": 1,
        "mode": "forward",
        "warmup_steps": 0,
        "measure_steps": 1,
        "replicates": replicates,
    }
    return {"spec": spec, **fields}
