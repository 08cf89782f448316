"""Searches, on request only, for the tilings of attention's Triton kernels that are fastest on this device.

    python -m kernels.attention.triton_tuning --head-dim 64 --dtype bfloat16 --length 16384 --heads 16

prints the best tilings of each kernel with their times, and the lines to put into triton_tilings. Calls of attention
never tune: a search compiles some hundred kernels, a second of processor time each, which is more than most runs take.

A kernel's candidates are compiled side by side, compared with the present choice's results, and timed in rounds: each
round takes more samples of fewer candidates. Candidates that Triton refuses are noted and left out.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from kernels.attention import triton_tilings as tilings
from kernels.attention.triton_candidates import candidates, limits
from kernels.attention.triton_launch import padded_width
from kernels.attention.triton_problem import RESULTS, Problem
from kernels.attention.triton_tiles import Tiling
from kernels.attention.triton_tilings import Tilings
from kernels.device_clock import DeviceClock, Work, host_lap_ms

REFUSALS = (OutOfResources, PTXASError, CompilationError)
COMPILER_FAILED = "PassManager::run failed"
"""Message of the plain RuntimeError that Triton's compiler raises."""
MOST_THREADS = 16
COMPILED_AT_ONCE = 32
"""Candidates between two lines of progress."""
ROUNDS = ((1, 24), (4, 6), (11, 1))
"""(samples, number of candidates that go on) of each round; the present choice always goes on."""
FORM_SAMPLES = 11
FORMS = {False: "two passes", True: "one pass"}
"""Forms of the backward pass, by `Tilings.prefer_one_pass`."""
GAIN = 0.02
"""A smaller gain cannot be told from noise: the present choice stays."""
SAFE = (Tiling(32, 32, 4, 1), Tiling(16, 16, 4, 1))
"""Tiling whose results others are compared to, where the present choice does not fit the device."""

Tell = Callable[[str], None]
Timer = Callable[[str, tuple[Tiling, ...], Work], float]
"""(name of the timed work, its tilings, the call) -> ms of one call."""


class NothingRuns(Exception):
    """No tiling of a kernel runs on this device; the message says why the last one does not."""


@dataclass
class Trial:
    """The result of one candidate."""

    kernel: str
    tiling: Tiling
    times_ms: list[float] = field(default_factory=list)
    """Samples of its last round; none if it was refused."""
    rounds: int = 0
    """Number of its rounds."""
    refused: str | None = None
    """The reason why it cannot be taken: Triton's words, or what is wrong with its results."""

    @property
    def median_ms(self) -> float:
        """Median of the samples; infinite if there are none."""
        return statistics.median(self.times_ms) if self.times_ms else float("inf")


@dataclass(frozen=True)
class Tuned:
    """The results of a search."""

    chosen: Tilings
    present: Tilings
    """The tilings that calls used before."""
    trials: tuple[Trial, ...]
    """Every candidate; those of one kernel follow each other, the best first, the refused last."""
    forms_ms: dict[str, float]
    """Medians of the backward pass's forms, "one pass" and "two passes", with their preparation; empty without a
    backward pass.
    """

    def summary(self) -> str:
        """One line for a log."""
        parts = []
        for kernel in dict.fromkeys(trial.kernel for trial in self.trials):
            chosen, present = getattr(self.chosen, kernel), getattr(self.present, kernel)
            best = next(trial for trial in self.trials if trial.kernel == kernel)
            kept = "as before" if chosen == present else f"instead of {shown(present)}"
            parts.append(f"{kernel.replace('_', ' ')} {shown(chosen)} ({best.median_ms:.3f} ms, {kept})")
        if self.forms_ms:
            parts.append(f"backward in {FORMS[self.chosen.prefer_one_pass]}")
        return "; ".join(parts)


def tune(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, *, backward: bool = True, tf32: bool | None = None,
    tell: Tell = lambda line: None, timer: Timer | None = None, among: Sequence[Tiling] | None = None,
) -> Tuned:  # fmt: skip
    """Search for the fastest tilings for such inputs, and let this process's further calls take them.

    These are calls on the same device, of the same dtype, padded head dimension and precision, with any lengths and
    masks. They take the tilings until another search for such inputs, or `triton_tilings.forget`.

    Args:
        q: Queries; q, k, v, is_causal and tf32 are as `flash_attention` takes them.
        k: Keys.
        v: Values.
        is_causal: Query i sees keys 0 … i only.
        backward: Also tune the backward pass; else its tilings stay as they are.
        tf32: True lets products round float32 inputs to tf32; None: as torch is set.
        tell: Called with a line of progress, every few seconds.
        timer: Function that takes times; None: `default_timer`'s.
        among: The candidates for every kernel, besides the present choice; None: all that may be fast.

    Raises:
        ValueError: `flash_attention` does not take the inputs, or they are empty.
        NothingRuns: this device can run no tiling of a kernel.
    """
    trials: list[Trial] = []
    forms_ms: dict[str, float] = {}
    with torch.no_grad(), _on(q.device):
        problem = Problem.of(q, k, v, is_causal, tf32)
        width = padded_width(problem.q.shape[-1])
        present = chosen = tilings.choose(problem.operands, width, problem.precision)
        search = _Search(problem, timer or default_timer(problem.q.device), tell, among)
        for kernel in RESULTS if backward else ("forward",):
            found = search.best_first(kernel, getattr(present, kernel))
            trials += found
            if found[0].refused is None:
                chosen = _with(chosen, kernel, found[0].tiling)
        if backward:
            one_pass_runs = any(trial.kernel == "one_pass" and trial.refused is None for trial in trials)
            forms_ms = search.forms_ms(chosen, one_pass_runs)
            chosen = replace(chosen, prefer_one_pass=faster_form(forms_ms, present.prefer_one_pass))
    tilings.remember(problem.operands, width, problem.precision, chosen)
    return Tuned(chosen, present, tuple(trials), forms_ms)


def default_timer(device: torch.device) -> Timer:
    """Return a timer of the device's time with a cold L2 cache; of the host's clock where the interpreter runs."""
    if device.type != "cuda":
        return lambda what, tilings, work: host_lap_ms(work)
    clock = DeviceClock(device)
    return lambda what, tilings, work: clock.lap(work).device_ms


def shown(tiling: Tiling) -> str:
    """Write a tiling as the tables of triton_tilings do."""
    return f"{'held, ' * tiling.hold}{tiling.queries} × {tiling.keys}, {tiling.warps}, {tiling.stages}"


def faster_form(forms_ms: dict[str, float], prefer_one_pass: bool) -> bool:
    """Return True if one pass is to be preferred; the present preference stays unless the other is faster by GAIN."""
    present, other = (forms_ms.get(FORMS[form], float("inf")) for form in (prefer_one_pass, not prefer_one_pass))
    return prefer_one_pass if present <= other * (1 + GAIN) else not prefer_one_pass


@dataclass
class _Search:
    problem: Problem
    timer: Timer
    tell: Tell
    among: Sequence[Tiling] | None

    def best_first(self, kernel: str, present: Tiling) -> list[Trial]:
        """Return every candidate's trial: the one to choose first, the refused last."""
        q, k, _ = self.problem.operands
        limit = limits(q, k, padded_width(self.problem.q.shape[-1]), self.problem.precision)
        offered = candidates(kernel, limit) if self.among is None else self.among
        right = None if kernel == "one_pass" else self._find_right(kernel, present)
        tried = [Trial(kernel, tiling) for tiling in dict.fromkeys([present, *([right] if right else []), *offered])]
        self._compile(tried)
        for trial in tried:
            trial.refused = trial.refused or self.problem.why_wrong(kernel, trial.tiling)
        self._race([trial for trial in tried if trial.refused is None], present)
        tried.sort(key=lambda trial: (-trial.rounds, trial.median_ms))
        ours = next(trial for trial in tried if trial.tiling == present)
        if ours.refused is None and ours.median_ms <= tried[0].median_ms * (1 + GAIN):
            tried.remove(ours)
            tried.insert(0, ours)
        self._tell_result(kernel, tried)
        return tried

    def forms_ms(self, chosen: Tilings, one_pass_runs: bool) -> dict[str, float]:
        """Measure the backward pass's forms in turns; return their medians."""
        works: dict[str, tuple[tuple[Tiling, ...], Work]] = {
            FORMS[False]: (
                (chosen.keys, chosen.queries),
                lambda: self.problem.in_two_passes(chosen.keys, chosen.queries),
            )
        }
        if one_pass_runs:
            works[FORMS[True]] = (chosen.one_pass,), lambda: self.problem.in_one_pass(chosen.one_pass)
        samples: dict[str, list[float]] = {form: [] for form in works}
        for _ in range(FORM_SAMPLES):
            for form, (used, work) in works.items():
                samples[form].append(self.timer(form, used, work))
        medians = {form: statistics.median(times) for form, times in samples.items()}
        self.tell("backward pass: " + ", ".join(f"{form} {median:.3f} ms" for form, median in medians.items()))
        return medians

    def _find_right(self, kernel: str, present: Tiling) -> Tiling:
        """Take the present choice's results as the right ones; if it does not fit the device, those of a smaller
        tiling.
        """
        for tiling in (present, *SAFE):
            try:
                self.problem.take_as_right(kernel, tiling)
            except Exception as error:
                lacking = why_refused(error)
                if lacking is None:
                    raise
            else:
                return tiling
        raise NothingRuns(f"no tiling of the {kernel} kernel runs on this device: {lacking}")

    def _compile(self, trials: Sequence[Trial]) -> None:
        """Run each once, compiling side by side where kernels are compiled: Triton does so without Python's lock."""
        threads = min(MOST_THREADS, os.cpu_count() or 1) if self.problem.q.device.type == "cuda" else 1
        _wait_for(self.problem.q.device)  # each thread has its own current stream
        with ThreadPoolExecutor(threads) as pool:
            for start in range(0, len(trials), COMPILED_AT_ONCE):
                self.tell(f"{_words(trials[0])}: compiling candidates, {start} of {len(trials)} done")
                batch = trials[start : start + COMPILED_AT_ONCE]
                for trial, reason in zip(batch, pool.map(self._try, batch), strict=True):
                    trial.refused = reason
        _wait_for(self.problem.q.device)

    def _try(self, trial: Trial) -> str | None:
        try:
            with _on(self.problem.q.device):
                self.problem.run(trial.kernel, trial.tiling)
        except Exception as error:
            reason = why_refused(error)
            if reason is None:
                raise
            return reason
        return None

    def _race(self, running: Sequence[Trial], present: Tiling) -> None:
        """Time the candidates in turns, fewer in each round."""
        for samples, going_on in ROUNDS:
            for trial in running:
                trial.times_ms.clear()
                trial.rounds += 1
            for _ in range(samples):
                for trial in running:
                    trial.times_ms.append(self._time_ms(trial))
            ranked = sorted(running, key=lambda trial: trial.median_ms)
            running = [*ranked[:going_on], *(trial for trial in ranked[going_on:] if trial.tiling == present)]

    def _time_ms(self, trial: Trial) -> float:
        return self.timer(trial.kernel, (trial.tiling,), lambda: self.problem.run(trial.kernel, trial.tiling))

    def _tell_result(self, kernel: str, tried: Sequence[Trial]) -> None:
        best, refused = tried[0], sum(trial.refused is not None for trial in tried)
        fastest = "none runs" if best.refused else f"best {shown(best.tiling)}: {best.median_ms:.3f} ms"
        self.tell(f"{_words(best)}: {fastest}; {len(tried)} candidates, {refused} refused")


def why_refused(error: Exception) -> str | None:
    """Say in one line why Triton cannot run a candidate; None if the error means something else."""
    if isinstance(error, REFUSALS) or (isinstance(error, RuntimeError) and COMPILER_FAILED in str(error)):
        lines = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {(lines[-1] if isinstance(error, CompilationError) else lines[0])[:200]}"
    return None


def _with(tilings: Tilings, kernel: str, tiling: Tiling) -> Tilings:
    changed: dict[str, Any] = {kernel: tiling}
    return replace(tilings, **changed)


def _words(trial: Trial) -> str:
    return trial.kernel.replace("_", " ")


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make the device current: each thread has its own current device, and Triton launches on that."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


SHOWN = 4
"""Candidates of each kernel that the command prints."""


def report(tuned: Tuned, width: int) -> Iterator[str]:
    """Yield lines for triton_tilings: the best of each kernel as in its docstring, and the tilings as in its code."""
    for kernel in dict.fromkeys(trial.kernel for trial in tuned.trials):
        tried = [trial for trial in tuned.trials if trial.kernel == kernel]
        best = [f"{shown(trial.tiling)}: {trial.median_ms:.3g}" for trial in tried if trial.refused is None]
        yield f"    {width:<5}{_words(tried[0]):<10}{'    '.join(best[:SHOWN])}".rstrip()
    yield ""
    for form, time_ms in tuned.forms_ms.items():
        yield f"backward pass in {form}: {time_ms:.3g} ms"
    reasons = Counter(f"{trial.refused.split(',')[0]}" for trial in tuned.trials if trial.refused is not None)
    yield f"{len(tuned.trials)} candidates, {reasons.total()} refused"
    yield from (f"    {count} × {reason}" for reason, count in reasons.most_common(SHOWN))
    yield ""
    chosen = tuned.chosen
    parts = [_code(getattr(chosen, kernel)) for kernel in RESULTS]
    yield f"    {width}: Tilings({', '.join(parts)}{', True' * chosen.prefer_one_pass}),"


def _code(tiling: Tiling) -> str:
    return f"Tiling({tiling.queries}, {tiling.keys}, {tiling.warps}, {tiling.stages}{', True' * tiling.hold})"


def main(arguments: Sequence[str] | None = None) -> None:
    """Tune for one problem, and print what was found."""
    parser = argparse.ArgumentParser(prog="python -m kernels.attention.triton_tuning", description=__doc__)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--length", type=int, default=16_384, help="of queries and keys alike")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--causal", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--precision", choices=("exact", "tf32"), default="exact", help="of products of float32")
    parser.add_argument("--backward", action=argparse.BooleanOptionalAction, default=True)
    given = parser.parse_args(arguments)
    shape = given.batch, given.heads, given.length, given.head_dim
    if min(shape) < 1:
        parser.error("sizes are positive numbers")
    if not torch.cuda.is_available():
        parser.exit(1, "There is no CUDA device here: tilings are tuned on the device that will run them.\n")
    q, k, v = (torch.randn(shape, dtype=getattr(torch, given.dtype), device="cuda") for _ in range(3))
    try:
        tuned = tune(
            q, k, v, given.causal, backward=given.backward, tf32=given.precision == "tf32",
            tell=lambda line: print(line, flush=True),
        )  # fmt: skip
    except ValueError as error:
        parser.error(str(error))
    today = datetime.datetime.now(datetime.UTC).date()
    mask = "causal" if given.causal else "no mask"
    products = f", products {given.precision}" if given.dtype == "float32" else ""
    print(
        f"\nMeasured on {torch.cuda.get_device_name()} on {today} (torch {torch.__version__}, "
        f"Triton {triton.__version__}; {given.dtype}{products}, {mask}, batch {given.batch}, {given.heads} heads, "
        f"length {given.length}, head dimension {given.head_dim}): ms of one kernel, median of {ROUNDS[-1][0]} with "
        "the L2 cache flushed, by queries × keys, warps, stages\n"
    )
    print(*report(tuned, padded_width(given.head_dim)), sep="\n")


if __name__ == "__main__":
    main()
