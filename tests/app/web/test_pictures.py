"""Routes of plots by name: what they list, the figures that clients draw, and the file that needs no server."""

import array
import json
import re
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from app.specs._code import RUNS_CODE
from app.store.reading import members
from flopwatch import Flopwatch
from tests.app.api.test_files import upload
from tests.app.conftest import CAPABILITIES
from tests.app.web.panels.test_panels import finished
from tests.app.web.test_standalone import check, get


@pytest.fixture(scope="module")
def swept(site: Any, measured: Callable[..., Any]) -> Any:
    """The site, whose first sweep has two precisions at three lengths, the last of which ran out of memory in fp32."""
    site.worker.register()
    base = {"kind": "benchmark", "model": {"size": "tiny"}, "precision": "bf16"}
    grid = {"context_length": [16, 32, 64], "precision": ["fp32", "bf16"], "seed": [7]}
    assert site.http.post("/sweeps", json={"base": base, "grid": grid}).status_code == 201
    for length in (16, 32, 64):
        for precision, factor in (("fp32", 2.0), ("bf16", 1.0)):
            case = {"model": "tiny", "context_length": length, "precision": precision}
            found = replace(measured("step_ms", length * factor, **case), n=10)
            if (length, precision) == (64, "fp32"):
                found = replace(found, outcome="oom", median=None, mean=None)
            more = [measured("forward_ms", 1.0, **case)]
            if length == 16:
                more.append(measured("backward_ms", 2.0, **case))
            site.worker.finish(site.worker.claim(), measurements=[found, *more])
    return site


def lines(figure: dict[str, Any]) -> dict[str, list[Any]]:
    return {trace["name"]: trace["y"] for trace in figure["data"]}


def test_a_sweep_has_a_chart_and_a_heat_map(swept: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = get(swept, "/sweeps/1/plots").json()["data"]
    assert [(plot["name"], plot["title"]) for plot in listed] == [
        ("chart", "Step (ms) along context length"),
        ("heat-map", "Step (ms) over context length and precision"),
    ]
    figure = get(swept, listed[0]["url"]).json()
    assert lines(figure) == {"fp32": [32, 64], "bf16": [16, 32, 64], "oom": [0.97]}
    assert figure["title"] == "Step (ms) along context length"
    assert figure["caption"] == "Sweep 1 (benchmark), jobs 1, 2, 3, 4, 5, 6; model.size=tiny, seed=7."
    monkeypatch.setattr("app.web.pictures.MOST_POINTS", 2)
    cut = get(swept, "/sweeps/1/plots/chart").json()["caption"]
    assert cut.startswith("Sweep 1 (benchmark), 6 jobs (what follows is of the first 2); model.size=tiny")
    assert "var(" not in json.dumps(figure), "a client has no style sheet"
    assert figure["data"][0]["line"]["color"] == "#1d5fa8"


def test_a_caption_names_code_of_ones_own_in_short(fresh_site: Any, measured: Callable[..., Any]) -> None:
    revision = {"commit": "c" * 40, "dirty": True, "diff": "1 file changed"}
    code = {"sha256": upload(fresh_site), "function": "make_step", "file": "train.py", "revision": revision}
    base = {"kind": "benchmark", "step_code": code, "precision": "bf16"}
    made = fresh_site.http.post("/sweeps", json={"base": base, "grid": {"arguments.batch_size": [2, 4]}})
    assert made.status_code == 201, made.text
    can = CAPABILITIES | {RUNS_CODE}
    fresh_site.worker.register(capabilities=can)
    for size in (2, 4):
        case = {"model": "make_step@train.py", "arguments.batch_size": size}
        fresh_site.worker.finish(fresh_site.worker.claim(can=can), measurements=[measured("step_ms", 1.0, **case)])
    assert get(fresh_site, "/sweeps/1/plots").json()["data"][0]["title"] == "Step (ms) along batch size"
    caption = get(fresh_site, "/sweeps/1/plots/chart").json()["caption"]
    version = code["sha256"][:8]
    assert f"; step_code=make_step@train.py ({version}), precision=bf16." in caption


def test_a_caption_tells_what_error_bars_are(swept: Any, site: Any, measured: Callable[..., Any]) -> None:
    chart = "/sweeps/1/plots/chart?metric="
    assert "Error bars" not in get(swept, f"{chart}forward_ms").json()["caption"]
    site.http.post("/sweeps", json={"base": {"kind": "benchmark"}, "grid": {"context_length": [16, 32]}})
    for length in (16, 32):
        found = replace(measured("step_ms", 2.0, context_length=length), n=10, median_low=1.0, median_high=3.0)
        site.worker.finish(site.worker.claim(), measurements=[found])
    caption = get(site, "/sweeps/2/plots/chart").json()["caption"]
    assert "Error bars: the 95 % interval" in caption


def test_a_caption_tells_the_latest_jobs_and_their_states(fresh_site: Any, measured: Callable[..., Any]) -> None:
    http, worker = fresh_site.http, fresh_site.worker
    worker.register()
    base = {"kind": "benchmark", "model": {"size": "tiny"}}
    http.post("/sweeps", json={"base": base, "grid": {"context_length": [16, 32, 64]}})
    worker.finish(worker.claim(), measurements=[measured("step_ms", 1.0, context_length=16)])
    worker.finish(worker.claim(), "failed")
    caption = http.get("/sweeps/1/plots/chart").json()["caption"]
    assert caption.endswith("1 of 3 jobs failed; 1 of 3 jobs queued.")
    http.post("/sweeps/1/resume")
    caption = http.get("/sweeps/1/plots/chart").json()["caption"]
    assert caption.startswith("Sweep 1 (benchmark), jobs 1, 3, 4; ")
    assert caption.endswith("; 2 of 3 jobs queued.")


def test_axes_series_and_cases_are_chosen(swept: Any) -> None:
    chart = "/sweeps/1/plots/chart?metric=step_ms"
    along = get(
        swept, f"{chart}&x=precision&group=context_length&where=context_length=16&where=context_length=32"
    ).json()
    assert lines(along) == {"context_length=16": [32, 16], "context_length=32": [64, 32]}
    fields = f"{chart}&x=precisions&group=context_lengths&where=context_lengths=16&where=context_length=32"
    same = get(swept, fields).json() | {"caption": along["caption"]}
    assert same == along, "a swept field's own name stands for its coordinate"
    assert along["caption"].endswith(". Only context_length=16/32.")
    one = get(swept, f"{chart}&where=precision=bf16&group=precision").json()
    assert [trace["y"] for trace in one["data"]] == [[16, 32, 64]]
    related = get(swept, f"{chart}&relative_to=precision=fp32").json()
    assert lines(related) == {"fp32": [1, 1], "bf16": [2, 2], "oom": [0.97], "no reference": [pytest.approx(0.92)]}
    other = get(swept, f"{chart}&relative_to=precision=bf16").json()
    assert lines(other) == {"fp32": [0.5, 0.5], "bf16": [1, 1, 1], "oom": [0.97]}
    assert related["layout"]["yaxis"]["title"]["text"] == "Step speed-up over precision=fp32"
    assert related["layout"]["shapes"][0]["y0"] == 1
    heat = get(swept, "/sweeps/1/plots/heat-map?metric=step_ms&x=precisions&y=context_lengths").json()
    assert heat["data"][0]["z"] == [[32, 16], [64, 32], [None, 64]]


def test_a_metric_that_only_the_first_jobs_measured(swept: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members.metrics, "__defaults__", ((), 1))
    assert lines(get(swept, "/sweeps/1/plots/chart?metric=backward_ms").json()) == {"": [2, 2]}


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/sweeps/1/plots/chart?x=context_length&group=model", 422, "precision varies, too"),
        ("/sweeps/1/plots/chart?group=nose", 422, "These cases have no coordinate 'nose'; there is model"),
        ("/sweeps/1/plots/chart?where=precision=fp8", 422, "of precision there is fp32, bf16"),
        ("/sweeps/1/plots/chart?where=precision", 422, "must be written coordinate=value"),
        ("/sweeps/1/plots/chart?metric=nose", 422, "Nobody has measured 'nose'"),
        ("/sweeps/1/plots/chart?y=context_length", 422, "is for heat-map: leave it out for chart"),
        ("/jobs/1/plots/history?where=precision=bf16", 422, "of precision there is fp32"),
        ("/sweeps/1/plots/heat-map?group=precision", 422, "is for chart: leave it out for heat-map"),
        ("/sweeps/1/plots/roofline", 404, "Sweep 1 has no plot 'roofline'; it has: chart, heat-map."),
        ("/sweeps/9/plots/chart", 404, "no sweep 9"),
        ("/jobs/1/plots/nose", 404, "Job 1 has no plot 'nose'; it has: "),
        ("/jobs/1/plots/heatmap", 404, ". heat-map needs two coordinates that vary."),
        ("/compare/plots/nose?baseline=1&candidate=2", 404, "The comparison has no plot 'nose'; it has: "),
    ],
)
def test_what_is_not_there_is_refused(swept: Any, path: str, status: int, words: str) -> None:
    detail = get(swept, path, status).json()["detail"]
    assert words in detail, detail


def test_the_page_has_the_same_options(swept: Any) -> None:
    page = get(swept, "/ui/plots?sweep=1&metric=step_ms&relative_to=precision=fp32").text
    assert "Step speed-up over precision=fp32 along context length" in page
    assert '<input type="hidden" name="relative_to" value="precision=fp32">' in page, "another choice keeps it"


def test_a_file_needs_no_server(swept: Any) -> None:
    response = get(swept, "/sweeps/1/plots/heat-map?format=html")
    assert response.headers["content-disposition"] == 'inline; filename="flopwatch-sweep-1-heat-map.html"'
    text, [figure] = check(response)
    assert figure["data"][0]["type"] == "heatmap"
    assert "Step (ms) over context length and precision" in text
    assert "jobs 1, 2, 3, 4, 5, 6" in text


def test_two_jobs_compared(swept: Any) -> None:
    figure = get(swept, "/compare/plots/ratios?baseline=1&candidate=2").json()
    assert [trace["type"] for trace in figure["data"]] == ["scatter"]
    assert figure["caption"].startswith("job 2 against job 1 (baseline); ")
    alone = get(swept, "/compare/plots/distributions?baseline=1&candidate=2&metric=step_ms", 404).json()["detail"]
    assert alone.endswith(
        "it has: ratios. distributions needs a metric that both sides have, one of several processes."
    )


def test_a_case_of_several_is_chosen(swept: Any, measured: Callable[..., Any]) -> None:
    site = swept
    found = []
    for precision, value in (("fp32", 4.0), ("bf16", 2.0)):
        samples = zlib.compress(array.array("d", [value, value + 1]).tobytes())
        row = measured("step_ms", value, model="tiny", precision=precision, phase="step")
        found.append(replace(row, n=2, samples=samples, case_key=precision))
    job = site.run(measurements=found)
    names = [plot["name"] for plot in get(site, f"/jobs/{job}/plots").json()["data"]]
    assert {"chart", "samples", "history"} <= set(names)
    samples = f"/jobs/{job}/plots/samples"
    assert get(site, samples).json()["data"][0]["y"] == [4, 5], "the first case"
    chosen = get(site, f"{samples}?where=precision=bf16").json()
    assert chosen["data"][0]["y"] == [2, 3]
    assert chosen["caption"].endswith("The case: tiny, bf16, step.")
    history = f"/jobs/{job}/plots/history"
    assert "choose one of 2 by where, in precision" in get(site, history, 422).json()["detail"]
    assert get(site, f"{history}?where=precision=bf16&metric=step_ms").json()["data"][0]["y"] == [2]


def test_every_plot_of_a_profile(swept, measured, reported) -> None:
    site = swept
    stacks = site.stored(b"step;forward;<built-in> 900\nstep;backward 100\nno stack\n", "stacks.txt")
    classes = reported(
        "classes", [["forward", "matmul", 2.0]], scope="string", **{"class": "string", "total_ms": "number"}
    )
    validity = {"verdict": "suspect", "checks": [{"name": "variation", "ok": False, "verdict": "suspect"}]}
    job = finished(
        site,
        {"kind": "profile", "model": {"size": "tiny"}},
        measurements=[replace(measured("unprofiled_step_ms", 4.0, model="tiny"), n=2)],
        tables=[classes],
        artifacts=[replace(stacks, kind="stacks")],
        validity=validity,
    )
    pytest.importorskip("matplotlib", reason="pip install -e .[dev]")
    spans = [[step, 0, "compute", 0.0, 1.0] for step in (1, 2)]
    columns = {"step": "integer", "rank": "integer", "stream": "string", "start_ms": "number", "end_ms": "number"}
    timed = finished(
        site,
        {"kind": "ddp", "model": {"size": "tiny"}, "device": "cpu"},
        tables=[reported("timeline", spans, **columns)],
    )
    listed = [plot["name"] for plot in get(site, f"/jobs/{job}/plots").json()["data"]]
    assert listed[:2] == ["classes", "flame-graph"]
    for name in listed:
        with Flopwatch(site.url) as flopwatch:
            svg = flopwatch.plot(job, name)
        words = re.findall(r"<!-- (.*?) -->", svg.decode(), flags=re.DOTALL)
        assert any(f"Job {job} (profile); " in text and "suspect: variation" in text for text in words), words
    for number in ("", "-1"):
        assert get(site, f"/jobs/{timed}/plots/timeline{number}").json()["title"].endswith("profiled step 1")
