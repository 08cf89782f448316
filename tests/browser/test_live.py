"""A job's page while the job runs, in headless Chromium over a real server, with a worker played by the test."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from playwright.sync_api import Browser, expect

from tests.app.conftest import serving
from tests.browser.checks import assert_readable
from tests.browser.conftest import Watch, watched_page
from tests.builders import measured


def test_a_running_job_is_followed_to_its_end(tmp_path: Path, chromium: Browser) -> None:
    with (
        serving(tmp_path, lease_s=600) as site,
        watched_page(chromium, site.url, Watch(urlsplit(site.url).netloc)) as page,
    ):
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
        expect(page.locator("#steps")).to_contain_text("tiled")
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
