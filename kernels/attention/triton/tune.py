"""Times listed tilings of attention's Triton kernels on this device, on request only.

Jobs of kind `attention` with `autotune` ask for it; calls of attention never tune: that compiles some fifty kernels, a
second of processor time each.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from ...device_clock import DeviceClock, Workload, host_lap_ms
from ...tolerance import TF32_TOLERANCE, TOLERANCES, error, fixed_limits
from . import launch, tilings
from .inputs import allocate_results, empty_like, on_device, tf32_is_allowed, with_heads
from .launch import Scoring
from .tilings import Tiling, Tilings, padded_width, precision_of

_ANY = (Tiling(32, 64, 4, 2), Tiling(64, 32, 4, 2), Tiling(32, 32, 4, 2), Tiling(16, 32, 4, 1), Tiling(16, 16, 4, 1))
_FLAT = (
    *(Tiling(64, 128, 4, 3), Tiling(64, 64, 4, 3), Tiling(128, 64, 4, 3), Tiling(128, 128, 8, 3), *_ANY),
    *(Tiling(128, 64, 8, 2), Tiling(128, 32, 8, 2), Tiling(64, 64, 4, 2), Tiling(64, 16, 4, 2)),
    *(Tiling(64, 64, 4, 3, hold=True), Tiling(64, 32, 4, 3, hold=True)),
)
_UPRIGHT = (
    *(Tiling(128, 64, 4, 2), Tiling(128, 64, 4, 3), Tiling(64, 64, 4, 2), Tiling(64, 64, 4, 3), *_ANY),
    *(Tiling(128, 128, 8, 2), Tiling(64, 128, 8, 2), Tiling(64, 64, 8, 2), Tiling(16, 64, 4, 2)),
)
CANDIDATES = {"forward": _FLAT, "keys": _UPRIGHT, "queries": _FLAT, "one_pass": _UPRIGHT}
"""Candidates by kernel, with the names of `Tilings`' fields. Those that do not fit a device are skipped there."""
SAMPLES = 7
FORMS = {False: "two passes", True: "one pass"}
"""Forms of the backward pass, by `Tilings.prefer_one_pass`."""
GAIN = 0.02
"""A smaller gain may be noise: the present choice stays."""
REFUSALS = (OutOfResources, PTXASError, CompilationError)
COMPILER_FAILED = "PassManager::run failed"
"""Message of the plain RuntimeError that Triton's compiler raises."""

Tell = Callable[[str], None]
Timer = Callable[[str, Tilings, Workload], float]
"""(kernel, the tilings, the call) -> ms of one call."""


class NoTilingRuns(Exception):
    """No listed tiling of a kernel runs on this device."""


class TuningProblem:
    """Inputs of `flash_attention`, and the kernels' calls on them. `scoring` None: of `is_causal` alone.

    Raises:
        ValueError: `flash_attention` refuses the inputs, or they are empty.
    """

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, tf32: bool | None,
        scoring: Scoring | None = None, bounds: Tensor | None = None,
    ) -> None:  # fmt: skip
        out, logsumexp = allocate_results(q, k, v)
        if out.numel() == 0:
            raise ValueError(f"there is nothing to tune for: q's shape is {tuple(q.shape)}")
        q, k, v, out = with_heads(q.detach(), k.detach(), v.detach(), out)
        gradient = torch.empty_like(out).normal_(generator=torch.Generator(q.device).manual_seed(0))
        self._gradient, self._inputs = gradient, (q, k, v)
        self._scoring, self._bounds = scoring or Scoring.of(q, k, is_causal), bounds
        self.precision = precision_of(q, tf32_is_allowed() if tf32 is None else tf32)
        first, second, third = launch.operands(self.precision, q, k, v)
        self._operands, self._width = (first, second, third), padded_width(q.shape[-1])
        self.results = {"out": out, "logsumexp": logsumexp.view(out.shape[:-1])}
        self.results |= {"dq": empty_like(q), "dk": empty_like(k), "dv": empty_like(v)}
        self._right: dict[str, Tensor] = {}

    def run(self, kernel: str, chosen: Tilings) -> tuple[str, ...]:
        """Call a kernel; "one_pass" and "two_passes" call the whole backward pass. Returns the names of the results."""
        self.use(replace(chosen, prefer_one_pass=kernel == "one_pass"))
        out, logsumexp = self.results["out"], self.results["logsumexp"]
        if kernel == "forward":
            launch.forward(*self._operands, out, logsumexp, self._scoring, self.precision, bounds=self._bounds)
            return "out", "logsumexp"
        names = {"keys": ("dk", "dv"), "queries": ("dq",)}.get(kernel, ("dq", "dk", "dv"))
        dq, dk, dv = (self.results[name] if name in names else None for name in ("dq", "dk", "dv"))
        launch.backward(
            self._gradient, *self._inputs, out, dq, dk, dv, logsumexp, None, self._scoring, self.precision, self._bounds
        )
        return names

    def present(self) -> Tilings:
        """Return the tilings that calls use now."""
        capped = self._scoring.softcap is not None
        return tilings.choose(self._operands, self._width, self.precision, capped)

    def use(self, chosen: Tilings) -> None:
        """Make calls use these tilings."""
        tilings.remember(self._operands, self._width, self.precision, chosen)

    def set_output(self) -> None:
        """Restore the right output and log-sum-exp for the backward pass: the last tiling may have been wrong."""
        for name in ("out", "logsumexp"):
            self.results[name].copy_(self._right[name])

    def why_not(self, kernel: str, chosen: Tilings) -> str:
        """Return why a kernel cannot run, or how its results differ from the right ones; "" if it runs and is right.

        The first results count as right.
        """
        for name in ("out", "logsumexp") if kernel == "forward" else ("dq", "dk", "dv"):
            self.results[name].fill_(float("nan"))  # the tensor may contain another tiling's right values
        try:
            names = self.run(kernel, chosen)
        except Exception as failure:
            if isinstance(failure, REFUSALS) or COMPILER_FAILED in str(failure):
                return f"{type(failure).__name__}: {str(failure).strip()[:200]}"
            raise
        limit = fixed_limits(TF32_TOLERANCE if self.precision == "tf32" else TOLERANCES[self._gradient.dtype])
        for name in names:
            expected = self._right.setdefault(name, self.results[name].clone())
            if why := error(self.results[name], expected.double()).why_wrong(limit):
                return f"{name}: {why}"
        return ""


def tune(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, *, backward: bool = True, tf32: bool | None = None,
    tell: Tell = lambda line: None, timer: Timer | None = None, candidates: Sequence[Tiling] | None = None,
    scoring: Scoring | None = None, bounds: Tensor | None = None,
) -> str:  # fmt: skip
    """Find the fastest tilings for such inputs, which this process's further calls use; return a line that names them.

    Such inputs are those on the same device, of the same dtype, padded head dimension and precision, with any lengths
    and masks. Calls use the tilings until the next search for such inputs, or `tilings.forget`.

    Args:
        q: Queries; q, k, v, is_causal and tf32 are `flash_attention`'s arguments.
        k: Keys.
        v: Values.
        is_causal: Query i sees keys 0 … i only.
        backward: Also tune the backward pass; otherwise its tilings do not change.
        tf32: True lets products round float32 inputs to tf32; None: as torch is set.
        tell: Called with a line of progress, every few seconds.
        timer: Measures a call's time; None: the device's time with a cold L2 cache.
        candidates: Those for every kernel, besides the present choice; None: CANDIDATES.
        scoring: That of the problem that is timed; None: of `is_causal` alone.
        bounds: Of its documents (`launch.document_bounds`), if it has any.

    Raises:
        ValueError: `flash_attention` refuses the inputs, or they are empty.
        NoTilingRuns: this device can run no tiling of a kernel.
    """
    kernels = tuple(CANDIDATES) if backward else ("forward",)
    with torch.no_grad(), on_device(q.device):
        problem = TuningProblem(q, k, v, is_causal, tf32, scoring, bounds)
        chosen = present = problem.present()
        try:
            for kernel in kernels:
                chosen = _fastest(problem, chosen, kernel, timer or default_timer(q.device), tell, candidates)
        finally:
            problem.use(chosen)
    line = "; ".join(f"{_words(kernel)} {as_text(getattr(chosen, kernel))}" for kernel in kernels)
    return f"{line}{f'; backward in {FORMS[chosen.prefer_one_pass]}' * backward}{' (as before)' * (chosen == present)}"


def _fastest(
    problem: TuningProblem, chosen: Tilings, kernel: str, timer: Timer, tell: Tell, candidates: Sequence[Tiling] | None
) -> Tilings:
    """Return the tilings with the fastest one of a kernel; the present one stays unless another is faster by GAIN.

    The present choice runs first, so its results count as right. "one_pass" may have none: two passes replace it.
    """

    def median_ms(name: str, trial: Tilings) -> float:
        def work() -> None:
            problem.run(name, trial)

        return statistics.median(timer(name, trial, work) for _ in range(SAMPLES))

    times: dict[Tiling, float] = {}
    why = ""
    for tiling in dict.fromkeys([getattr(chosen, kernel), *(CANDIDATES[kernel] if candidates is None else candidates)]):
        trial = _with(chosen, kernel, tiling)
        if why := problem.why_not(kernel, trial):
            tell(f"{_words(kernel)} {as_text(tiling)} is left out: {why}")
        else:
            times[tiling] = median_ms(kernel, trial)
    ranked = [f"{as_text(tiling)}: {times[tiling]:.3g} ms" for tiling in sorted(times, key=times.__getitem__)]
    tell(f"{_words(kernel)}: {'    '.join(ranked) or 'none runs'}")
    if times:
        chosen = _with(chosen, kernel, _pick(times, getattr(chosen, kernel)))
    elif kernel != "one_pass":
        raise NoTilingRuns(f"no tiling of the {kernel} kernel runs on this device: {why}")
    if kernel == "forward":
        problem.set_output()
    if kernel == "one_pass":
        forms = {False: median_ms("two_passes", chosen), **({True: median_ms("one_pass", chosen)} if times else {})}
        chosen = replace(chosen, prefer_one_pass=_pick(forms, chosen.prefer_one_pass))
        tell("backward pass: " + ", ".join(f"{FORMS[form]} {time:.3f} ms" for form, time in forms.items()))
    return chosen


def default_timer(device: torch.device) -> Timer:
    """Return a timer of the device's time with a cold L2 cache; in the interpreter, one of the host's time."""
    if device.type != "cuda":
        return lambda kernel, chosen, work: host_lap_ms(work)
    clock = DeviceClock(device)
    return lambda kernel, chosen, work: clock.lap(work).device_ms


def as_text(tiling: Tiling) -> str:
    """Return a tiling as text: "held, queries × keys, warps, stages"."""
    return f"{'held, ' * tiling.hold}{tiling.queries} × {tiling.keys}, {tiling.warps}, {tiling.stages}"


def _pick(times: dict[Any, float], present: Any) -> Any:
    fastest = min(times, key=times.__getitem__)
    return present if present in times and times[present] <= times[fastest] * (1 + GAIN) else fastest


def _with(tilings: Tilings, kernel: str, tiling: Tiling) -> Tilings:
    changed: dict[str, Any] = {kernel: tiling}
    return replace(tilings, **changed)


def _words(kernel: str) -> str:
    return kernel.replace("_", " ")
