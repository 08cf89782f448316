"""Sweeps that search for the largest value that fits: each result brings the next job, whoever is restarted between."""

import re
from typing import Any

import pytest

from app.specs._code import RUNS_CODE
from tests.app.api.test_files import upload
from tests.app.conftest import CAPABILITIES

BASE = {"kind": "benchmark", "model": {"size": "tiny"}, "context_length": 64}


def submit(site: Any, **body: Any) -> dict[str, Any]:
    fit = {"axis": "context_length", "upto": 1000, "step": 50, **body.pop("fit", {})}
    return dict(site.http.post("/sweeps", json={"base": BASE, "fit": fit, **body}).raise_for_status().json())


def sweep_of(site: Any, sweep: dict[str, Any]) -> dict[str, Any]:
    return dict(site.http.get(f"/sweeps/{sweep['id']}").json())


def finish(site, measured, limits, axis="context_length", number=1000, validity=None) -> int:
    """Play the worker: jobs of each size run out of memory above its limit. Returns how many jobs it ran."""
    done = 0
    while done < number:
        if (claim := site.worker.try_claim()) is None:
            break
        fits = claim.spec[axis] <= limits[claim.spec["model"]["size"]]
        row = measured("step_ms", 1.0 if fits else None, "ok" if fits else "oom", length=claim.spec[axis])
        unknown = measured("host_us", None, "unknown", length=claim.spec[axis])
        site.worker.finish(claim, measurements=[row, unknown], validity=validity)
        done += 1
    return done


def test_a_search_ends_at_the_largest_that_fits(fresh_site: Any, measured: Any) -> None:
    sweep = submit(fresh_site, name="longest")
    assert (sweep["fit"]["start"], sweep["counts"]["queued"]) == (50, 1)
    (search,) = sweep_of(fresh_site, sweep)["searches"]
    assert (search["state"], search["largest"], search["point"]) == ("searching", None, {})
    finish(fresh_site, measured, {"tiny": 620})
    found = sweep_of(fresh_site, sweep)
    (search,) = found["searches"]
    assert (search["state"], search["largest"], search["too_large"]) == ("done", 600, 650)
    assert [one["value"] for one in search["tried"]] == [50, 100, 200, 400, 800, 600, 700, 650]
    values = sorted(one["value"] for one in search["tried"])
    rows = fresh_site.http.get(f"/tables?sweep={sweep['id']}").json()["rows"]
    assert [row["length"] for row in rows] == values
    shown = fresh_site.http.get(f"/ui/sweeps/{sweep['id']}").text
    assert [int(cell) for cell in re.findall(r'data-head="context_length">(\d+)<', shown)] == values
    job = fresh_site.http.get(f"/jobs/{search['largest_job']}").json()
    assert (job["name"], job["state"]) == ("longest: context_length=600", "succeeded")
    assert (found["counts"]["succeeded"], found["counts"]["queued"]) == (len(search["tried"]), 0)


def test_a_dry_run_reports_the_most_jobs_and_what_has_no_effect(site: Any) -> None:
    fit = {"axis": "context_length", "upto": 1024, "start": 64}
    grid = {"precision": ["fp32", "bf16"], "checkpoint_layers": [1]}
    dry = site.http.post("/sweeps?dry_run=true", json={"base": BASE, "grid": grid, "fit": fit}).json()
    assert dry == {"jobs": 2, "most_jobs": 2 * (1 + 4 + 5), "without_effect": ["checkpoint_layers"]}
    partly = {"base": BASE, "grid": {"checkpoint_layers": [1], "activation_checkpointing": [False, True]}}
    assert site.http.post("/sweeps?dry_run=true", json=partly).json()["without_effect"] == []
    dry = site.http.post("/jobs?dry_run=true", json={"spec": {**BASE, "new_tokens": 8}}).json()
    assert dry == {"jobs": 1, "most_jobs": 1, "without_effect": ["new_tokens"]}


def test_a_grid_has_a_search_for_each_point(fresh_site: Any, measured: Any, monkeypatch: Any) -> None:
    sweep = submit(fresh_site, grid={"model.size": ["tiny", "small"]}, fit={"step": 100})
    finish(fresh_site, measured, {"tiny": 5000, "small": 250})
    searches = sweep_of(fresh_site, sweep)["searches"]
    assert [(one["point"], one["largest"], one["too_large"]) for one in searches] == [
        ({"model.size": "tiny"}, 1000, None),
        ({"model.size": "small"}, 200, 300),
    ]
    rows = fresh_site.http.get(f"/tables?sweep={sweep['id']}").json()["rows"]
    sizes = ["tiny", "small"]
    jobs = {job["id"]: job for job in fresh_site.http.get("/jobs?limit=100").json()["data"]}
    places = [(sizes.index(jobs[row["job"]]["spec"]["model"]["size"]), row["length"]) for row in rows]
    assert places == sorted(places), "search by search, each by the values tried"
    monkeypatch.setattr("app.web.pages.tables.ROWS_PER_PAGE", 4)
    page = fresh_site.http.get(f"/ui/tables?sweep={sweep['id']}&panel=true").text
    assert [int(job) for job in re.findall(r'/ui/jobs/(\d+)"', page)] == [row["job"] for row in rows[:4]]
    assert searches[0]["reason"] == "Every value up to 1000 that was tried fits."


@pytest.mark.parametrize(
    ("step", "expected"),
    [(None, (304, 320, "Sought to 6 %; with `step` 1 (`--multiple-of 1`) it is exact.", 8)), (1, (310, 311, None, 12))],
)
def test_without_a_step_a_search_ends_near_the_limit_and_says_so(fresh_site, measured, step, expected) -> None:
    sweep = submit(fresh_site, fit={"step": step})
    jobs = finish(fresh_site, measured, {"tiny": 310})
    (search,) = sweep_of(fresh_site, sweep)["searches"]
    assert (search["largest"], search["too_large"], search["reason"], jobs) == expected


def test_an_estimate_is_exact_without_a_step(site: Any) -> None:
    fit = {"axis": "batch_size", "upto": 4096}
    made = site.http.post("/sweeps", json={"base": {**BASE, "kind": "estimate"}, "fit": fit}).raise_for_status().json()
    assert made["fit"]["coarse"] is False


@pytest.mark.parametrize(("check", "tells"), [("updates", True), ("variation", False)])
def test_the_answer_carries_a_doubt_about_memory_only(fresh_site: Any, measured: Any, check: str, tells: bool) -> None:
    failed = {"name": check, "ok": False, "detail": "another step needs more", "severity": "suspect"}
    sweep = submit(fresh_site)
    finish(fresh_site, measured, {"tiny": 5000}, validity={"verdict": "suspect", "checks": [failed, failed]})
    (search,) = sweep_of(fresh_site, sweep)["searches"]
    doubt = f" Job {search['largest_job']} may need more memory than it measured: another step needs more."
    assert search["reason"] == "Every value up to 1000 that was tried fits." + doubt * tells


def test_nothing_fits(fresh_site: Any, measured: Any) -> None:
    sweep = submit(fresh_site)
    finish(fresh_site, measured, {"tiny": 0})
    (search,) = sweep_of(fresh_site, sweep)["searches"]
    assert (search["state"], search["largest"], search["too_large"]) == ("done", None, 50)
    says = f"job {search['too_large_job']} says what it lacks"
    assert search["reason"] == f"Not even the smallest value, 50, fits: {says}."


@pytest.mark.parametrize("ended", ["failed", "cancelled"])
def test_a_failed_job_stops_the_search_until_it_is_resumed(fresh_site: Any, measured: Any, ended: str) -> None:
    sweep = submit(fresh_site)
    assert finish(fresh_site, measured, {"tiny": 300}, number=2) == 2
    running = fresh_site.worker.claim()
    if ended == "cancelled":
        fresh_site.http.post(f"/sweeps/{sweep['id']}/cancel").raise_for_status()
    assert fresh_site.worker.finish(running, "failed", measurements=[measured("step_ms", 1.0, length=200)]) == ended
    (search,) = sweep_of(fresh_site, sweep)["searches"]
    assert search["state"] == "stopped"
    assert ("has failed: see why, and resume the sweep" in search["reason"]) == (ended == "failed")
    assert finish(fresh_site, measured, {"tiny": 300}) == 0
    fresh_site.http.post(f"/sweeps/{sweep['id']}/resume").raise_for_status()
    finish(fresh_site, measured, {"tiny": 300})
    (search,) = sweep_of(fresh_site, sweep)["searches"]
    assert (search["state"], search["largest"], search["too_large"]) == ("done", 300, 350)
    assert fresh_site.http.post(f"/sweeps/{sweep['id']}/resume").status_code == 409


def test_a_deleted_job_is_measured_again(fresh_site: Any, measured: Any) -> None:
    sweep = submit(fresh_site)
    finish(fresh_site, measured, {"tiny": 300})
    job = sweep_of(fresh_site, sweep)["searches"][0]["too_large_job"]
    fresh_site.http.delete(f"/jobs/{job}").raise_for_status()
    assert sweep_of(fresh_site, sweep)["searches"][0]["state"] == "stopped"
    fresh_site.http.post(f"/sweeps/{sweep['id']}/resume").raise_for_status()
    assert finish(fresh_site, measured, {"tiny": 300}) == 1
    assert sweep_of(fresh_site, sweep)["searches"][0]["too_large"] == 350


def test_an_argument_of_ones_own_step_is_searched(fresh_site: Any, measured: Any) -> None:
    code = {"sha256": upload(fresh_site), "function": "make_step", "file": "train.py"}
    base = {"kind": "benchmark", "step_code": code, "arguments": {"context": 64}, "device": "cpu"}
    body = {"base": base, "fit": {"axis": "arguments.context", "upto": 256, "step": 64}}
    sweep = fresh_site.http.post("/sweeps", json=body).raise_for_status().json()
    for context, outcome in ((64, "ok"), (128, "ok"), (256, "oom"), (192, "ok")):
        claim = fresh_site.worker.claim(can=CAPABILITIES | {RUNS_CODE})
        assert claim.spec["arguments"] == {"context": context}
        value = 1.0 if outcome == "ok" else None
        fresh_site.worker.finish(claim, measurements=[measured("step_ms", value, outcome, size=context)])
    (search,) = sweep_of(fresh_site, sweep)["searches"]
    assert (search["largest"], search["too_large"]) == (192, 256)


def test_a_value_that_the_spec_does_not_take_stops_the_search(fresh_site: Any, measured: Any) -> None:
    """d_model has to be a multiple of twice the number of heads."""
    base = {**BASE, "model": {"size": "tiny"}}
    body = {"base": base, "fit": {"axis": "model.d_model", "upto": 512, "step": 4, "start": 128}}
    sweep = fresh_site.http.post("/sweeps", json=body).raise_for_status().json()
    for outcome in ("ok", "oom", "oom"):  # 128 and 256, then 192, and then 160 and so on
        claim = fresh_site.worker.claim()
        fresh_site.worker.finish(claim, measurements=[measured("step_ms", None, outcome, size=claim.job_id)])
    claim = fresh_site.worker.claim()
    assert claim.spec["model"]["d_model"] == 160
    for _ in range(3):
        fresh_site.worker.finish(claim, measurements=[measured("step_ms", 1.0, size=claim.job_id)])
        if (next_claim := fresh_site.worker.try_claim()) is None:
            break
        claim = next_claim
    (search,) = sweep_of(fresh_site, sweep)["searches"]
    assert (search["state"], search["resumable"]) == ("stopped", False)
    assert "is not valid, and a coarser step may help" in search["reason"]
    assert "Resume" not in search["reason"]
    answer = fresh_site.http.post(f"/sweeps/{sweep['id']}/resume")
    assert (answer.status_code, "a coarser step may help" in answer.json()["detail"]) == (409, True)


def test_unclear_results_stop_the_search(fresh_site: Any, measured: Any) -> None:
    sweep = submit(fresh_site)
    claim = fresh_site.worker.claim()
    fresh_site.worker.finish(claim, measurements=[measured("step_ms", None, "unsupported")])
    (search,) = sweep_of(fresh_site, sweep)["searches"]
    assert (search["state"], search["resumable"]) == ("stopped", False)
    assert f"Job {claim.job_id} (context_length 50) succeeded" in search["reason"]
    assert "delete that job and resume the sweep" in search["reason"]
    address = f"/sweeps/{sweep['id']}"
    assert fresh_site.http.post(f"{address}/resume").status_code == 409
    assert f"/ui{address}/resume" not in fresh_site.http.get(f"/ui{address}").text
    fresh_site.http.delete(f"/jobs/{claim.job_id}").raise_for_status()
    assert f"/ui{address}/resume" in fresh_site.http.get(f"/ui{address}").text
    fresh_site.http.post(f"{address}/resume").raise_for_status()
    finish(fresh_site, measured, {"tiny": 300})
    assert sweep_of(fresh_site, sweep)["searches"][0]["largest"] == 300


@pytest.mark.parametrize(
    ("body", "pointer", "words"),
    [
        ({"fit": {"axis": "context_lengthh"}}, "/fit/axis", "no field context_lengthh; did you mean context_length?"),
        ({"fit": {"axis": "model.siz"}}, "/fit/axis", "no field model.siz; did you mean size?"),
        ({"fit": {"axis": "precision"}}, "/fit/axis", "takes integers"),
        ({"fit": {"axis": "checkpoint_layers", "step": 1, "upto": 2}}, "/fit/axis", "Changes nothing"),
        ({"fit": {"axis": "seed", "step": 1, "upto": 2}}, "/fit/axis", "Changes nothing"),
        ({"fit": {"upto": 2_000_000}}, "/fit/upto", "context_length takes at most 1048576"),
        ({"fit": {"upto": 10}}, "/fit/upto", "no multiple of step"),
        ({"fit": {"start": 5000}}, "/fit/start", "must not exceed"),
        ({"grid": {"context_length": [1, 2]}}, "/fit/axis", "The grid sets it"),
        ({"grid": {"seed": list(range(101))}}, "/grid", "at most 100"),
        ({"fit": {"uptoo": 3}}, "/fit/uptoo", "did you mean upto?"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_an_invalid_body_is_refused_with_a_pointer(site: Any, body: dict[str, Any], pointer: str, words: str) -> None:
    fit = {"axis": "context_length", "upto": 1000, "step": 50, **body.get("fit", {})}
    answer = site.http.post("/sweeps", json={"base": BASE, **body, "fit": fit})
    assert answer.status_code == 422
    assert (answer.json()["errors"][0]["pointer"], words in answer.json()["errors"][0]["detail"]) == (pointer, True)


def test_a_sweep_without_grid_and_search_is_refused(site: Any) -> None:
    assert site.http.post("/sweeps", json={"base": BASE}).json()["errors"][0]["pointer"] == "/grid"
