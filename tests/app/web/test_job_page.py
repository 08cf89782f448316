"""One job's page: its place in the queue, its pace, samples, cells, and submitting it once more."""

import array
import html
import re
import zlib
from dataclasses import replace
from typing import Any

import pytest

from app.store.records import UnitRecord
from tests.app.conftest import TINY
from tests.app.web.checker import page

OWN = {"Sec-Fetch-Site": "same-origin"}


def sampled(record: Any, values: list[float]) -> Any:
    return replace(record, n=len(values), samples=zlib.compress(array.array("d", values).tobytes()))


def test_a_queued_job_has_a_place(fresh_site: Any) -> None:
    ids = [fresh_site.submit()["id"] for _ in range(3)]
    fresh_site.worker.register()
    assert "First in the queue" in page(fresh_site, f"/ui/jobs/{ids[0]}").text
    assert "1 job is in front of it" in page(fresh_site, f"/ui/jobs/{ids[1]}").text
    tag = fresh_site.http.get(f"/ui/jobs/{ids[2]}").headers["etag"]
    fresh_site.http.post(f"/jobs/{ids[0]}/cancel")
    again = fresh_site.http.get(f"/ui/jobs/{ids[2]}", headers={"If-None-Match": tag})
    assert "Place 2 in the queue" in again.text, "its place changed though the job did not"


def test_a_running_job_tells_its_pace_and_follows_its_log(fresh_site: Any) -> None:
    job_id = fresh_site.submit()["id"]
    claim = fresh_site.worker.claim_job(job_id)
    fresh_site.worker.report(claim, "progress", done=0, total=2, message="eager, length 8")
    fresh_site.worker.report(claim, "progress", done=1, total=2, message="tiled, length 8")
    fresh_site.worker.report(claim, "log", text="<first line>\n")
    found = page(fresh_site, f"/ui/jobs/{job_id}")
    assert "tiled, length 8" in found.text
    assert " each" in found.text
    assert "<first line>" in found.text
    [stream] = [reference for reference in found.references if "/events?after=" in reference]
    assert fresh_site.http.get(stream).json()["data"] == [], "the log that is shown is not sent again"
    fresh_site.worker.report(claim, "log", text="second line\n")
    assert [event["data"] for event in fresh_site.http.get(stream).json()["data"]] == [{"text": "second line\n"}]


def test_samples_are_a_line_for_each_phase_and_process(fresh_site: Any, measured: Any) -> None:
    rows = [
        sampled(measured(f"{phase}_ms", 1.0, unit_index=unit, length=length), [1.0, 2.0, 3.0 + unit])
        for unit in (0, 1)
        for length in (8, 16)
        for phase in ("forward", "backward")
    ]
    job_id = fresh_site.run(measurements=rows)
    assert "length=16" in fresh_site.http.get(f"/ui/jobs/{job_id}").text
    figure = fresh_site.http.get(f"/ui/jobs/{job_id}/samples", params={"case": rows[2].case_key}).json()
    assert [(trace["name"], trace["x"], trace["y"]) for trace in figure["data"]] == [
        ("forward", [0, 1, 2], [1.0, 2.0, 3.0]),
        ("backward", [0, 1, 2], [1.0, 2.0, 3.0]),
        ("forward, process 2", [0, 1, 2], [1.0, 2.0, 4.0]),
        ("backward, process 2", [0, 1, 2], [1.0, 2.0, 4.0]),
    ]
    assert figure["layout"]["yaxis"]["title"]["text"].lower() == "time (ms)"
    nothing = fresh_site.http.get(f"/ui/jobs/{job_id}/samples?case=unknown").json()
    assert (nothing["data"], nothing["empty"]) == ([], "Nothing was sampled repeatedly.")


def test_a_clone_has_every_option_of_the_job(fresh_site: Any) -> None:
    for timeout_s in ("none", 90.0, None):
        options = {"name": "n", "labels": {"note": "a, b=c", "x": "y"}, "priority": 3, "max_attempts": 5}
        job = fresh_site.submit(**options, timeout_s=timeout_s)
        form = fresh_site.http.get(f"/ui/new?job={job['id']}").text
        found = re.findall(r'name="(option\.\w+)" value="([^"]*)"', form)
        fields = {name: html.unescape(value) for name, value in found}
        answer = fresh_site.http.post("/ui/new", data={"kind": "benchmark", **fields}, headers=OWN)
        clone = fresh_site.job(int(answer.headers["location"].rpartition("/")[2]))
        same = ("name", "labels", "priority", "timeout_s", "max_attempts")
        assert {name: clone[name] for name in same} == {name: job[name] for name in same}
        assert (f"--timeout-s {timeout_s}" in page(fresh_site, f"/ui/jobs/{job['id']}").text) == (timeout_s is not None)


def test_the_form_submits_a_job_or_a_sweep(fresh_site: Any) -> None:
    fields = {"kind": "benchmark", "spec.model.size": ["tiny"], "spec.context_length": "64"}
    answer = fresh_site.http.post("/ui/new", data=fields, headers=OWN)
    assert answer.status_code == 303
    job = fresh_site.job(int(answer.headers["location"].rpartition("/")[2]))
    assert (job["spec"]["model"]["size"], job["spec"]["context_length"]) == ("tiny", 64)
    answer = fresh_site.http.post("/ui/new", data=fields | {"spec.context_length": "64, 128"}, headers=OWN)
    sweep = fresh_site.http.get(answer.headers["location"].removeprefix("/ui")).json()
    assert sweep["grid"] == {"context_length": [64, 128]}
    cloned = page(fresh_site, f"/ui/new?job={job['id']}").text
    assert "flopwatch submit benchmark model.size=tiny context_length=64" in cloned


def test_errors_stand_at_their_fields(fresh_site: Any) -> None:
    fields = {"kind": "benchmark", "spec.context_length": "abc", "spec.batch_size": "0", "option.priority": "5000"}
    before = fresh_site.rows()
    answer = fresh_site.http.post("/ui/new", data=fields, headers=OWN)
    assert answer.status_code == 422
    assert 'value="abc"' in answer.text, "what was typed is kept"
    assert 'id="field-context_length-error-1">Input should be a valid integer' in answer.text
    assert 'id="field-batch_size-error-1">Input should be greater than or equal to 1' in answer.text
    assert 'id="option-priority-error-1"' in answer.text
    assert fresh_site.rows() == before
    text = fresh_site.http.get("/ui/new/preview", params=fields).text
    assert "context_length: Input should be a valid integer" in text


def sent_by_browser(form: str) -> dict[str, list[str]]:
    """What a browser sends of a form's inputs that are hidden, filled in or ticked."""
    fields: dict[str, list[str]] = {}
    for element in re.findall(r"<input [^>]*>", form.partition('id="new"')[2].partition("</form>")[0]):
        name, value = re.search(r' name="([^"]*)"', element), re.search(r' value="([^"]*)"', element)
        if name and value and ('type="checkbox"' not in element or " checked" in element):
            fields.setdefault(name[1], []).append(html.unescape(value[1]))
    return fields


def test_a_comparison_is_submitted_by_fields(fresh_site: Any) -> None:
    form = fresh_site.http.get("/ui/new?kind=compare").text
    answer = fresh_site.http.post("/ui/new", data=sent_by_browser(form), headers=OWN)
    assert answer.status_code == 303, "it can be sent as it is"
    spec = fresh_site.job(int(answer.headers["location"].rpartition("/")[2]))["spec"]
    assert [spec[side]["precision"] for side in ("baseline", "candidate")] == ["fp32", "bf16"]
    assert spec["baseline"]["model"]["size"] == "tiny"

    form = fresh_site.http.get("/ui/new?kind=compare&of=attention").text
    changed = {"spec.candidate.implementations": ["tiled"], "spec.candidate.head_dims": ["16, 32"]}
    fields = sent_by_browser(form) | changed
    answer = fresh_site.http.post("/ui/new", data=fields | {"spec.candidate.batch_size": ["0"]}, headers=OWN)
    assert answer.status_code == 422
    assert 'id="field-candidate-batch_size-error-1">Input should be greater than or equal to 1' in answer.text
    assert 'id="field-baseline-batch_size-error-1"' not in answer.text
    answer = fresh_site.http.post("/ui/new", data=fields, headers=OWN)
    job = fresh_site.job(int(answer.headers["location"].rpartition("/")[2]))
    assert (job["spec"]["candidate"]["implementations"], job["spec"]["candidate"]["head_dims"]) == (["tiled"], [16, 32])
    cloned = sent_by_browser(fresh_site.http.get(f"/ui/new?job={job['id']}").text)
    answer = fresh_site.http.post("/ui/new", data=cloned, headers=OWN)
    assert fresh_site.job(int(answer.headers["location"].rpartition("/")[2]))["spec"] == job["spec"]


@pytest.mark.parametrize(
    "query",
    [
        *("kind=none", "kind=attention&preset=none", "kind=compare&of=none", "kind=compare&of=compare", "job=999999"),
        *("kind=diagnosis&of=attention", "kind=benchmark&of=ddp"),
    ],
)
def test_unknown_kinds_presets_and_jobs_have_no_form(fresh_site: Any, query: str) -> None:
    assert "All jobs" in page(fresh_site, f"/ui/new?{query}", 404).text


def test_every_kind_has_a_form(fresh_site: Any) -> None:
    kinds = {spec["kind"]: spec for spec in fresh_site.http.get("/specs").json()["data"]}
    for kind, spec in kinds.items():
        assert f"flopwatch submit {kind}" in page(fresh_site, f"/ui/new?kind={kind}").text
        for preset in spec["presets"]:
            page(fresh_site, f"/ui/new?kind={kind}&preset={preset}")


@pytest.mark.parametrize("ended", ["succeeded", "failed", "cancelled"])
def test_a_comparison_has_its_sentence_on_the_page_of_its_job(fresh_site: Any, measured: Any, ended: str) -> None:
    """What was measured until somebody ended it is shown, too."""
    site = fresh_site
    site.worker.register(frozenset({"compare", "benchmark"}))
    sides = {side: {**TINY, "seed": seed} for seed, side in enumerate(("baseline", "candidate"))}
    body = {"spec": {"kind": "compare", **sides}, "priority": 99}
    job = site.http.post("/jobs", json=body).raise_for_status().json()["id"]
    claim = site.worker.claim("compare")
    assert claim.job_id == job
    rows = [measured("step_ms", 1.0 + unit, unit_index=unit, model="tiny") for unit in range(2)]
    units = [UnitRecord(unit, "", "succeeded", side=side) for unit, side in enumerate(sides)]
    site.worker.finish(claim, ended, measurements=rows, units=units)
    assert f"/ui/compare?job={job}" in page(site, f"/ui/jobs/{job}").references
    text = site.http.get(f"/ui/jobs/{job}").text
    assert ("by the medians of its processes: as <a" in text) == (ended == "succeeded")
    assert "by the medians of its processes:</p>" not in text
    compared = site.http.get(f"/ui/compare?job={job}").text
    assert (f"job {job} ended before its time" in compared) == (ended != "succeeded")
    assert (f'<a href="/ui/compare?job={job}">comparison</a>' in site.http.get("/ui").text) == (ended == "succeeded")


def test_a_comparison_that_measured_nothing_has_none(fresh_site: Any) -> None:
    spec = {"kind": "compare", "baseline": TINY, "candidate": {**TINY, "seed": 1}}
    job = fresh_site.http.post("/jobs", json={"spec": spec}).raise_for_status().json()["id"]
    fresh_site.http.post(f"/jobs/{job}/cancel").raise_for_status()
    assert f"/ui/compare?job={job}" not in page(fresh_site, f"/ui/jobs/{job}").references
