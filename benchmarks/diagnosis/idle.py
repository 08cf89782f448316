"""Compares the classes of a GPU's time with those of Holistic Trace Analysis, on eager steps with one stream.

    python -m benchmarks.diagnosis.idle record FOLDER item tiny_kernels        # on a host with a GPU
    HTA_DISABLE_NS_ROUNDING=1 python -m benchmarks.diagnosis.idle compare FOLDER   # where HolisticTraceAnalysis is

The time runs from the beginning of the first work on the device to the end of the last.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

STEPS, WARMUP = 3, 5
DELAY_US = 20
"""As `START_NS` of profiling/idle.py. HTA's documentation says ns, but it compares microseconds."""


def record(folder: Path, names: list[str]) -> None:
    """Record steps of planted cases: the Chrome trace, and the ns of each class of ours."""
    import torch

    from benchmarks.diagnosis import planted
    from kernels.device_events import synchronize
    from workers.measure.profiling import idle, recording
    from workers.measure.profiling.attribution import Interval

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    for name in names:
        step = getattr(planted, name)(device)
        for _ in range(WARMUP):
            step()

        def steps(step: planted.Step = step) -> None:
            for _ in range(STEPS):
                step()
                if on_gpu:
                    synchronize()

        profile = recording.record(steps, on_gpu=on_gpu)
        host, work = profile.recording.host, profile.recording.device
        whole = Interval(name, 1, host[0].begin_ns, max(one.end_ns for one in host))
        begin = min((one.begin_ns for one in work), default=whole.begin_ns)
        end = max((one.end_ns for one in work), default=whole.begin_ns)
        ours: Counter[str] = Counter()
        for one in idle.stretches(profile.recording, whole):
            ours[one.cause] += max(0, min(one.end_ns, end) - max(one.begin_ns, begin))
        trace = folder / f"{name}.json"
        profile.save(trace)
        (folder / f"{name}.json.gz").write_bytes(gzip.compress(trace.read_bytes()))
        trace.unlink()
        about = {"whole": end - begin, "streams": len({one.stream for one in work}), "work": len(work), "ours": ours}
        (folder / f"{name}.ours.json").write_text(json.dumps(about))
        print(f"{name}: {len(work)} kernels, copies and fills; {dict(ours)}", flush=True)


def compare(folder: Path) -> list[list[str]]:
    """Return the rows of the table: shares of the time in percent, of ours and of HTA's."""
    from hta.trace_analysis import TraceAnalysis  # type: ignore[import-not-found]

    rows = []
    for path in sorted(folder.glob("*.ours.json")):
        name, about = path.name.removesuffix(".ours.json"), json.loads(path.read_text())
        file = str((folder / f"{name}.json.gz").resolve())
        trace = TraceAnalysis(trace_files={0: file}, include_last_profiler_step=True)  # else it drops the last
        busy: Any = trace.get_temporal_breakdown(visualize=False).iloc[0]
        idle: Any = trace.get_idle_time_breakdown(ranks=[0], visualize=False, consecutive_kernel_delay=DELAY_US)[0]
        gaps = idle.groupby("idle_category")["idle_time"].sum() * 1e3
        ours = {cause: 100 * ns / about["whole"] for cause, ns in about["ours"].items()}
        rows.append([name, str(about["work"]), str(about["streams"])])
        late = sum(ours.get(cause, 0) for cause in ("launches", "host", "input", "synchronisation", "optimizer"))
        pairs = (
            (ours.get("running", 0), busy["compute_time_pctg"]),
            (ours.get("copies", 0) + ours.get("communication", 0), busy["non_compute_time_pctg"]),
            (100 - sum(ours.get(cause, 0) for cause in ("running", "copies", "communication")), busy["idle_time_pctg"]),
            (late, 100 * (gaps.get("host_wait", 0) + gaps.get("kernel_wait", 0)) / about["whole"]),
            (ours.get("unexplained", 0), 100 * gaps.get("other", 0) / about["whole"]),
        )
        rows[-1] += [f"{one:.2f} / {other:.2f}" for one, other in pairs]
    return rows


HEADINGS = ("step", "work", "streams", "kernels", "copies", "idle", "host late, start-up", "unexplained")


def main() -> None:
    """Record, or compare and print the table."""
    folder = Path(sys.argv[2])
    if sys.argv[1] == "record":
        record(folder, sys.argv[3:])
        return
    print(f"| {' | '.join(HEADINGS)} |\n|{'---|' * len(HEADINGS)}")
    for row in compare(folder):
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
