"""Samples for plots: of the last recorded attempt and of one column."""

from __future__ import annotations

import array
import zlib
from collections.abc import Callable
from typing import Any

import pytest

from app.results import samples_of
from app.store.database.engine import Database
from app.store.queue.transitions import Queue
from app.store.reading import measurements
from app.store.records import Finish
from tests.app.store.conftest import Shop


def packed(*values: float) -> bytes:
    return zlib.compress(array.array("d", values).tobytes())


@pytest.fixture
def job(shop: Shop, queue: Queue, record: Callable[..., Any]) -> int:
    """A job that first failed, and then measured rates of two phases, and one without a phase, in two processes."""
    claim = shop.running_job()
    lost = [record("tflops", unit_index=unit, phase="forward", samples=packed(9.0)) for unit in range(6)]
    queue.finish(claim, Finish("failed", error={"code": "crashed"}, measurements=lost))
    queue.retry(claim.job_id)
    rates = [
        record("tflops", unit_index=unit, phase=phase, samples=packed(unit + 0.5, value))
        for unit in range(2)
        for phase, value in ((None, 1.0), ("backward", 2.0), ("forward", 3.0))
    ]
    no_value = [record("tflops", unit_index=unit, phase="forward", outcome="oom") for unit in range(6)]
    queue.finish(shop.claim(), Finish("succeeded", measurements=[*no_value, *rates]))
    return claim.job_id


@pytest.mark.parametrize(("metric", "value"), [("tflops", 1.0), ("backward_tflops", 2.0), ("forward_tflops", 3.0)])
def test_all_processes_and_nothing_else(database, job, metric, value, monkeypatch) -> None:
    """As few rows as there are of this column are read."""
    monkeypatch.setattr(measurements, "MAX_SAMPLED", 2)
    (found,) = samples_of(database, [job], metric, ["context_length"])
    assert (found.job, found.side, found.case) == (job, None, "context_length=128")
    assert found.values == [0.5, value, 1.5, value]


@pytest.mark.parametrize("metric", ["step_ms", "optimizer_tflops", "", "_"])
def test_what_was_not_measured_has_none(database: Database, job: int, metric: str) -> None:
    assert samples_of(database, [job], metric, []) == []


def test_a_metric_that_begins_with_its_phase(database: Database, shop: Shop, record: Callable[..., Any]) -> None:
    claim = shop.running_job()
    shop.queue.finish(claim, Finish("succeeded", measurements=[record("forward_ms", samples=packed(1.0, 2.0))]))
    (found,) = samples_of(database, [claim.job_id], "forward_ms", [])
    assert found.values == [1.0, 2.0]
