"""What the ranks of tests/workers/jobs/test_ddp.py do. Ranks import it by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from parallel.process_group import Rank
from workers.jobs import _data_parallel
from workers.measure.memory import OutOfMemory


def run_all(rank: Rank, specs: dict[str, Any], folder: str) -> dict[str, Any]:
    """Measure one spec after the other; the first part of a name may say what to break."""
    found = {}
    for name, spec in specs.items():
        with broken(rank, name.split(", ")[0]):
            found[name] = _data_parallel.run_rank(rank, spec, folder)
    return found


@contextmanager
def broken(rank: Rank, how: str) -> Iterator[None]:
    """Break this process's strategy: it sends nothing, or sends too late, or one rank's memory is too small."""
    wrap, build, forward = _data_parallel.wrap, _data_parallel.build, _data_parallel.BackwardStep.forward
    if how == "sends nothing":
        _data_parallel.wrap = lambda spec, strategy, module: (wrap(spec, strategy, module)[0], None)
    if how == "does not fit" and rank.index == 1:

        def build_too_much(spec: Any, strategy: str, *others: Any) -> Any:
            if strategy == _data_parallel.ALONE:
                raise OutOfMemory("out of memory in making the model: too much")
            return build(spec, strategy, *others)

        _data_parallel.build = build_too_much
    if how == "one process does not fit" and rank.index == 0:
        parity: list[None] = []

        def build_once(spec: Any, strategy: str, *others: Any) -> Any:
            if strategy == _data_parallel.ALONE and not parity:
                parity.append(None)
                raise OutOfMemory("out of memory in making the model: too much")
            return build(spec, strategy, *others)

        _data_parallel.build = build_once
    if how == "does not fit later" and rank.index == 1:

        def run_out(step: Any) -> None:
            if step.module is step.model and type(step.module).__name__ == "TransformerLM":
                raise RuntimeError("CUDA out of memory. Tried to allocate 1 GiB")
            forward(step)

        _data_parallel.BackwardStep.forward = run_out  # type: ignore[method-assign]
    try:
        yield
    finally:
        _data_parallel.wrap, _data_parallel.build = wrap, build
        _data_parallel.BackwardStep.forward = forward  # type: ignore[method-assign]
