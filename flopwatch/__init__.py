"""The client of a Flopwatch server: `from flopwatch import Flopwatch`, and the errors that it raises; and what training
scripts say of their own steps: `flopwatch.phase`, `flopwatch.work`, `flopwatch.measure`. `flopwatch.kernels` and
`flopwatch.parallel` are libraries (packages.py).

The client is imported on first use, since the command line imports modules of this package and starts in milliseconds.
"""

import importlib
from typing import TYPE_CHECKING, Any

from flopwatch import packages
from flopwatch.steps import measure, phase, work

if TYPE_CHECKING:
    from flopwatch.client import Flopwatch, JobFailed
    from flopwatch.connection import (
        ClientError,
        DownloadFailed,
        Event,
        InvalidArgument,
        Job,
        Refused,
        Unreachable,
        WaitTimeout,
        WrongField,
    )

__all__ = [
    "ClientError", "DownloadFailed", "Event", "Flopwatch", "InvalidArgument", "Job", "JobFailed", "Refused",
    "Unreachable", "WaitTimeout", "WrongField", "measure", "phase", "work",
]  # fmt: skip

packages.use()


def __getattr__(name: str) -> Any:
    if name in packages.PUBLIC:
        return importlib.import_module(f"flopwatch.{name}")
    if name in __all__:
        where = "client" if name in ("Flopwatch", "JobFailed") else "connection"
        return getattr(importlib.import_module(f"flopwatch.{where}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
