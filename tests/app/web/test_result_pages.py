"""The pages on which results are read, without a browser: what they say, refuse and link to."""

import json
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlencode

import pytest

from app.specs import spec_adapter
from app.store.reading import members
from app.web.pages.compare import MAX_JOBS, distributions
from tests.app.conftest import TINY
from tests.app.web.checker import page
from tests.app.web.test_standalone import figures

GRID = {"precision": ["fp32", "bf16"], "context_length": [64, 128, 256]}


@pytest.fixture(scope="module")
def filled(serve: Any, measured: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A sweep of six jobs, of which one failed and one ran out of memory; three other jobs, of which one is queued."""
    with serve(tmp_path_factory.mktemp("filled"), lease_s=600) as site:
        base = {"kind": "benchmark", "model": {"size": "tiny"}}
        answer = site.http.post("/sweeps", json={"base": base, "grid": GRID, "name": "six", "labels": {"a": "b"}})
        assert answer.status_code == 201, answer.text
        for number in range(6):
            claim = site.worker.claim()
            case = dict(spec_adapter.validate_json(json.dumps(claim.spec)).case().coordinates)
            if number == 1:
                site.worker.finish(claim, "failed")
                continue
            outcome = "oom" if number == 2 else "ok"
            verdict = "suspect" if number == 3 else "valid"
            rows = [
                measured(name, None if outcome == "oom" else float(10 - number), outcome, validity=verdict, **case)
                for name in ("forward_ms", "step_ms")
            ]
            site.worker.finish(claim, measurements=rows, validity={"verdict": verdict, "counts": {verdict: 1}})
        other = site.submit(spec={"context_length": 8})
        site.worker.finish(site.worker.claim(), measurements=[measured("prefill_ms", 3.0, model="tiny")])
        estimate = site.http.post("/jobs", json={"spec": {"kind": "estimate"}}).json()["id"]
        site.http.post(f"/jobs/{estimate}/cancel")
        assert other["id"] == 7
        site.worker.register()
        site.submit()
        yield site


class TestSweeps:
    def test_the_list_says_what_varies_and_how_far_each_is(self, filled: Any) -> None:
        found = page(filled, "/ui/sweeps")
        for text in ("six", "precision fp32, bf16", "context_length 64, 128, 256", "6 of 6", "5 succeeded", "1 failed"):
            assert text in " ".join(found.text.split()), text
        assert "/ui/sweeps/1?state=failed" in found.references

    def test_a_sweep_lists_its_jobs_with_verdicts_and_outcomes(self, filled: Any) -> None:
        text = " ".join(page(filled, "/ui/sweeps/1").text.split())
        for part in ("six", "6 jobs", "Step (ms)", "oom", "suspect", "It broke", "Took", "Resume"):
            assert part in text, part
        assert "Cancel what is left" not in text

    @pytest.mark.parametrize(
        ("query", "jobs"),
        [
            ("", [1, 2, 3, 4, 5, 6]),
            ("?state=failed", [2]),
            ("?state=&sort=-job", [6, 5, 4, 3, 2, 1]),
            ("?sort=context_length", [1, 4, 2, 5, 3, 6]),
            ("?sort=precision", [1, 2, 3, 4, 5, 6]),
            ("?sort=step_ms", [6, 5, 4, 1, 2, 3]),
            ("?sort=state", [2, 1, 3, 4, 5, 6]),
            ("?page=2", []),
        ],
    )
    def test_jobs_are_filtered_sorted_and_paged(self, filled: Any, query: str, jobs: list[int]) -> None:
        text = filled.http.get(f"/ui/sweeps/1{query}").text
        assert [int(number) for number in re.findall(r'<tr id="job-(\d+)">', text)] == jobs

    def test_a_heading_sorts_and_once_more_the_other_way_round(self, filled: Any) -> None:
        for query, order in (("", None), ("?sort=step_ms", "ascending"), ("?sort=-step_ms", "descending")):
            text = filled.http.get(f"/ui/sweeps/1{query}").text
            [(now, following)] = re.findall(r'<th [^>]*class="number"([^>]*)><a href="([^"]+)">Step \(ms\)</a>', text)
            assert (f'aria-sort="{order}"' in now) == (order is not None)
            assert ("sort=-step_ms" in following) == (order == "ascending")
            assert "sort=" in following

    def test_an_unchanged_page_keeps_the_policy_of_plots(self, filled: Any) -> None:
        first = filled.http.get("/ui/sweeps/1")
        again = filled.http.get("/ui/sweeps/1", headers={"If-None-Match": first.headers["etag"]})
        assert again.status_code == 304
        assert again.headers["content-security-policy"] == first.headers["content-security-policy"]
        assert filled.http.get("/ui/sweeps/1?sort=-job", headers={"If-None-Match": first.headers["etag"]}).text


def test_a_sweep_that_has_lost_a_job_can_be_resumed(fresh_site: Any) -> None:
    body = {"base": TINY, "grid": {"context_length": [64, 128], "precision": ["fp32", "bf16"]}}
    body["exclude"] = [{"context_length": 128, "precision": "bf16"}]
    sweep = fresh_site.http.post("/sweeps", json=body).raise_for_status().json()["id"]
    for _ in range(3):
        claim = fresh_site.worker.claim()
        fresh_site.worker.finish(claim)
    resume = f"/ui/sweeps/{sweep}/resume"
    assert resume not in fresh_site.http.get(f"/ui/sweeps/{sweep}").text
    fresh_site.http.delete(f"/jobs/{claim.job_id}").raise_for_status()
    assert resume in fresh_site.http.get(f"/ui/sweeps/{sweep}").text
    assert fresh_site.http.post(resume, headers={"Sec-Fetch-Site": "same-origin"}).status_code == 303
    assert resume not in fresh_site.http.get(f"/ui/sweeps/{sweep}").text


def test_the_cases_of_a_running_sweep_appear_without_a_reload(fresh_site: Any, measured: Any) -> None:
    body = {"base": {"kind": "attention", "implementations": ["eager"]}, "grid": {"num_heads": [1, 2]}, "priority": 77}
    sweep = fresh_site.http.post("/sweeps", json=body).raise_for_status().json()["id"]
    path = f"/ui/tables?sweep={sweep}&panel=true"
    assert path.replace("&", "&amp;") in fresh_site.http.get(f"/ui/sweeps/{sweep}").text
    before = fresh_site.http.get(path).text
    assert "Those of jobs that end appear here" in before
    assert f'hx-get="{path.replace("&", "&amp;")}" hx-trigger="every' in before
    fresh_site.worker.register(frozenset({"attention"}))
    for ended in range(2):
        claim = fresh_site.worker.claim("attention")
        fresh_site.worker.finish(claim, measurements=[measured("forward_ms", 1.0, num_heads=ended + 1)])
        text = fresh_site.http.get(path).text
        assert "<tbody" in text
        assert ("every 3s" in text) == (ended == 0)


def test_a_search_shows_what_fits(filled: Any, measured: Any) -> None:
    body = {"base": TINY, "fit": {"axis": "context_length", "upto": 512, "step": 256}, "priority": 9, "grid": {}}
    answer = filled.http.post("/sweeps", json=body)
    assert answer.status_code == 201, answer.text
    for outcome in ("ok", "oom"):
        claim = filled.worker.claim()
        case = dict(spec_adapter.validate_json(json.dumps(claim.spec)).case().coordinates)
        filled.worker.finish(claim, measurements=[measured("step_ms", {"ok": 1.0}.get(outcome), outcome, **case)])
    text = " ".join(page(filled, f"/ui/sweeps/{answer.json()['id']}").text.split())
    assert "Largest that fits" in text
    assert re.search(r"256 job \d+ 512 job \d+", text), text
    assert "the largest that fits, up to 512" in text


def test_lines_and_a_heat_map_with_the_outcomes(filled: Any) -> None:
    lines, heat = figures(filled.http.get("/ui/plots?sweep=1").text)
    assert [trace["name"] for trace in lines["data"]] == ["fp32", "bf16", "suspect", "failed", "oom"]
    assert lines["layout"]["yaxis"]["title"]["text"] == "Step (ms)"
    assert heat["data"][0]["x"] == ["64", "128", "256"]
    assert lines["data"][0]["customdata"][0][1] == "/ui/jobs/1"


def test_nothing_measured_is_no_error(filled: Any) -> None:
    assert "No results to plot yet" in filled.http.get("/ui/plots?job=9").text
    assert filled.http.get("/ui/plots?job=8").status_code == 200


class TestTables:
    def test_the_form_sends_empty_fields(self, filled: Any) -> None:
        found = page(filled, "/ui/tables?kind=&sweep=1&job=&label=&since=&until=")
        assert "oom" in found.text
        assert "/tables?sweep=1&format=latex" in found.references

    def test_several_ids_in_one_field(self, filled: Any) -> None:
        assert "/tables?job=1&job=4&job=5&format=csv" in page(filled, "/ui/tables?job=1+4,5").references

    def test_it_takes_what_its_exports_take(self, filled: Any) -> None:
        asked = "sweep=1&where=precision%3Dbf16&rename=step_ms%3DTime"
        text = filled.http.get(f"/ui/tables?{asked}").text
        assert (text.count("<td>bf16"), "<td>fp32" in text, ">Time</th>" in text) == (3, False, True)
        assert '<input type="hidden" name="where" value="precision=bf16">' in text

    def test_kinds_that_do_not_go_together_leave_the_form(self, filled: Any) -> None:
        assert "several kinds" in page(filled, "/ui/tables?job=1&job=8").text


class TestCompare:
    def test_each_candidate_against_the_baseline(self, filled: Any) -> None:
        found = page(filled, "/ui/compare?job=1&job=4&job=5&job=1")
        assert "Job 4 against job 1 (baseline)" in found.text
        assert "Job 5 against job 1 (baseline)" in found.text
        assert "inconclusive" in found.text, "one process each"
        assert "<code>flopwatch rerun 1 replicates=8 &amp;&amp; " in filled.http.get("/ui/compare?job=1&job=4").text
        assert "/compare?baseline=1&candidate=4&format=latex" in found.references

    def test_the_corrected_p_stands_beside_the_interval(self, filled: Any, measured: Any) -> None:
        jobs = []
        for factor in (1.0, 2.0):
            rows = [
                measured(metric, factor * (1 + unit / 100), unit_index=unit, model="tiny", context_length=16)
                for metric in ("step_ms", "forward_ms")
                for unit in range(4)
            ]
            jobs.append(filled.run(spec={"context_length": 16}, measurements=rows))
        text = filled.http.get(f"/ui/compare?job={jobs[0]}&job={jobs[1]}").text
        # Of four processes a side that do not overlap p is 2/70. Only the headline is tested.
        assert re.findall(r">p = ([^<]*)<", text) == ["0.0286"]
        assert "finding-worse" in text
        assert "finding-differs" in text
        assert "only where the interval excludes 1 and p, corrected for all cases, is at most 0.05" in text

    def test_a_comparison_in_turns_takes_the_specs_of_two_jobs(self, filled: Any) -> None:
        assert 'formaction="/ui/new/compare"' in filled.http.get("/ui/compare").text
        assert 'action="/ui/new/compare"' in filled.http.get("/ui/new?kind=compare").text
        page(filled, "/ui/new/compare?job=1&job=4")
        form = filled.http.get("/ui/new/compare?job=1&job=4").text
        assert "candidate.precision=bf16" in form
        assert re.search(r'name="spec.candidate.precision" value="bf16" checked', form)
        assert re.search(r'name="spec.baseline.precision" value="fp32" checked', form)
        page(filled, "/ui/new/compare?job=1", 422)
        kinds = page(filled, "/ui/new/compare?job=1&job=8", 422).text
        assert "Both sides of a comparison are of one kind: job 1 is of kind benchmark and 8 is of kind" in kinds
        page(filled, "/ui/new/compare?job=1&job=99999", 404)

    @pytest.mark.parametrize(("other", "why"), [(7, "no case in common"), (8, "of one kind"), (9, "not finished")])
    def test_incomparable_jobs_are_explained(self, filled: Any, other: int, why: str) -> None:
        assert why in page(filled, f"/ui/compare?job=1&job={other}").text
        assert why in page(filled, f"/ui/compare?job=1&job=4&job={other}").text

    @pytest.mark.parametrize("back", ["back=&", "back=sweep%3D1&"])
    def test_the_oldest_picked_job_is_the_baseline(self, filled: Any, back: str) -> None:
        """The list has the newest first, and its form sends them in that order."""
        found = page(filled, f"/ui/compare?{back}job=5&job=4&job=1")
        assert "Job 4 against job 1 (baseline)" in found.text
        assert "Job 5 against job 1 (baseline)" in found.text
        assert "Job 1 against job 5 (baseline)" in page(filled, "/ui/compare?job=5&job=4&job=1").text, "as one asks"

    def test_ids_in_one_field(self, filled: Any) -> None:
        found, plain = page(filled, "/ui/compare?job=1&job=4,5+4"), page(filled, "/ui/compare?job=1&job=4&job=5")
        assert found.references == plain.references


@pytest.mark.parametrize(
    ("path", "status"),
    [
        *((f"sweeps/1?{query}", 422) for query in ("sort=nothing", "state=done", "page=0")),
        *((f"tables?{query}", 422) for query in ("sweep=x", "statistic=mode", "since=x", "nothing=1", "labels=%22a")),
        *(("plots", 422), ("plots?job=99", 404), ("plots?sweep=1&where=x", 422)),
        *(("compare?job=x", 422), ("compare?job=77", 404)),
        (f"compare?{urlencode({'job': range(1, MAX_JOBS + 2)}, doseq=True)}", 422),
    ],
)
def test_bad_queries_are_refused_by_a_page(filled: Any, path: str, status: int) -> None:
    page(filled, f"/ui/{path}", status)


def test_time_left_follows_from_the_last_durations(filled: Any) -> None:
    running = [{"started_at": "2026-01-01T00:00:00Z"}]
    now = members.parsed_time("2026-01-01T00:00:04Z")
    assert members._left(3, running, [10.0, 14.0], now) == 3 * 12 + 8
    assert members._left(3, running * 2, [10.0, 14.0], now) == (3 * 12 + 2 * 8) / 2
    assert members._left(3, running, [2.0], now) == 6, "a job that takes longer than the others is nearly done"
    assert (members._left(3, [], [2.0], now), members._left(3, running, [], now)) == (None, None)


def test_workers_that_stopped_are_hidden_until_asked_for(filled: Any) -> None:
    filled.services.registration.register_worker("old", "old-host", 3, set(), set(), [{"type": "cpu"}], {})
    filled.services.registration.set_worker_state("old", "stopped")
    text = page(filled, "/ui/workers").text
    assert "old-host" not in text
    assert "Show 1 that stopped or was lost" in text
    assert "1 queued job, each with its reason" in text
    assert "old-host" in page(filled, "/ui/workers?gone=true").text


def test_workers_show_what_their_devices_do(fresh_site: Any) -> None:
    gpu = {"type": "cuda", "uuid": "GPU-0", "name": "Test GPU", "memory_mib": 81_920}
    fresh_site.services.registration.register_worker("here", "gpu-host", 7, [], [], [gpu], {})
    busy = {"utilisation_percent": 97, "memory_used_mib": 40_960, "temperature_c": 63, "sm_clock_mhz": 1755}
    device = {"type": "cuda", "uuid": "GPU-0", **busy, "throttling": ["software power cap"]}
    fresh_site.services.queue.renew([], ("here", "active"), {"read_at": "2026-01-01T00:00:00Z", "devices": [device]})
    found = " ".join(page(fresh_site, "/ui/workers").text.split())
    for text in ("gpu-host", "Test GPU", "97 %", "40.0 of 80.0 GiB", "63 °C", "1755 MHz", "software power cap"):
        assert text in found, text


def test_a_plot_of_processes_says_what_each_counts_as_where_all_count_alike() -> None:
    judged = {
        "metric": "step_ms",
        "unit": "ms",
        "statistic": "fastest",
        "baseline": [1.0, 2.0],
        "candidate": [1.0, 2.0],
    }
    rows = [SimpleNamespace(place={"n": n}, judged=SimpleNamespace(**judged, samples=n)) for n in (10, 25)]
    drawn = []
    for shown in (rows[:1], rows):
        comparison = SimpleNamespace(tables=None, distributions=lambda shown=shown: shown)
        found: Any = distributions([{"comparison": comparison, "sides": ("one", "other")}], "step_ms")
        drawn.append(found["by"])
    assert drawn == ["its fastest of 10 samples", "its value"]
