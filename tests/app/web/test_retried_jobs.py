"""Tables, plots, the order of a sweep's jobs, exports and comparisons have the same value of a job that ran twice."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from app.specs import spec_adapter
from app.store.records import RunningAttempt

ONCE, LOST, AGAIN, UNMEASURED = 1, 2, 3, 4
"""Jobs of a sweep: one ran once; one measured everything and failed, was retried, and lost its worker; one failed, was
retried, and succeeded with another value; one failed before it measured the step, was retried, and lost its worker."""
VALUES = {ONCE: 5.0, LOST: 3.0, AGAIN: 4.0, UNMEASURED: None}
OUTCOMES = {ONCE: "ok", LOST: "ok", AGAIN: "ok", UNMEASURED: "worker_lost"}


@pytest.fixture(scope="module")
def swept(serve: Any, measured: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The four jobs, all finished."""
    with serve(tmp_path_factory.mktemp("swept"), lease_s=600) as site:
        base = {"kind": "benchmark", "model": {"size": "tiny"}}
        site.http.post("/sweeps", json={"base": base, "grid": {"context_length": [8, 16, 32, 64]}})

        def finish(state: str, **values: float) -> int:
            claim = site.worker.claim()
            case = spec_adapter.validate_json(json.dumps(claim.spec)).case().coordinates
            rows = [measured(metric, value, **case) for metric, value in values.items()]
            site.worker.finish(claim, state, measurements=rows)
            return int(claim.job_id)

        def lose() -> None:
            claim = site.worker.claim()
            running = RunningAttempt(claim.attempt_id, claim.job_id, claim.attempt, 0)
            assert site.services.queue.recover(running) == "failed"

        def retry(job: int) -> None:
            assert site.http.post(f"/jobs/{job}/retry").status_code == 202

        assert finish("succeeded", step_ms=5.0, forward_ms=1.0) == ONCE
        assert finish("failed", step_ms=3.0, forward_ms=1.0) == LOST
        assert finish("failed", step_ms=90.0, forward_ms=1.0) == AGAIN
        assert finish("failed", forward_ms=1.0) == UNMEASURED
        retry(LOST)
        lose()
        retry(AGAIN)
        assert finish("succeeded", step_ms=4.0, forward_ms=1.0) == AGAIN
        retry(UNMEASURED)
        lose()
        yield site


def test_table(swept: Any) -> None:
    rows = swept.http.get("/tables?sweep=1&columns=step_ms").json()["rows"]
    assert {row["job"]: row["step_ms"] for row in rows} == VALUES
    assert {row["job"]: row["step_ms_outcome"] for row in rows} == OUTCOMES
    assert {row["job"] for row in rows if row["partial"]} == {LOST}


@pytest.mark.parametrize("job", [LOST, AGAIN, UNMEASURED])
def test_comparison(swept: Any, job: int) -> None:
    """It takes no numbers of a job that did not succeed."""
    answer = swept.http.get(f"/compare?baseline={ONCE}&candidate={job}&metric=step_ms").json()
    (row,) = answer["rows"]
    succeeded = job == AGAIN
    assert (row["baseline"], row["candidate"]) == (VALUES[ONCE], VALUES[job] if succeeded else None)
    assert row["candidate_outcome"] == ("ok" if succeeded else "worker_lost")
