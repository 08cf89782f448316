"""Cancelling and deleting all jobs that a filter chooses."""

from typing import Any

import pytest
from sqlalchemy import event as events

from app.specs.benchmark import BenchmarkSpec
from app.store.database import slices
from app.store.keeping import bulk, deleting
from app.store.reading.filters import JobFilter
from app.store.records import NewJob
from tools.waiting import wait_until


def states(site: Any) -> dict[str, int]:
    return {state: count for state, count in site.services.reading.counts().items() if count}


def sweep(site: Any, number: int, **labels: str) -> list[int]:
    """Jobs that were submitted together; their ids."""
    queue = site.services.queue
    jobs = [NewJob(BenchmarkSpec(seed=seed), labels=labels, point={"seed": seed}) for seed in range(number)]
    made = queue.submit_sweep(None, labels, {}, {}, [], jobs).response["id"]
    with site.services.database.read() as connection:
        return list(connection.exec_driver_sql(f"SELECT id FROM job WHERE sweep_id = {made} ORDER BY id").scalars())


class TestCancel:
    def test_by_state_kind_label_and_sweep(self, fresh_site: Any) -> None:
        http = fresh_site.http
        blue, red = sweep(fresh_site, 3, colour="blue"), sweep(fresh_site, 3, colour="red")
        fresh_site.worker.claim()  # the first of the blue ones
        both = {"label": "colour:blue", "kind": "benchmark"}
        for chosen, cancelled, requested in ((both | {"kind": "attention"}, 0, 0), (both, 2, 1), (both, 0, 0)):
            response = http.post("/jobs/cancel", params=chosen)
            assert (response.status_code, response.json()) == (202, {"cancelled": cancelled, "requested": requested})
        job = fresh_site.job(blue[0])
        assert (job["state"], bool(job["cancel_requested_at"])) == ("running", True)
        assert fresh_site.job(blue[1])["error"]["code"] == "cancelled"
        events = [event["type"] for event in http.get(f"/jobs/{blue[1]}/events").json()["data"]]
        assert events == ["state", "state", "done"]
        assert http.post("/jobs/cancel", params={"sweep": 2, "state": "running"}).json()["cancelled"] == 0
        assert http.post("/jobs/cancel", params={"sweep": 2, "state": "queued"}).json()["cancelled"] == 3
        assert states(fresh_site) == {"running": 1, "cancelled": 5}
        assert fresh_site.job(red[0])["state"] == "cancelled"
        for answer in (http.post("/jobs/cancel?sweep=9"), http.delete("/jobs?sweep=9")):
            assert (answer.status_code, answer.json()["detail"]) == (404, "There is no sweep 9.")

    @pytest.mark.parametrize("query", ["", "state=succeeded", "state=", "limit=5", "sweep=x", "label=x", "name="])
    def test_never_all_by_accident(self, site: Any, query: str) -> None:
        job = site.submit()
        response = site.http.post(f"/jobs/cancel?{query}")
        assert response.status_code == 422, response.text
        assert response.json()["errors"]
        assert site.job(job["id"])["state"] == "queued"


def counted(deleted: int, unfinished: int) -> dict[str, int]:
    return {"deleted": deleted, "unfinished": unfinished, "in_baselines": 0}


class TestDelete:
    def test_finished_jobs_are_deleted_and_others_counted(self, fresh_site: Any) -> None:
        http = fresh_site.http
        ids = sweep(fresh_site, 4, colour="blue")
        other = fresh_site.submit()
        fresh_site.worker.finish(fresh_site.worker.claim())
        fresh_site.worker.finish(fresh_site.worker.claim(), "failed")
        assert http.delete("/jobs", params={"label": "colour:red"}).json() == counted(0, 0)
        response = http.delete("/jobs", params={"label": "colour:blue", "state": "failed"})
        assert (response.status_code, response.json()) == (200, counted(1, 0))
        assert http.get(f"/jobs/{ids[1]}").status_code == 404
        assert http.delete("/jobs", params={"sweep": 1}).json() == counted(1, 2)
        assert states(fresh_site) == {"queued": 3}
        assert fresh_site.job(other["id"])["state"] == "queued"

    @pytest.mark.parametrize("query", ["", "state=queued", "state=running", "after=5", "kind=%00"])
    def test_never_all_by_accident(self, site: Any, query: str) -> None:
        job = site.submit()
        site.http.post(f"/jobs/{job['id']}/cancel")
        response = site.http.delete(f"/jobs?{query}")
        assert response.status_code == 422, response.text
        assert site.job(job["id"])["state"] == "cancelled"


def changes_at_once(site: Any) -> int:
    """The most rows that one transaction changes while hundreds of jobs are cancelled and deleted."""
    sweep(site, 600)
    engine, chosen = site.services.database.backend.engine, JobFilter(kind="benchmark")
    total, changes = 0, []

    def begin(connection: Any) -> None:
        nonlocal total
        total = connection.connection.driver_connection.total_changes

    def commit(connection: Any) -> None:
        changes.append(connection.connection.driver_connection.total_changes - total)

    events.listen(engine, "begin", begin)
    events.listen(engine, "commit", commit)
    assert site.services.bulk.cancel(chosen).cancelled == 600
    assert site.services.bulk.delete(chosen).deleted == 600
    events.remove(engine, "begin", begin)
    events.remove(engine, "commit", commit)
    return max(changes)


def test_changing_many_jobs_delays_no_other_writer(fresh_site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE_S", 0.0)  # a slow disk
    # A job has two events and its own row; one more counts the outcomes.
    assert changes_at_once(fresh_site) <= max(
        3 * bulk.CANCELLED_AT_ONCE + 1, deleting.ROWS_AT_ONCE + deleting.JOBS_AT_ONCE
    )
    assert states(fresh_site) == {}


def test_jobs_submitted_meanwhile_stay(fresh_site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "CANCELLED_AT_ONCE", 1)
    first = sweep(fresh_site, 2)
    original, late = fresh_site.services.queue.cancel_some, []

    def cancel_and_submit(job_ids: Any) -> Any:
        late.append(fresh_site.submit()["id"])
        return original(job_ids)

    monkeypatch.setattr(fresh_site.services.queue, "cancel_some", cancel_and_submit)
    assert fresh_site.services.bulk.cancel(JobFilter(kind="benchmark")).cancelled == len(first)
    assert [fresh_site.job(job_id)["state"] for job_id in late] == ["queued", "queued"]


def test_a_server_that_stops_says_that_it_is_not_done(serve: Any, tmp_path: Any) -> None:
    with serve(tmp_path) as site:
        sweep(site, 3)
        site.services.slices.stop()
        for response in (
            site.http.post("/jobs/cancel", params={"kind": "benchmark"}),
            site.http.delete("/jobs", params={"kind": "benchmark"}),
        ):
            assert (response.status_code, response.json()["code"]) == (503, "database_busy")
            assert "repeat the request" in response.json()["detail"]


def test_the_server_prunes_by_itself(serve: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from app.api import services

    monkeypatch.setattr(services, "FIRST_PRUNE_S", 0.0)
    monkeypatch.setattr(services, "PRUNE_S", 0.05)
    with serve(tmp_path, keep_jobs_days=1e-9) as site:
        job = site.run()
        wait_until(lambda: site.http.get(f"/jobs/{job}").status_code == 404, "pruning")
        assert site.job(site.submit()["id"])["state"] == "queued"
