"""Writes Chrome traces as compressed JSON, unless they are larger than they may be. Neither the host's name nor its
folders remain."""

import gzip
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from workers.measure.paths import bytes_without_folders

LEVEL = 3
"""Compression level: nearly as good as level 9 for traces, in a tenth of the time."""
READ_BYTES = 1 << 20
"""Bytes to read at once, up to the end of a line: the process still holds the model."""
TOGETHER_FACTOR = 20
"""How much smaller compression makes a trace, at most: larger ones are not joined, which needs memory."""
_HOST = re.compile(rb'("host_name"\s*:\s*)"[^"]*"')
_FILE = re.compile(rb'("traceName"\s*:\s*")[^"]*/')


class TooLarge(Exception):
    """The trace is larger than it may be. The message says what to do."""


def write(raw: Path, target: Path, max_bytes: int) -> None:
    """Compress the profiler's trace, `raw`, into the file `target`. Raises TooLarge: that would have more than
    `max_bytes`; there is no file then."""
    with raw.open("rb") as source, gzip.open(target, "wb", compresslevel=LEVEL) as file:
        while lines := source.readlines(READ_BYTES):
            file.write(bytes_without_folders(_FILE.sub(rb"\1", _HOST.sub(rb'\1""', b"".join(lines)))))
    if (size := target.stat().st_size) > max_bytes:
        target.unlink()
        raise TooLarge(
            f"the trace has {size / 2**20:.3g} MiB, and trace_max_mib is {max_bytes / 2**20:.3g}: raise it, or take "
            "fewer steps"
        )


def together(raws: Sequence[Path], ahead_ms: Sequence[float], target: Path, max_bytes: int) -> None:
    """Write one trace of all ranks, on the clock of rank 0, with a process for each rank, for Perfetto. Raises
    TooLarge: that would have more than `max_bytes`; there is no file then. `ahead_ms`: by how much each rank's clock is
    ahead of rank 0's. `target`: the compressed file."""
    if (size := sum(raw.stat().st_size for raw in raws)) > TOGETHER_FACTOR * max_bytes:
        raise TooLarge(f"the ranks' traces have {size / 2**20:.0f} MiB together: raise trace_max_mib")
    joined = target.with_suffix(".raw")
    with joined.open("w") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [')
        for number, event in enumerate(_of_ranks(raws, ahead_ms)):
            file.write(f"{',' if number else ''}\n{json.dumps(event)}")
        file.write("\n]}")
    try:
        write(joined, target, max_bytes)
    finally:
        joined.unlink()


def _of_ranks(raws: Sequence[Path], ahead_ms: Sequence[float]) -> Iterator[dict[str, Any]]:
    """Yield the events of all ranks, each rank as one process: a GPU's streams are threads of it."""
    base: int | None = None
    for rank, (raw, ahead) in enumerate(zip(raws, ahead_ms, strict=True)):
        loaded = json.loads(raw.read_bytes())
        begun = int(loaded.get("baseTimeNanoseconds", 0))
        base = begun if base is None else base
        later_us = 1e-3 * (begun - base) - 1e3 * ahead
        threads: dict[tuple[Any, Any], int] = {}
        yield {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
        for event in loaded["traceEvents"]:
            if event.get("pid") in ("Spans", "Traces") or (event["ph"] == "M" and event["name"] != "thread_name"):
                continue  # the profiler's own, and names of the host's processes
            thread = threads.setdefault((event.get("pid"), event.get("tid")), len(threads))
            moved = {**event, "pid": rank, "tid": thread}
            if event["ph"] != "M":
                moved["ts"] = float(event["ts"]) + later_us
            if "id" in event:  # of an arrow
                moved["id"] = int(event["id"]) * len(raws) + rank
            yield moved
