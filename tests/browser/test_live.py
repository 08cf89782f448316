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
    samples = zlib.compress(array.array("d", [3.0, 1.0, 2.0]).tobytes())
    row = replace(measured("step_ms", 1.5, model="tiny"), n=3, samples=samples)
    site.worker.finish(claim, measurements=[row], log="first line\n<second> line\nlast line\n")
    expect(page.locator("#log")).to_have_text("first line\n<second> line\nlast line\n")
    expect(page.locator("article .state")).to_have_text("succeeded")
    expect(page.get_by_role("button", name="Cancel job")).to_have_count(0)
    expect(page.locator("#as-command")).to_be_visible()
    assert page.evaluate("window.loadedOnce === true")
    page.get_by_text("Every sample over the steps").click()
    plot = page.locator("#samples-plot .plot")
    expect(plot).to_have_attribute("aria-label", re.compile("^Times of the measured steps"))
    page.locator("#samples-plot summary").click()
    expect(page.locator("#samples-plot .plot-data tbody tr")).to_have_count(3)
