"""The tilings of devices that nobody here has: do their kernels fit? Compiled for them, which needs no GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SHARED_BYTES = {86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Resources of one program, by compute capability (CUDA C++ programming guide, table of compute capabilities)."""
TENSOR_COLUMNS = 512
"""Tensor memory of a Blackwell multiprocessor."""


@pytest.mark.long
def test_the_tables_fit(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    capabilities = (89, 100)
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_for.py")), *map(str, capabilities)],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        check=True,
    )
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    for capability in capabilities:
        kernels = [kernel for kernel in compiled if kernel["capability"] == capability]
        assert len(kernels) == 2 * (2 * 3 + 2) + 3, (
            "two widths, two dtypes, three kernels, two for decoding, three masked"
        )
        assert len({kernel["kernel"] for kernel in kernels}) == 5
        for kernel in kernels:
            assert 0 < kernel["shared"] <= SHARED_BYTES[capability], kernel
            assert kernel["tensor"] <= TENSOR_COLUMNS, kernel
