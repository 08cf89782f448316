"""Jobs with results, through the queue."""

import json
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest

from app import results as app_results
from app.results import JobChoice, Layout, Sheet
from app.specs import KINDS, spec_adapter
from app.store.database.engine import Database
from app.store.queue.transitions import Queue
from app.store.records import Claim, Finish, MeasurementRecord, NewJob, Offer
from tests.app.store.conftest import database, queue, reading, record, registration, results, settings, shop

__all__ = ["database", "queue", "reading", "record", "registration", "results", "settings", "shop"]


def table(database: Database, **options: Any) -> Sheet:
    """Make a table. The options are the fields of JobChoice and of Layout, and the arguments of `results.table`."""
    choice, layout = (
        kind(**{field.name: options.pop(field.name) for field in fields(kind) if field.name in options})
        for kind in (JobChoice, Layout)
    )
    return app_results.table(database, choice, layout, **options)


@pytest.fixture
def engine() -> str:
    """These tests are about results, not about the database."""
    return "sqlite"


@pytest.fixture
def run_job(queue: Queue) -> Callable[..., Claim]:
    """Submits a job of any kind and claims it."""

    def run(spec: dict[str, Any] | None = None, **job: Any) -> Claim:
        asked = spec_adapter.validate_json(json.dumps({"kind": "benchmark", **(spec or {})}))
        queue.submit(NewJob(asked, **job))
        capabilities = frozenset(asked.requirements())
        claim = queue.claim("worker", Offer(frozenset(KINDS), capabilities, total_gpus=0, free_gpus=0, idle=True))
        assert claim is not None
        return claim

    return run


@pytest.fixture
def ended(run_job: Callable[..., Claim], queue: Queue) -> Callable[..., int]:
    """Runs a job of any kind to this end, by default a success; returns its id."""

    def run(spec: dict[str, Any] | None = None, finish: Finish | None = None, **left: Any) -> int:
        claim = run_job(spec)
        queue.finish(claim, replace(finish or Finish("succeeded"), **left))
        return int(claim.job_id)

    return run


@pytest.fixture
def measure(ended: Callable[..., int], record: Callable[..., MeasurementRecord]) -> Callable[..., int]:
    """Submits a job, runs it and records the measurements given: (metric, changes) pairs of its only case.

    A change of `case` adds coordinates, and makes another case of it
    """

    def run(*measured: tuple[str, dict[str, Any]], spec: dict[str, Any] | None = None, finish: Any = None) -> int:
        asked = spec_adapter.validate_json(json.dumps({"kind": "benchmark", **(spec or {})}))
        case = None if asked.holds_specs else asked.cases()[0]
        records = []
        for metric, changes in measured:
            coordinates = {**(case.coordinates if case else {}), **changes.get("case", {})}
            key = json.dumps(coordinates, sort_keys=True)
            records.append(record(metric, **{"case_key": key, **changes, "case": coordinates}))
        return ended(spec, finish, measurements=records)

    return run
