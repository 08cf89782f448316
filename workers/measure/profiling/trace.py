"""Writes a Chrome trace as compressed JSON, unless it is larger than it may be. Neither the host's name nor its folders
remain."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

from workers.measure.paths import bytes_without_folders

LEVEL = 3
"""Compression level: nearly as good as level 9 for traces, in a tenth of the time."""
READ_BYTES = 1 << 20
"""Bytes to read at once, up to the end of a line: the process still holds the model."""
_HOST = re.compile(rb'("host_name"\s*:\s*)"[^"]*"')
_FILE = re.compile(rb'("traceName"\s*:\s*")[^"]*/')


class TooLarge(Exception):
    """The trace is larger than it may be. The message says what to do."""


def write(raw: Path, target: Path, max_bytes: int) -> None:
    """Compress the profiler's trace, `raw`, into the file `target`.

    Raises:
        TooLarge: that would have more than `max_bytes`; there is no file then.
    """
    with raw.open("rb") as source, gzip.open(target, "wb", compresslevel=LEVEL) as file:
        while lines := source.readlines(READ_BYTES):
            file.write(bytes_without_folders(_FILE.sub(rb"\1", _HOST.sub(rb'\1""', b"".join(lines)))))
    if (size := target.stat().st_size) > max_bytes:
        target.unlink()
        raise TooLarge(
            f"the trace has {size / 2**20:.3g} MiB, and trace_max_mib is {max_bytes / 2**20:.3g}: raise it, or take "
            "fewer steps"
        )
