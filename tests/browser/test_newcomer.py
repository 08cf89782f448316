"""A newcomer's way, in headless Chromium: from the empty page to numbers of a first sweep, with a worker played by the
test."""

from __future__ import annotations

import array
import re
import zlib
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from playwright.sync_api import Browser, Page, expect

from tests.app.conftest import serving
from tests.browser.checks import assert_readable
from tests.browser.conftest import Watch, watched_page
from tests.builders import measured

PHASES = ("forward", "backward", "optimizer", "step")
SAMPLES = array.array("d", [3.0, 1.0, 2.0])


def test_from_the_empty_page_to_a_plot_and_a_latex_table(tmp_path: Path, chromium: Browser) -> None:
    with (
        serving(tmp_path, lease_s=600) as site,
        watched_page(chromium, site.url, Watch(urlsplit(site.url).netloc)) as page,
    ):
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
