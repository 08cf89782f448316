"""The list of jobs: what it says of each, its filters, what is done with picked jobs, and the first visit."""

import re
from typing import Any

import pytest

from app.presets import DEMO_SWEEPS
from app.web import live
from tests.app.web.checker import page
from tests.builders import measurement

REFRESH = {"HX-Request": "true"}
OWN = {"Sec-Fetch-Site": "same-origin", "Content-Type": "application/x-www-form-urlencoded"}


def post(site: Any, path: str, text: str = "") -> Any:
    return site.http.post(path, content=text, headers=OWN)


def shown(site: Any, query: str) -> list[int]:
    """The ids of the jobs in the list, in order."""
    text = site.http.get(f"/ui?{query}").text
    return [int(number) for number in re.findall(r'<tr id="job-(\d+)"', text)]


@pytest.mark.parametrize("address", ["/ui/", "/ui/jobs"])
def test_addresses_that_others_suggest_lead_to_the_list(fresh_site: Any, address: str) -> None:
    assert fresh_site.http.get(address, follow_redirects=False).headers["location"] == "/ui"


def test_a_first_visit_offers_the_demo(fresh_site: Any) -> None:
    assert "No worker is connected" in page(fresh_site, "/ui").text
    fresh_site.worker.register()
    text = page(fresh_site, "/ui").text
    assert "A worker is ready" in text
    assert "test CPU" in text
    answer = post(fresh_site, "/ui/demo")
    assert answer.status_code == 303
    sweep = fresh_site.http.get(answer.headers["location"].removeprefix("/ui")).json()
    assert (sweep["base"], sweep["grid"]) == tuple(DEMO_SWEEPS["cpu"].values())
    assert "Nothing has been measured here yet" not in page(fresh_site, "/ui").text
    assert fresh_site.http.post("/ui/demo", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403


def test_jobs_of_a_sweep_are_named_by_their_differences(fresh_site: Any) -> None:
    body = {"base": {"kind": "benchmark", "seed": 3}, "grid": {"model.size": ["tiny", "small"], "precision": ["bf16"]}}
    body["name"] = "Sizes"
    sweep = fresh_site.http.post("/sweeps", json=body).json()["id"]
    fresh_site.submit(name="alone")
    found = page(fresh_site, "/ui")
    words = " ".join(found.text.split())
    assert f"Sweep {sweep}: Sizes over model.size" in words
    assert f"/ui/sweeps/{sweep}" in found.references
    assert "alone" in words
    assert re.findall(r'<td class="case">(.*?)</td>', fresh_site.http.get("/ui").text)[1:] == ["small", "tiny"]


def test_a_row_has_duration_verdict_and_metric(fresh_site: Any, measured: Any) -> None:
    ids = [fresh_site.submit()["id"] for _ in range(3)]
    rows = {
        ids[0]: [measured("step_ms", 12.5, model="tiny"), measured("forward_ms", 4.0, model="tiny")],
        ids[1]: [measured("step_ms", value, context_length=length) for value, length in ((1.0, 8), (20.0, 16))],
        ids[2]: [measured("step_ms", None, "oom", model="tiny")],
    }
    for job_id in ids:
        claim = fresh_site.worker.claim_job(job_id)
        fresh_site.worker.finish(claim, measurements=rows[job_id], validity={"verdict": "suspect", "checks": []})
    text = fresh_site.http.get("/ui").text
    shown = dict(zip(reversed(ids), re.findall(r'<td class="keep result">(.*?)</td>', text), strict=True))
    assert shown[ids[0]] == '12.5 ms <br><span class="quiet">step_ms</span>'
    assert shown[ids[1]] == '1 – 20 ms, 2 cases <br><span class="quiet">step_ms</span>'
    assert shown[ids[2]] == '<span class="verdict oom">oom</span>'
    assert text.count('<span class="verdict suspect"') == 3


def test_filters(fresh_site: Any) -> None:
    first = fresh_site.submit(name="Warm-up", labels={"commit": "0123456789abcdef"})["id"]
    second = fresh_site.submit(spec={"context_length": 64})["id"]
    assert shown(fresh_site, "text=warm") == [first]
    assert shown(fresh_site, "text=456789AB") == [first], "a part of a label"
    assert shown(fresh_site, "text=%25") == [], "no wildcard"
    assert second in shown(fresh_site, f"text={second}"), "the id"
    assert (shown(fresh_site, "since=1d"), shown(fresh_site, "until=1d")) == ([second, first], [])
    assert shown(fresh_site, "since=2020-01-01&until=2020-01-02") == []
    assert shown(fresh_site, "text=&since=&until=") == [second, first]
    assert "must be a span" in page(fresh_site, "/ui?since=yesterday", 422).text


def test_picked_jobs_are_cancelled(fresh_site: Any) -> None:
    ids = [fresh_site.submit()["id"] for _ in range(3)]
    answer = post(fresh_site, "/ui/jobs/cancel", f"back=state%3Dqueued&job={ids[0]}&job={ids[2]}")
    assert (answer.status_code, answer.headers["location"]) == (303, "/ui?state=queued")
    assert [fresh_site.job(job_id)["state"] for job_id in ids] == ["cancelled", "queued", "cancelled"]
    outside = post(fresh_site, "/ui/jobs/cancel", f"back=%0d%0aSet-Cookie:x&job={ids[1]}")
    assert outside.headers["location"].startswith("/ui")
    assert "set-cookie" not in outside.headers


@pytest.mark.parametrize("text", ["", "job=x", "job=0"])
def test_nothing_is_cancelled_without_a_job(fresh_site: Any, text: str) -> None:
    job_id = fresh_site.submit()["id"]
    assert post(fresh_site, "/ui/jobs/cancel", text).status_code in (404, 422)
    assert fresh_site.job(job_id)["state"] == "queued"


@pytest.mark.parametrize("path", ["/ui", "/ui/sweeps/1"])
def test_refreshes_share_a_page_that_visits_get_anew(fresh_site, monkeypatch, path) -> None:
    def tag(**headers: str) -> str:
        return str(fresh_site.http.get(path, headers=headers).headers["etag"])

    sweep = {"base": {"kind": "benchmark", "model": {"size": "tiny"}}, "grid": {"seed": [0, 1]}}
    fresh_site.http.post("/sweeps", json=sweep).raise_for_status()
    monkeypatch.setattr(live, "SHARED_S", 60.0)
    refresh, visit = tag(**REFRESH), tag()
    fresh_site.http.post("/sweeps/1/cancel").raise_for_status()
    assert tag() != visit
    assert tag(**REFRESH) == refresh
    assert fresh_site.http.get(path, headers={**REFRESH, "If-None-Match": refresh}).status_code == 304
    monkeypatch.setattr(live, "SHARED_S", 0.0)
    assert tag(**REFRESH) != refresh


def test_a_wrong_result_does_not_headline_the_others_times(fresh_site: Any) -> None:
    site = fresh_site
    site.worker.register()
    rows = [measurement("step_ms", 12.5), measurement("step_ms", None, case_key="other", outcome="wrong")]
    job = site.run(measurements=rows)
    for path in ("/ui", f"/ui/jobs/{job}"):
        text = site.http.get(path).text
        assert '<p class="answer">' not in text
        assert "12.5 ms" not in text
    assert '<span class="verdict wrong">wrong</span>' in site.http.get("/ui").text
