"""A newcomer's way, in headless Chromium: from the empty page to numbers of a first sweep."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.acceptance.conftest import environment
from tests.browser.checks import assert_readable
from tests.browser.conftest import Watch, watched_page
from tests.forked import ForkedService
from tools.service import Service

pytestmark = pytest.mark.acceptance

LONG_MS = 120_000


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[Service]:
    """A server on which nobody has done anything yet, without a worker."""
    with ForkedService(tmp_path / "service", environment(tmp_path)) as service:
        service.start_server()
        try:
            yield service
        finally:
            print(service.logs()[-20_000:])


def test_from_the_empty_page_to_a_plot_and_a_latex_table(empty: Service, chromium: Browser) -> None:
    with watched_page(chromium, empty.url, Watch(urlsplit(empty.url).netloc)) as page:
        page.goto("/")
        expect(page.get_by_text("No worker is connected")).to_be_visible()
        assert_readable(page)
        empty.start_worker(UNITS="forked")
        expect(page.get_by_text("A worker is ready")).to_be_visible()
        page.get_by_role("button", name="Run the demo sweep").click()
        expect(page.locator("h1")).to_contain_text("A first sweep")
        page.get_by_role("link", name="Jobs", exact=True).first.click()
        first = page.locator("tr:has(td.id a)").last
        expect(first.locator(".state")).to_have_text("succeeded", timeout=LONG_MS)
        expect(first).to_contain_text("step_ms")
        client = empty.client()
        client.post("/jobs/cancel", params={"state": "queued"}).raise_for_status()  # one job suffices
        first.locator("td.id a").click()
        see_the_results(page)


def see_the_results(page: Page) -> None:
    """A finished job's page has its table, its plot with the same numbers as text, and the table for a paper."""
    expect(page.locator("h1")).to_contain_text("tiny, context_length=128")
    page.get_by_text("Every sample over the steps").click()
    plot = page.locator("#samples-plot .plot")
    expect(plot).to_have_attribute("aria-label", re.compile("^Times of the measured steps"))
    expect(plot.locator(".scatterlayer .trace")).to_have_count(4)
    page.locator("#samples-plot summary").click()
    expect(page.locator("#samples-plot .plot-data tbody tr")).to_have_count(24)
    latex = page.get_by_role("link", name="LaTeX").first.get_attribute("href")
    assert latex is not None
    answer = page.request.get(latex)
    assert answer.ok
    assert "\\begin{tabular}" in answer.text()
    assert_readable(page)
