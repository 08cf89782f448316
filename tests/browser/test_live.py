"""Pages that follow what happens, in headless Chromium over a real server, with a worker played by the test."""

import array
import re
import zlib
from dataclasses import replace

import pytest
from playwright.sync_api import Page, expect

from tests.browser.checks import assert_readable
from tests.browser.conftest import PlayedSite
from tests.builders import measured

PHASES = ("forward", "backward", "optimizer", "step")
SAMPLES = array.array("d", [3.0, 1.0, 2.0])


@pytest.fixture
def site(played: PlayedSite) -> PlayedSite:
    return played


@pytest.mark.long
def test_a_running_job_is_followed_to_its_end(site: PlayedSite, page: Page) -> None:
    in_front, job_id = (site.submit()["id"] for _ in range(2))
    page.goto(f"/ui/jobs/{job_id}")
    expect(page.get_by_text("Place 2 in the queue")).to_be_visible()
    page.evaluate("window.loadedOnce = true")
    page.get_by_text("Copy as command").click()
    site.worker.finish(site.worker.claim_job(in_front))
    claim = site.worker.claim_job(job_id)
    site.worker.report(claim, "log", text="first line\n")
    site.worker.report(claim, "progress", done=0, total=2, message="eager")
    expect(page.locator("#live-log")).to_have_text("first line\n")
    site.worker.report(claim, "log", text="<second> line\n")
    expect(page.locator("#live-log")).to_have_text("first line\n<second> line\n")
    site.worker.report(claim, "progress", done=1, total=2, message="tiled")
    expect(page.locator("#running")).to_contain_text("tiled")
    expect(page.locator("#pace")).to_contain_text("each")
    expect(page.locator("#as-command")).to_be_visible()
    assert_readable(page)
    rows = [measured("step_ms", 1.5, model="tiny")]
    site.worker.finish(claim, measurements=rows, log="first line\n<second> line\nlast line\n")
    expect(page.locator("#log")).to_have_text("first line\n<second> line\nlast line\n")
    expect(page.locator("article .state")).to_have_text("succeeded")
    expect(page.get_by_role("button", name="Cancel job")).to_have_count(0)
    expect(page.locator("#as-command")).to_be_visible()
    assert page.evaluate("window.loadedOnce === true")


@pytest.mark.long
def test_from_the_empty_page_to_a_plot_and_a_latex_table(site: PlayedSite, page: Page) -> None:
    page.goto("/")
    expect(page.get_by_text("No worker is connected")).to_be_visible()
    assert_readable(page)
    site.worker.register()
    expect(page.get_by_text("A worker is ready")).to_be_visible()
    page.get_by_role("button", name="Run the demo sweep").click()
    expect(page.locator("h1")).to_contain_text("A first sweep")
    page.get_by_role("link", name="Jobs", exact=True).first.click()
    rows = [measured(f"{phase}_ms", 2.0, model="tiny", context_length=128) for phase in PHASES]
    samples = zlib.compress(SAMPLES.tobytes())
    claim = site.worker.claim()
    site.worker.finish(claim, measurements=[replace(row, n=len(SAMPLES), samples=samples) for row in rows])
    first = page.locator("tr:has(td.id a)").last
    expect(first.locator(".state")).to_have_text("succeeded")
    expect(first).to_contain_text("step_ms")
    first.locator("td.id a").click()
    see_the_results(page)


def see_the_results(page: Page) -> None:
    """A finished job's page has its table, its plot with the same numbers as text, and the table for a paper."""
    expect(page.locator("h1")).to_contain_text("tiny, context_length=128")
    page.get_by_text("Every sample over the steps").click()
    plot = page.locator("#samples-plot .plot")
    expect(plot).to_have_attribute("aria-label", re.compile("^Times of the measured steps"))
    expect(plot.locator(".scatterlayer .trace")).to_have_count(len(PHASES))
    page.locator("#samples-plot summary").click()
    expect(page.locator("#samples-plot .plot-data tbody tr")).to_have_count(len(PHASES) * len(SAMPLES))
    latex = page.get_by_role("link", name="LaTeX").first.get_attribute("href")
    assert latex is not None
    answer = page.request.get(latex)
    assert answer.ok
    assert "\\begin{tabular}" in answer.text()
