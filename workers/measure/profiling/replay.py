"""How long recorded steps of a GPU would take with a faster host, and with one that leaves out a
part of its work, such as reading numbers of the device or loading a batch.

A profiler slows down the host, and not the device. So the events of a recording happen again, in their order: the
host's own time is scaled; a call that waits ends once all work has that had ended before it; work begins when it is
launched and the work that had ended before it has, with the delays of the recording. `scale_for` finds the scale that
gives the time of unprofiled steps; then `length_ns` tells what they take without that part. (What virtual
speed-ups estimate, Curtsinger & Berger, "Coz", 2015, is answered from a trace.)
"""

import bisect
import statistics
from collections.abc import Iterable, Sequence
from enum import IntEnum

from workers.measure.profiling.attribution import Interval
from workers.measure.profiling.recording import Recording

HALVINGS = 10
"""Of the interval in which the scale lies: to 0.1 %."""
QUEUED_NS = 20_000
"""Work that was launched earlier by more did not wait for its launch."""


class _Mark(IntEnum):
    """What happens in a moment, in the order in which it does."""

    WORKED = 0
    WAITED = 1
    SKIPPED = 2
    LOADED = 3
    BEGINS = 4
    ENDS = 5
    SKIPS = 6
    LOADS = 7
    LAUNCHES = 8
    WAITS = 9
    WORKS = 10


class Replay:
    """Steps of one recording that followed each other, the host ahead of the device.

    Args:
        steps: The steps, as the host ran their phases. What was launched before them is replayed, and not counted.
        waiting: When the host waited for the device; disjoint, in order.
        skippable: When the host did what may be left out, with all that it launched meanwhile; likewise.
        loading: When the host loaded a batch, in which a profiler does not slow it down; likewise.
    """

    def __init__(
        self,
        recording: Recording,
        steps: Sequence[Interval],
        waiting: Iterable[tuple[int, int]],
        skippable: Iterable[tuple[int, int]],
        loading: Iterable[tuple[int, int]] = (),
    ) -> None:
        launches = {one.id: one.begin_ns for one in recording.host if one.kind == "launch"}
        begin, end = steps[0].begin_ns, steps[-1].end_ns
        work = [(launches[one.launch], one) for one in recording.device if launches.get(one.launch, end) < end]
        self._steps, self._first = len(steps), begin
        self._launched = [at for at, _ in work]
        self._taken = [one.end_ns - one.begin_ns for _, one in work]
        self._delays([(launched, one.begin_ns) for launched, one in work], sorted(one.end_ns for _, one in work))
        marks = [(begin, _Mark.BEGINS, 0), (end, _Mark.ENDS, 0)]
        for at, (launched, one) in enumerate(work):
            marks += [(launched, _Mark.LAUNCHES, at), (one.begin_ns, _Mark.WORKS, at), (one.end_ns, _Mark.WORKED, at)]
        for spans, kinds in (
            (waiting, (_Mark.WAITS, _Mark.WAITED)),
            (skippable, (_Mark.SKIPS, _Mark.SKIPPED)),
            (loading, (_Mark.LOADS, _Mark.LOADED)),
        ):
            marks += [(at, kind, 0) for span in spans if span[0] < end for at, kind in zip(span, kinds, strict=True)]
        self._marks = sorted(marks)

    def _delays(self, work: Sequence[tuple[int, int]], ends: Sequence[int]) -> None:
        """Keep by how much each work began later than its launch, and later than the work before it had ended; of the
        two that it did not wait for, at most the usual delay."""
        free = [ends[index - 1] if (index := bisect.bisect_right(ends, begin)) else 0 for _, begin in work]
        idle = [launched >= before for (launched, _), before in zip(work, free, strict=True)]
        since_launch = [begin - launched for launched, begin in work]
        since_work = [begin - before for (_, begin), before in zip(work, free, strict=True)]
        of_idle = [one for one, alone in zip(since_launch, idle, strict=True) if alone]
        of_queued = [
            one for one, since, alone in zip(since_work, since_launch, idle, strict=True)
            if not alone and since > QUEUED_NS
        ]  # fmt: skip
        usual = statistics.median(of_idle or [0]), statistics.median(of_queued or [0])
        self._after_launch = [
            one if alone else min(one, usual[0]) for one, alone in zip(since_launch, idle, strict=True)
        ]
        self._after_work = [
            one if not alone and since > QUEUED_NS else min(one, usual[1])
            for one, since, alone in zip(since_work, since_launch, idle, strict=True)
        ]

    def length_ns(self, scale: float, *, whole: bool = True) -> float:
        """Return the mean time of a step. `scale`: of the host's own time, but for that in which it loads. `whole`:
        False: without what may be left out."""
        host = free = first = last = 0.0
        at_host = since = worked = self._marks[0][0]
        skips = waiting = loads = False
        launched, ends = [0.0] * len(self._launched), [0.0] * len(self._launched)
        for at, kind, index in self._marks:
            if _Mark.WORKED < kind < _Mark.WORKS:  # the host goes on
                if not (waiting or skips):
                    host += (1.0 if loads else scale) * (at - at_host)
                at_host = at
            match kind:
                case _Mark.WORKED:
                    free, worked = max(free, ends[index]), at
                case _Mark.WORKS:
                    begin = max(launched[index] + self._after_launch[index], free + self._after_work[index])
                    ends[index] = free if launched[index] < 0 else begin + self._taken[index]
                    last = max(last, ends[index])
                    if self._launched[index] < self._first:
                        first = max(first, ends[index])
                case _Mark.LAUNCHES:
                    launched[index] = -1.0 if skips else host
                case _Mark.SKIPS:
                    skips = not whole
                case _Mark.SKIPPED:
                    skips = False
                case _Mark.LOADS | _Mark.LOADED:
                    loads = kind == _Mark.LOADS
                case _Mark.WAITS:
                    waiting, since = True, at
                case _Mark.WAITED:
                    waiting = False
                    if not skips:
                        host = max(host, free) + max(0, at - max(since, worked))
                case _Mark.BEGINS:
                    first = max(first, host)
                case _Mark.ENDS:
                    last = max(last, host)
        return (last - first) / self._steps

    def scale_for(self, step_ns: float) -> float:
        """Return the scale of the host's time, at most 1, with which a step takes this long, or comes closest."""
        low, high = 0.0, 1.0
        if self.length_ns(high) <= step_ns:
            return high
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.length_ns(middle) < step_ns else (low, middle)
        return high
