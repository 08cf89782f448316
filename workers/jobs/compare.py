"""Runs `compare`: baseline and candidate take turns, in an order that is drawn, each turn in fresh processes, on the
same device.

Both specs have one kind, whose runner measures them without knowing of the comparison.
"""

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Literal

from app.specs import SpecBase
from app.specs.compare import CompareSpec, blocks_of_turns
from workers.jobs._base import Collecting, Resumable, Runner, Unit, Wrapping
from workers.outcome import Failed
from workers.reporter import Reporter

Side = Literal["baseline", "candidate"]


def turns(replicates: int, seed: int | None) -> list[Side]:
    """Draw the order in which the sides take their turns.

    In each block every order of its turns is equally likely. So no load keeps time with them, whatever its period, and
    slow changes of the host affect both sides of a block alike. Randomised blocks (Fisher, The Design of Experiments,
    1935) are what makes the test of a comparison valid: but for the sides' difference, each value could as well be one
    of the other side, in the same block.

    Args:
        replicates: Turns of each side.
        seed: The same seed draws the same order; None, of a job that an earlier release has queued: any order.
    """
    draw = random.Random(seed)
    order: list[Side] = []
    for size in blocks_of_turns(replicates):
        of_block: list[Side] = ["baseline", "candidate"] * size
        draw.shuffle(of_block)
        order += of_block
    return order


class CompareRunner:
    kind = "compare"

    def plan(self, spec: CompareSpec) -> list[Unit]:
        """Plan the turns that `turns` draws; each has all units of that side's own plan, exec'd to be independent
        samples."""
        runner = _inner_runner(spec)
        plans: dict[Side, list[Unit]] = {
            "baseline": runner.plan(spec.baseline),
            "candidate": runner.plan(spec.candidate),
        }
        replicates: Counter[Side] = Counter()
        units: list[Unit] = []
        for side in turns(spec.replicates, spec.seed):
            replicates[side] += 1
            alone = len(plans[side]) == 1
            units += [
                _outer(inner, side, _title(spec, side, replicates[side], inner, alone=alone)) for inner in plans[side]
            ]
        if spec.convergence_steps is not None:
            units.append(Unit(f"convergence, {spec.convergence_pairs} pairs of {spec.convergence_steps} steps"))
        return units

    def run(self, spec: CompareSpec, unit: Unit, report: Reporter) -> None:
        """Run one unit of one side, as a job of that side alone would, or the pairs of training runs."""
        from workers.jobs import _convergence

        if unit.side is None:
            _convergence.run(spec, report)
            return
        _inner_runner(spec).run(_side(spec, unit), _inner(unit), report)

    def resume(self, spec: CompareSpec, unit: Unit, position: int, failure: Failed) -> Unit | None:
        runner = _inner_runner(spec)
        if unit.side is None or not isinstance(runner, Resumable):
            return None
        rest = runner.resume(_side(spec, unit), _inner(unit), position, failure)
        return None if rest is None else _outer(rest, unit.side, unit.title)

    def collect(self, spec: CompareSpec, unit: Unit, scratch: Path, report: Reporter) -> None:
        runner = _inner_runner(spec)
        if unit.side is not None and isinstance(runner, Collecting):
            runner.collect(_side(spec, unit), _inner(unit), scratch, report)

    def wrapper_error(
        self, spec: CompareSpec, unit: Unit, scratch: Path, output: str, *, succeeded: bool
    ) -> str | None:
        runner = _inner_runner(spec)
        if unit.side is None or not isinstance(runner, Wrapping):
            return None
        return runner.wrapper_error(_side(spec, unit), _inner(unit), scratch, output, succeeded=succeeded)


RUNNER = CompareRunner()


def _inner_runner(spec: CompareSpec) -> Runner:
    """Return the runner of the compared specs' kind. Raises Unsupported if this worker has none."""
    from workers.jobs import runner_for

    return runner_for(spec.baseline.kind)


def _side(spec: CompareSpec, unit: Unit) -> SpecBase:
    assert unit.side is not None
    return spec.sides()[unit.side]


def _title(spec: CompareSpec, side: Side, replicate: int, inner: Unit, *, alone: bool) -> str:
    turn = f"{side}, replicate {replicate} of {spec.replicates}"
    return turn if alone else f"{turn}: {inner.title}"


def _outer(inner: Unit, side: Side, title: str) -> Unit:
    """Return the unit of the comparison for the inner runner's unit `inner`."""
    kept = {"title": inner.title, "params": dict(inner.params)}
    return replace(inner, title=title, params=kept, start="exec", side=side)


def _inner(unit: Unit) -> Unit:
    """Return the unit as the inner runner has planned it."""
    return replace(unit, side=None, title=unit.params["title"], params=unit.params["params"])
