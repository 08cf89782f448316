"""What every benchmark of the service ends with: one Markdown table, below what it was measured with."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate

from app.store.sqlite import driver

PACKAGES = ("fastapi", "torch")


def print_report(title: str, table: Sequence[dict[str, str]]) -> None:
    """Print the title, the host and the table, last and alone in its lines.

    Args:
        table: one dict per row, keyed by the column's heading; the rows have the same keys.
    """
    print(f"\n{title}. {host()}\n")
    print(tabulate(table, headers="keys", tablefmt="pipe", disable_numparse=True))


def host() -> str:
    """The processor and the versions that the figures depend on."""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in PACKAGES]
    sqlite = f"SQLite {driver().sqlite_version}"
    return f"{os.cpu_count()} × {_processor()}; " + ", ".join(
        [f"Python {platform.python_version()}", sqlite, *versions]
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def spread(samples: Sequence[float], digits: int = 0) -> str:
    """The median, and in brackets the least and the greatest: "412 (398 … 420)"."""
    median = statistics.median(samples)
    return f"{median:.{digits}f} ({min(samples):.{digits}f} … {max(samples):.{digits}f})"


def percentiles(samples: Sequence[float], *wanted: int, digits: int = 1) -> list[str]:
    """The wanted percentiles (1 … 99) of two samples or more, by linear interpolation between them."""
    cuts = statistics.quantiles(samples, n=100, method="inclusive")
    return [f"{cuts[percentile - 1]:.{digits}f}" for percentile in wanted]
