"""Functions with which a training script describes its step: `flopwatch.phase`, `flopwatch.work`, `flopwatch.measure`.

In a job, a worker listens and measures. When the script runs by itself, nobody does: `phase` and `work` do nothing, and
`measure` prints the median time. Standard library only, so that any script may import it.
"""

import functools
import math
import numbers
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

WARMUP_STEPS = 3
MEASURE_STEPS = 10
MOST_STEPS = 1000
"""Most steps that a job on a CPU measures by default."""
ROUND = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0, 10.0)
"""The numbers of steps, between powers of ten."""
MAX_WORK = 1e30
"""More FLOPs than any step has."""
SHOWN = 60
"""Most characters of a value in an error."""

_NOTHING = nullcontext()
_now_s = functools.partial(time.perf_counter)  # a step may replace the module's


class Listener(Protocol):
    """The worker's side of this module."""

    def phase(self, name: str) -> AbstractContextManager[Any]: ...

    def work(self, *, flops: float | None, tokens: float | None, items: float | None) -> None:
        """Add to the work of the present step."""

    def measure(self, step: Callable[[], object], *, warmup_steps: int | None, measure_steps: int | None) -> None:
        """Measure a step."""


_listener: Listener | None = None


def listen(listener: Listener | None) -> None:
    """Let a worker listen to this process's script; None: nobody."""
    global _listener
    _listener = listener


def phase(name: str) -> AbstractContextManager[Any]:
    """Name a part of the step: `with flopwatch.phase("forward"): …`.

    Parts that follow each other are phases, each with times, kernels and memory of its own; what lies between them is
    the phase `rest`. A part may come several times in a step. A part inside a part is a range of the profile,
    as is one in a thread that the code has started; in what torch compiles, it names nothing.

    Args:
        name: Lower-case letters, digits and underscores, such as "forward", "backward", "optimizer", "data".
    """
    return _NOTHING if _listener is None else _listener.phase(name)


def work(*, flops: float | None = None, tokens: float | None = None, items: float | None = None) -> None:
    """Tell the work of a step, which gives its rates: TFLOP/s and MFU, tokens and items (images, samples) per second.

    Called in the step, it adds to that step; called before, it is the work of every step. Scalars of numpy and torch
    are taken, too; of a tensor on a GPU, its value is waited for.

    Raises:
        ValueError: an amount is no number, is negative, not finite, or larger than any step's.
    """
    amounts = {"flops": flops, "tokens": tokens, "items": items}
    told = {name: None if amount is None else _amount(name, amount) for name, amount in amounts.items()}
    if _listener is not None:
        _listener.work(**told)


def _amount(name: str, given: Any) -> float:
    try:
        value = float(given.item() if hasattr(given, "item") else given)  # such as a scalar of torch
    except (TypeError, ValueError, OverflowError, RuntimeError):
        value = math.nan
    if not 0 <= value <= MAX_WORK:  # nan is not, either
        raise ValueError(f"flopwatch.work({name}=…) takes one number from 0 to {MAX_WORK:g}, not {_shown(given)}")
    return value


def _shown(given: object) -> str:
    return f"{given!r:.{SHOWN}} ({type(given).__name__})"


def measure(step: Callable[[], object], *, warmup_steps: int | None = None, measure_steps: int | None = None) -> None:
    """Measure a function that does one training step.

    Under `flopwatch run-script` the result is the job's; otherwise the median time is printed, ± its 95 %
    interval (of fewer than 6: their range).

    Args:
        warmup_steps: Steps before; None: until their times are steady (by itself, the script makes three).
        measure_steps: Steps measured; None: 10, and in a job on a CPU as many as take about a second.

    Raises:
        TypeError: `step` is no function, or returns what has not run, such as a coroutine.
        ValueError: a number of steps is not whole, or out of range, as where none is measured.
    """
    if not callable(step):
        given = type(step).__name__
        raise TypeError(f"measure takes a function that does one step, as in measure(step); this is of type {given}")
    warmup_steps = _steps("warmup_steps", warmup_steps, 0, 100_000)
    measure_steps = _steps("measure_steps", measure_steps, 1, 1_000_000)
    if _listener is not None:
        _listener.measure(step, warmup_steps=warmup_steps, measure_steps=measure_steps)
        return
    import statistics

    from flopwatch.intervals import median_interval
    from flopwatch.text.numbers import number as written

    warmup = WARMUP_STEPS if warmup_steps is None else warmup_steps
    measured = MEASURE_STEPS if measure_steps is None else measure_steps
    times_ms: list[float] = []
    for number in range(1, warmup + measured + 1):
        _synchronise()
        begin = _now_s()
        try:
            returned = step()
        except StopIteration as end:
            raise RuntimeError(
                f"step {number} raised StopIteration: an iterator in it, such as a loader, has ended, and flopwatch."
                f"measure takes {warmup} steps to warm up and {measured} measured ones. Let it begin again when it "
                "ends, or set fewer warmup_steps and measure_steps"
            ) from end
        _synchronise()
        if number > warmup:
            times_ms.append(1e3 * (_now_s() - begin))
        if number == 1 and (why := why_not_run(returned)) is not None:
            raise TypeError(why)
        del returned
    median = statistics.median(times_ms)
    low, high = median_interval(times_ms) or (min(times_ms), max(times_ms))
    spread = float(f"{max(median - low, high - median):.2g}")
    uncertain = f" ± {written(spread)}" if measured > 1 else ""
    sys.stdout.write(f"step: {written(median)}{uncertain} ms, the median of {measured}\n")


def _steps(name: str, given: int | None, least: int, most: int) -> int | None:
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, numbers.Integral) or not least <= given <= most:
        raise ValueError(f"measure takes {name} as a whole number from {least} to {most}, not {_shown(given)}")
    return int(given)  # such as a scalar of numpy


def why_not_run(returned: Any) -> str | None:
    """Return why what a step returned shows that its work may not have been done: it is a generator, a coroutine, a
    future or a function. None of other values; an expression that makes values later is one."""
    import inspect

    is_generator, kind = inspect.isgenerator(returned), type(returned).__name__
    if is_generator and returned.gi_code.co_name == "<genexpr>":
        return None
    if is_generator or inspect.iscoroutine(returned) or inspect.isasyncgen(returned):
        cure = "remove the yield" if is_generator else "write def in place of async def"
        return (
            f"a step returned a {kind}: its code has not run, as it has a yield or is async; {cure}, or return a "
            "function that runs it"
        )
    # By its class: an object may raise where it is asked for what it lacks.
    is_future = all(callable(getattr(type(returned), name, None)) for name in ("done", "result", "add_done_callback"))
    if is_future or inspect.isroutine(returned) or isinstance(returned, functools.partial):
        cure = "return its .result()" if is_future else "call it in the step"
        return f"a step returned a {kind}, whose work may not have been done: {cure}"
    return None


def steps_of_a_second(step_ms: float) -> int:
    """Return how many steps take about a second: a round number, from MEASURE_STEPS to MOST_STEPS.

    If `step_ms` is the time of the quickest step, which other load hardly changes, most processes of a case take
    equally many. Where they do not, a comparison takes as many samples of each as the fewest has.

    Args:
        step_ms: Time of a step in ms; may be infinite.
    """
    wanted = min(float(MOST_STEPS), max(float(MEASURE_STEPS), 1e3 / step_ms if step_ms > 0 else math.inf))
    power = int(10 ** math.floor(math.log10(wanted)))
    return math.ceil(next(factor * power for factor in ROUND if factor * power >= wanted * (1 - 1e-9)))


def _synchronise() -> None:
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()
