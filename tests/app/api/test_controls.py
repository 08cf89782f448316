"""Controls of jobs and of the queue over HTTP: time limits, retries, pauses, unique keys."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from app.api import events
from app.settings import Settings
from tests.app.api.streams import STREAM, parse_stream, streamed
from tests.app.conftest import TINY


class TestDefaultTimeout:
    @pytest.mark.parametrize(
        ("sent", "kept"),
        [({}, 3600), ({"timeout_s": None}, 3600), ({"timeout_s": 9.5}, 9.5), ({"timeout_s": "none"}, None)],
    )
    def test_of_jobs_and_sweeps(self, site: Any, sent: dict[str, Any], kept: float | None) -> None:
        assert site.submit(**sent)["timeout_s"] == kept
        sweep = site.http.post("/sweeps", json={"base": TINY, "grid": {"seed": [1]}, **sent}).json()
        assert sweep["options"]["timeout_s"] == kept
        [job] = site.http.get(f"/jobs?sweep={sweep['id']}").json()["data"]
        assert job["timeout_s"] == kept

    def test_none_is_longer_than_the_ceiling(self, serve: Any, tmp_path: Path) -> None:
        bodies = {"/jobs": {"spec": TINY}, "/sweeps": {"base": TINY, "grid": {"seed": [1]}}}
        with serve(tmp_path, max_timeout_s=100) as site:
            for (path, body), sent in itertools.product(bodies.items(), (100.5, "none")):
                refused = site.http.post(path, json={**body, "timeout_s": sent})
                assert (refused.status_code, refused.json()["errors"][0]["pointer"]) == (422, "/timeout_s")
                assert "FLOPWATCH_MAX_TIMEOUT_S" in refused.json()["detail"]
            for (path, body), allowed in itertools.product(bodies.items(), ({}, {"timeout_s": 100})):
                site.http.post(path, json={**body, **allowed}).raise_for_status()
            assert {job["timeout_s"] for job in site.http.get("/jobs").json()["data"]} == {100}

    @pytest.mark.parametrize(("setting", "default"), [(" None ", None), ("60", 60.0)])
    def test_the_setting(self, monkeypatch: pytest.MonkeyPatch, setting: str, default: float | None) -> None:
        monkeypatch.setenv("FLOPWATCH_DEFAULT_TIMEOUT_S", setting)
        assert Settings.from_environment().default_timeout_s == default


class TestRetry:
    @pytest.fixture
    def failed(self, site: Any, measured: Any) -> int:
        """A job that failed in its only attempt, with a measurement and a log."""
        job_id = int(site.submit(priority=10, max_attempts=1)["id"])
        claim = site.worker.claim_job(job_id)
        site.worker.finish(claim, "failed", measurements=[measured("step_ms", 1.0)], log="first\n")
        return job_id

    def test_its_life(self, site: Any, failed: int, measured: Any) -> None:
        path = f"/jobs/{failed}"
        tag = site.http.get(path).headers["etag"]
        response = site.http.post(f"{path}/retry")
        assert response.status_code == 202
        job = response.json()
        assert (job["state"], job["attempt"], job["max_attempts"], job["error"]) == ("queued", 1, 2, None)
        changed = site.http.get(path, headers={"If-None-Match": tag})
        assert (changed.status_code, changed.json()) == (200, job)
        again = site.http.post(f"{path}/retry")
        assert (again.status_code, again.json()["code"]) == (409, "conflict")
        site.worker.finish(site.worker.claim_job(failed), measurements=[measured("step_ms", 2.0)], log="second\n")
        assert site.http.post(f"{path}/retry").status_code == 409, "it has succeeded"
        for query, log, mean in (("", "second\n", 2.0), ("?attempt=1", "first\n", 1.0)):
            assert site.http.get(f"{path}/logs{query}").text == log
            assert site.http.get(f"{path}/measurements{query}").json()["rows"][0]["mean"] == mean
        first, second = site.http.get(f"{path}/attempts").json()["data"]
        assert (first["state"], first["error"]["code"], second["state"]) == ("failed", "failed", "succeeded")
        for link in (*first["links"].values(), *second["links"].values()):
            assert site.http.get(link).status_code == 200, link
        assert site.http.get(f"{path}/units?attempt=3").status_code == 404
        assert site.http.get(f"{path}/logs?attempt=0").status_code == 422
        assert site.http.post("/jobs/99999/retry").status_code == 404
        assert site.http.post(f"{path}/retry?x=1").status_code == 422

    @pytest.mark.parametrize("batch", [1, 500])
    def test_a_stream_ends_with_the_last_done(self, site, failed, monkeypatch, batch) -> None:
        """Clients stop at `done`. One that follows a retried job must not stop where the job had failed before."""
        monkeypatch.setattr(events, "BATCH", batch)
        before = streamed(site, failed)
        site.http.post(f"/jobs/{failed}/retry")
        seen = [before[-1][0]]
        site.worker.finish(site.worker.claim_job(failed), "cancelled")
        site.http.post(f"/jobs/{failed}/retry")
        site.worker.finish(site.worker.claim_job(failed))
        listed = site.http.get(f"/jobs/{failed}/events").json()["data"]
        assert [event["type"] for event in listed].count("done") == 3
        whole = streamed(site, failed)
        types = [type_ for _, type_, _ in whole]
        assert (types.count("done"), types[-1]) == (1, "done")
        ends = [data["state"] for _, type_, data in whole if type_ == "state"][2::3]
        assert ends == ["failed", "cancelled", "succeeded"]
        for after in (*seen, whole[2][0]):
            assert streamed(site, failed, **{"Last-Event-ID": str(after)}) == [it for it in whole if it[0] > after]

    def test_control_of_the_last_done(self, site: Any, failed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        site.http.post(f"/jobs/{failed}/retry")
        site.worker.finish(site.worker.claim_job(failed))

        def look(services: Any, job_id: int, after: int) -> Any:
            state, found, following = services.reading.events_page(job_id, after, events.BATCH)
            return state, [(event["id"], events.frame(event)) for event in found], following

        monkeypatch.setattr(events, "_look", look)
        assert [type_ for _, type_, _ in streamed(site, failed)].count("done") == 2

    def test_a_stream_that_saw_it_done_goes_on(self, site: Any, failed: int) -> None:
        done = streamed(site, failed)[-1]
        assert done[1] == "done"
        headers = {**STREAM, "Last-Event-ID": str(done[0])}
        assert site.http.get(f"/jobs/{failed}/events", headers=headers).status_code == 204
        site.http.post(f"/jobs/{failed}/retry")
        with site.http.stream("GET", f"/jobs/{failed}/events", headers=headers) as response:
            stream = parse_stream(response.iter_lines())
            assert next(stream)[1:] == ("state", {"state": "queued", "reason": "retried"})
            claim = site.worker.claim_job(failed)
            assert next(stream)[2]["state"] == "running"
            site.worker.finish(claim)
            assert [type_ for _, type_, _ in stream] == ["state", "done"]

    def test_its_button(self, site: Any, failed: int) -> None:
        page = f"/ui/jobs/{failed}"
        button = f'action="{page}/retry"'
        assert button in site.http.get(page).text
        response = site.http.post(f"{page}/retry")
        assert (response.status_code, response.headers["location"]) == (303, page)
        assert site.job(failed)["state"] == "queued"
        assert button not in site.http.get(page).text
        site.worker.finish(site.worker.claim_job(failed), "cancelled")
        shown = site.http.get(page).text
        assert f'href="/jobs/{failed}/logs?attempt=1"' in shown
        assert "It broke." in shown, "the error of the first attempt"


def test_paused_jobs_wait(fresh_site: Any) -> None:
    job_id = fresh_site.submit()["id"]
    for kinds, reason, shown in (
        (["benchmark"], "its kind is paused", "Paused: benchmark."),
        ("all", "the queue is paused", "Paused: all kinds."),
    ):
        fresh_site.http.put("/queue/paused", json={"kinds": kinds}).raise_for_status()
        assert fresh_site.worker.try_claim() is None
        assert reason in fresh_site.job(job_id)["waiting"]
        assert shown in fresh_site.http.get("/ui").text
    fresh_site.http.put("/queue/paused", json={"kinds": []}).raise_for_status()
    assert "Paused:" not in fresh_site.http.get("/ui").text
    fresh_site.worker.claim_job(job_id)


class TestUniqueKey:
    def test_a_second_job_is_refused(self, site: Any) -> None:
        key = "one of a kind"
        job = site.submit(unique_key=key, priority=10)
        assert job["unique_key"] == key
        response = site.http.post("/jobs", json={"spec": TINY, "unique_key": key})
        assert (response.status_code, response.json()["code"]) == (409, "key_taken")
        assert response.headers["location"] == f"/jobs/{response.json()['job_id']}" == f"/jobs/{job['id']}"
        site.worker.finish(site.worker.claim_job(job["id"]), "failed")
        second = site.submit(unique_key=key)
        refused = site.http.post(f"/jobs/{job['id']}/retry")
        assert (refused.status_code, refused.json()["job_id"]) == (409, second["id"])

    @pytest.mark.parametrize("key", ["", "x" * 201, "two\nlines", 7])
    def test_an_invalid_unique_key_is_refused(self, site: Any, key: Any) -> None:
        response = site.http.post("/jobs", json={"spec": TINY, "unique_key": key})
        assert response.status_code == 422
        assert [error["pointer"] for error in response.json()["errors"]] == ["/unique_key"]

    def test_a_sweep_has_none(self, site: Any) -> None:
        body = {"base": TINY, "grid": {"seed": [1, 2]}, "unique_key": "k"}
        [error] = site.http.post("/sweeps", json=body).json()["errors"]
        assert error["pointer"] == "/unique_key"
