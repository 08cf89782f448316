"""What several people see of each other: limits of their tokens, places in the queue, and usage."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from app.store import tables
from flopwatch import Flopwatch, WaitTimeout
from tests.app.api.test_access import BOOTSTRAP, bearer, made, refused
from tests.app.conftest import TINY


@pytest.fixture(scope="module")
def shared(serve: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    limits = {"max_running_devices": 2, "max_priority": "submit=0,code=5"}
    with serve(tmp_path_factory.mktemp("shared"), api_token=BOOTSTRAP, **limits) as site:
        site.worker.register(
            frozenset({"benchmark", "collective"}), frozenset({"attention:eager", "model:transformer_lm"})
        )
        yield site


def submit(site: Any, token: str, **body: Any) -> Any:
    return site.http.post("/jobs", json={"spec": TINY, **body}, headers=bearer(token))


@pytest.mark.parametrize(("scope", "highest"), [("submit", 0), ("code", 5), ("admin", None)])
def test_a_scope_has_a_highest_priority(shared: Any, scope: Any, highest: int | None) -> None:
    token = made(shared, f"of {scope}", scope)
    for priority in (-3, 0 if highest is None else highest, 900 if highest is None else 0):
        assert submit(shared, token, priority=priority).status_code == 201
    if highest is not None:
        problem = refused(submit(shared, token, priority=highest + 1), 403, "insufficient_scope")
        assert f"priorities up to {highest} (FLOPWATCH_MAX_PRIORITY)" in problem["detail"]
        sweep = {"base": TINY, "grid": {"seed": [1]}, "priority": highest + 1}
        refused(shared.http.post("/sweeps", json=sweep, headers=bearer(token)), 403, "insufficient_scope")


def test_a_job_that_needs_more_devices_than_its_user_may_hold_is_refused(shared: Any) -> None:
    token = made(shared, "wide", "submit")
    spec = {"kind": "collective", "operations": ["all_reduce"], "size_mb": [1], "backend": "nccl"}
    assert submit(shared, token, spec={**spec, "world_size": 2}).status_code == 201
    problem = refused(submit(shared, token, spec={**spec, "world_size": 4}), 422, "invalid_request")
    assert problem["errors"][0]["pointer"] == "/spec"
    assert "needs 4 devices, and a user's jobs hold at most 2" in problem["errors"][0]["detail"].replace(";", ", and")
    assert submit(shared, BOOTSTRAP, spec={**spec, "world_size": 4}).status_code == 201


def test_places_and_usage_tell_of_shares(serve: Any, tmp_path: Path) -> None:
    with serve(tmp_path / "data", api_token=BOOTSTRAP) as site:
        site.worker.register()
        ada, bob = made(site, "ada", "submit"), made(site, "bob", "submit")
        first = submit(site, ada).json()["id"]
        site.worker.finish(site.worker.claim())
        with site.services.database.write() as connection:  # the first job took a minute
            connection.execute(update(tables.device_use).values(ran_s=60.0, device_s=60.0))
            connection.execute(update(tables.fair_share).values(device_s=60.0))
        ids = [submit(site, ada).json()["id"] for _ in range(3)] + [submit(site, bob).json()["id"] for _ in range(3)]
        site.worker.claim()  # bob's first: ada had a minute
        asked = "&".join(f"job={job_id}" for job_id in ids)
        answer = site.http.get(f"/queue/places?{asked}", headers=bearer(bob)).json()["data"]
        order = [place["id"] for place in answer]
        assert order[:2] == [ids[4], ids[0]]
        assert [place["place"] for place in answer] == [1, 2, 3, 4, 5]
        assert [place["about_s"] for place in answer] == pytest.approx([30, 90, 150, 210, 270])
        usage = site.http.get("/usage", headers=bearer(ada)).json()
        (row,) = usage["data"]
        assert (row["user"], row["kind"], row["device"], row["attempts"]) == ("ada", "benchmark", "CPU", 1)
        assert row["device_hours"] == pytest.approx(1 / 60)
        assert [(one["user"], one["running_devices"], one["queued_jobs"]) for one in usage["now"]] == [
            ("bob", 1, 2),
            ("ada", 0, 3),
        ]
        site.http.delete(f"/jobs/{first}", headers=bearer(ada))
        assert site.http.get("/usage?since=1d", headers=bearer(ada)).json()["data"] == usage["data"]
        assert usage["since"].endswith(":00:00.000000Z"), "the hours that it counts begin"
        assert "submitted_by=bob" in site.http.get("/ui/usage", headers=bearer(ada)).text


def test_waiting_says_how_many_jobs_are_ahead(fresh_site: Any) -> None:
    fresh_site.worker.register(kinds=frozenset({"benchmark", "memory"}))
    fresh_site.submit()
    fresh_site.worker.finish(fresh_site.worker.claim())
    with fresh_site.services.database.write() as connection:  # it took twenty minutes
        connection.execute(update(tables.device_use).values(ran_s=1200.0, device_s=1200.0))
    for _ in range(3):
        fresh_site.submit()
    fresh_site.worker.claim()
    shown: list[str] = []
    with Flopwatch(fresh_site.url) as client, pytest.raises(WaitTimeout):
        client.wait(4, timeout_s=0.2, show=lambda _done, _total, message: shown.append(message))
    assert shown[1].startswith("1 job ahead, about 30 min; no worker that could run it is free now")
    fresh_site.submit(spec={**TINY, "device": "cuda"})
    asked = {"job": [4, 5]}
    known = [one["about_s"] is not None for one in fresh_site.http.get("/queue/places", params=asked).json()["data"]]
    assert known == [True, False], "no connected worker has a GPU"
    last = fresh_site.submit(spec={"kind": "memory"})["id"]
    fresh_site.http.put("/queue/paused", json={"kinds": ["benchmark"]}).raise_for_status()
    assert [one["about_s"] for one in fresh_site.http.get("/queue/places", params=asked).json()["data"]] == [None, None]
    (behind,) = fresh_site.http.get("/queue/places", params={"job": last}).json()["data"]
    assert (behind["place"], behind["about_s"]) == (4, 600), "paused jobs take no time"
