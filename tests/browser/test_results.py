"""The pages on which results are read: a sweep with its plots and its table, a comparison, tables, workers.

A server in this process, with results that the test makes up: what is drawn does not depend on a real worker.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from app.specs import spec_adapter
from app.store.records import UnitRecord
from tests.app.conftest import Site, reported
from tests.app.web.panels.test_panels import diagnosed
from tests.browser.checks import assert_fits, assert_readable, at_both_widths
from tests.browser.conftest import PlayedSite, Watch, watched_page
from tests.builders import measured

__all__ = ["reported"]

PROCESSES = 8
LENGTHS = (128, 256, 512)


@pytest.fixture
def site(played: PlayedSite) -> PlayedSite:
    return played


def finish(site: Site, *, factor: float = 1.0, outcome: str = "ok", torch: str = "2.13", validity="valid") -> int:
    """Play the worker: finish the next job with a case that follows from its spec."""
    claim = site.worker.claim()
    spec = claim.spec
    case = dict(spec_adapter.validate_json(json.dumps(spec)).case().coordinates)
    ms = factor * spec["context_length"] / 64 * (0.5 if spec["precision"] == "bf16" else 1.0)
    rows = []
    for unit in range(PROCESSES):
        for metric, share in (("forward_ms", 0.4), ("step_ms", 1.0)):
            value = None if outcome != "ok" else share * ms * (1 + 0.002 * unit)
            rows.append(measured(metric, value, outcome, unit_index=unit, validity=validity, **case))
    environment = {"torch": torch, "gpu": "Test GPU"}
    verdict = {"verdict": validity, "counts": {validity: 1}, "checks": []}
    units = [UnitRecord(unit, f"replicate {unit}", "succeeded", environment=environment) for unit in range(PROCESSES)]
    site.worker.finish(claim, measurements=rows, units=units, environment=environment, validity=verdict)
    return int(claim.job_id)


def submit_sweep(site: Site, lengths: Sequence[int] = LENGTHS) -> int:
    base = {"kind": "benchmark", "model": {"size": "tiny"}, "replicates": PROCESSES}
    grid = {"precision": ["fp32", "bf16"], "context_length": list(lengths)}
    answer = site.http.post("/sweeps", json={"base": base, "grid": grid, "name": "lengths", "labels": {"a": "a" * 60}})
    assert answer.status_code == 201, answer.text
    return int(answer.json()["id"])


def drawn(page: Page, caption: str) -> Any:
    """The figure with this caption, once Plotly has drawn it."""
    figure = page.locator("figure", has_text=caption).first
    figure.scroll_into_view_if_needed()
    expect(figure).to_have_attribute("data-drawn", "yes")
    assert_stays_here(page, figure)
    return figure


def assert_stays_here(page: Page, figure: Locator) -> None:
    """No button of a plot offers to upload it, and none opens a window or a dialog. The watch knows all requests."""
    buttons = figure.locator(".modebar-btn")
    expect(buttons).not_to_have_count(0)
    titles = [button.get_attribute("data-title") or "" for button in buttons.all()]
    assert not [title for title in titles if re.search("share|cloud|chart studio|upload|send", title, re.IGNORECASE)]


def test_the_life_of_a_sweep(site: PlayedSite, page: Page) -> None:
    sweep = submit_sweep(site)
    page.goto("/ui/sweeps")
    page.get_by_role("link", name="lengths").click()
    expect(page.locator("#plots")).to_contain_text("No results to plot yet")
    page.locator("#sweep-spec summary").click()
    for number in range(5):
        finish(site, outcome="oom" if number == 2 else "ok", validity="suspect" if number == 1 else "valid")
    expect(page.locator("#live")).to_contain_text("5 succeeded")
    expect(page.locator("#sweep-spec")).to_have_attribute("open", "")
    table = page.get_by_role("region", name="Jobs of the sweep")
    expect(table.locator(".oom")).to_have_count(2)
    expect(table.locator(".suspect")).to_have_count(1)

    page.once("dialog", lambda dialog: dialog.dismiss())
    page.get_by_role("button", name="Cancel what is left").click()
    expect(page.locator("#live")).to_contain_text("1 queued")
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Cancel what is left").click()
    expect(page.locator("#live")).to_contain_text("1 cancelled")
    page.get_by_role("button", name="Resume").click()
    expect(page.locator("#live")).to_contain_text("1 queued")
    finish(site)
    expect(page.locator("#live")).to_contain_text("6 succeeded")

    lines = drawn(page, "Step (ms) along context length")
    expect(lines.locator(".legendtext")).to_have_text(["fp32", "bf16", "suspect", "oom"])
    assert lines.locator(".errorbars, .errorbar").count() > 0
    lines.locator("summary").click()
    expect(lines.locator(".plot-data tbody tr")).to_have_count(len(LENGTHS) * 2)
    drawn(page, "Step (ms) over context length")
    page.locator("#plots-form select[name=metric]").select_option("forward_ms")
    drawn(page, "Forward (ms) along context length")
    assert_readable(page)

    assert page.locator("#table").count() == 0, "one table"
    page.get_by_role("button", name="Table and pivot").or_(page.get_by_role("link", name="Table and pivot")).click()
    panel = page.locator("#table")
    panel.locator("#table-pivot").select_option("context_length")
    expect(panel.locator("thead")).to_contain_text(str(LENGTHS[-1]))
    panel.locator("#table-relative").select_option("precision=fp32")
    expect(panel.locator("table")).to_contain_text("2.00×")
    with page.expect_download() as downloading:
        panel.get_by_role("button", name="LaTeX").or_(panel.get_by_role("link", name="LaTeX")).click()
    latex = downloading.value.path().read_text()
    assert r"\toprule" in latex
    assert "Context length" in latex
    page.goto(f"/ui/sweeps/{sweep}")
    table.locator("tbody a").first.click()
    expect(page).to_have_url(re.compile(r"/ui/jobs/\d+$"))


def test_a_plot_is_drawn_once_has_labels_and_reaches_no_other_host(site: PlayedSite, page: Page) -> None:
    sweep = submit_sweep(site, LENGTHS[:2])
    for _ in range(4):
        finish(site)
    page.goto(f"/ui/sweeps/{sweep}")
    figure = drawn(page, "Step (ms) along context length")
    for width, scheme in ((390, "dark"), (1400, "light"), (390, "dark"), (1400, "light")):
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
    expect(figure).to_have_attribute("data-drawn", "yes")
    page.wait_for_load_state("networkidle")
    expect(figure.locator(".plot")).to_have_count(1)
    expect(figure.locator(".plot-data")).to_have_count(1)

    figure.get_by_label("logarithmic y").check()
    labels = figure.locator(".ytick text")
    expect(labels.nth(1)).to_be_visible()
    values = page.evaluate("() => document.querySelector('#figure-chart .plot').data.flatMap((trace) => trace.y)")
    assert max(values) < 10 * min(values), "no power of ten"
    assert all(re.fullmatch(r"[\d.,]+", text) for text in labels.all_text_contents())

    figure.hover()
    for button in figure.locator(".modebar-btn:not([data-title*=Download])").all():
        button.click()
        assert figure.locator("[class*=dialog]").count() == 0
    assert len(page.context.pages) == 1


@pytest.mark.long
def test_jobs_are_compared_and_the_first_is_the_baseline(site: PlayedSite, page: Page) -> None:
    jobs = []
    for precision, factor, torch in (("fp32", 1.0, "2.13"), ("bf16", 1.0, "2.13"), ("fp32", 1.5, "2.12")):
        site.submit(spec={"context_length": 256, "precision": precision, "replicates": PROCESSES})
        jobs.append(finish(site, factor=factor, torch=torch))

    page.goto("/ui")
    for job in jobs[:2]:
        page.locator(f"input[name=job][value='{job}']").check()
    expect(page.locator("#picked output")).to_have_text(f"2 picked; to compare, {jobs[0]} is the baseline")
    expect(page.get_by_role("button", name="Cancel jobs")).to_be_disabled()  # they have ended
    page.get_by_role("button", name="Compare", exact=True).click()
    expect(page.locator(".sentence")).to_have_count(1)
    expect(page.locator("main")).to_contain_text("precision=fp32 → bf16")
    page.goto("/ui/compare")
    expect(page.locator("main")).to_contain_text("The oldest selected job is the baseline")
    page.get_by_label("Baseline, a job").fill(str(jobs[0]))
    page.get_by_label("Candidate, another job").fill(" ".join(map(str, jobs[1:])))
    page.get_by_role("button", name="Compare their results").click()
    expect(page.locator(".sentence").nth(0)).to_contain_text("2.00× faster")
    expect(page.locator(".sentence").nth(1)).to_contain_text("slower")
    figure = drawn(page, "one dot for each process")
    expect(figure.locator(".legendtext")).to_have_text(
        [f"job {jobs[0]} (baseline)", f"job {jobs[1]}", f"job {jobs[2]}"]
    )
    page.locator("#metric").select_option("forward_ms")
    drawn(page, "Forward (ms): one dot")
    drawn(page, "Candidate / baseline of each metric")
    expect(page.locator("main")).to_contain_text("2.12")
    assert_readable(page)


@pytest.mark.long
def test_plots_as_files_need_no_server(site: PlayedSite, chromium: Browser, tmp_path: Path) -> None:
    sweep = submit_sweep(site)
    for _ in range(2 * len(LENGTHS)):
        finish(site)
    watch = Watch("")  # files have no host
    with watched_page(chromium, tmp_path.as_uri(), watch) as page:
        page.context.set_offline(True)
        for plot, title in (("chart", "Step (ms) along context length"), ("heat-map", "Step (ms) over context length")):
            path = f"/sweeps/{sweep}/plots/{plot}?format=html"
            (tmp_path / "plot.html").write_text(site.http.get(path).raise_for_status().text)
            page.goto((tmp_path / "plot.html").as_uri())
            expect(page.locator("h1")).to_contain_text(title)
            expect(page.locator(".main-svg").first).to_be_visible()
            assert_fits(page)
        assert_readable(page)
        page.get_by_text("Numbers of this plot").first.click()
        assert page.evaluate("() => 'Plotly' in window")


def test_a_diagnosis_with_its_answer_waterfall_and_changes(site: PlayedSite, page: Page, reported: Any) -> None:
    page.goto(f"/ui/jobs/{diagnosed(site, reported)}")
    expect(page.locator("#answer-answer")).to_contain_text("1  optimizer  40 ms")
    expect(page.locator("#panel-waterfall figure")).to_have_attribute("data-drawn", "yes")
    page.locator("#panel-changes > summary").click()
    expect(page.locator("#panel-changes figure")).to_have_attribute("data-drawn", "yes")
    for name in ("losers", "untried", "panel-gaps"):
        page.locator(f"#{name} > summary").click()
    expect(page.locator("#panel-gaps")).to_contain_text("sgemm")
    for _scheme in at_both_widths(page):
        wide = page.locator("#answer-answer .scroll").evaluate("it => it.scrollWidth - it.clientWidth")
        assert wide == 0, "the answer is wrapped"
    assert_readable(page)
