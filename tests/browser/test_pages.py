"""The pages in headless Chromium, over the real server and a real worker."""

import re

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.acceptance.conftest import Site, short_job
from tests.browser.checks import WIDTHS, assert_readable
from tests.browser.conftest import PATIENCE_MS, Watch
from tools.service import wait_for_job
from tools.waiting import wait_until

pytestmark = pytest.mark.acceptance

PATIENCE_S = PATIENCE_MS / 1000


def test_jobs_are_listed_followed_and_cancelled(site: Site, page: Page) -> None:
    client = site.client
    running = client.post("/jobs", json=short_job("gated", name="followed", labels={"team": "a"})).json()["id"]
    wait_until((site.folder / "started").exists, timeout_s=PATIENCE_S, what="the job to run")
    queued = client.post("/jobs", json=short_job("gated", name="cancelled")).json()["id"]

    page.goto("/")
    expect(page).to_have_url(re.compile("/ui$"))
    expect(row(page, running)).to_contain_text("followed")
    expect(row(page, running).locator(".state")).to_have_text("running")
    row(page, queued).get_by_role("link", name=str(queued), exact=True).click()
    expect(page.locator("article .state").first).to_have_text("queued")
    page.route("**/flopwatch.js*", lambda route: None)  # on its way
    page.reload(wait_until="commit")
    page.once("dialog", lambda dialog: dialog.dismiss())
    page.get_by_role("button", name="Cancel job").click()
    assert client.get(f"/jobs/{queued}").json()["state"] == "queued", "it asks first"
    page.unroute("**/flopwatch.js*")
    page.reload()
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Cancel job").click()
    expect(page.locator("article .state").first).to_have_text("cancelled")
    assert wait_for_job(client, queued)["state"] == "cancelled"
    expect(page.get_by_role("button", name="Cancel job")).to_have_count(0)

    page.goto(f"/ui/jobs/{running}")
    expect(page.locator("article .state").first).to_have_text("running")
    page.evaluate("window.loadedOnce = true")
    (site.folder / "open").touch()
    expect(page.locator("article .state").first).to_have_text("succeeded")
    assert page.evaluate("window.loadedOnce === true")
    expect(page.locator("main")).to_contain_text("forward_ms")
    expect(page.get_by_role("link", name="samples.csv.gz")).not_to_be_visible()
    page.locator("#files > summary").click()
    expect(page.get_by_role("link", name="samples.csv.gz")).to_be_visible()
    assert_readable(page)

    page.goto("/ui?state=succeeded&label=team:a")
    expect(page.locator("tbody td.id a")).to_have_text([str(running)])
    page.goto("/ui/workers")
    expect(page.locator("main")).to_contain_text("active")
    page.goto("/ui/usage")
    expect(page.locator("main")).to_contain_text("benchmark")
    page.set_viewport_size({"width": WIDTHS[1], "height": 900})
    page.reload()
    expect(page.locator("body > header nav [aria-current]")).to_be_in_viewport(ratio=1)
    assert_readable(page)


@pytest.mark.long
def test_the_list_keeps_what_a_reader_did_while_it_refreshes(site: Site, page: Page) -> None:
    ids = [site.client.post("/jobs", json=short_job("gated", name=f"job {n}")).json()["id"] for n in range(2)]
    page.goto("/ui")
    page.get_by_label(f"Pick job {ids[0]}").check()
    expect(page.locator("#picked output")).to_have_text("1 picked")
    page.get_by_text("More filters").click()
    page.get_by_label("Label").fill("team:")
    page.get_by_label("Label").focus()
    long = "0123456789" * 4
    newer = site.client.post("/jobs", json=short_job("gated", name=long, labels={"commit": long})).json()["id"]
    expect(row(page, newer)).to_be_visible()
    expect(page.get_by_label(f"Pick job {ids[0]}")).to_be_checked()
    expect(page.get_by_label(f"Pick job {newer}")).not_to_be_checked()
    expect(page.locator("#more-filters")).to_have_attribute("open", "")
    expect(page.get_by_label("Label")).to_be_focused()
    expect(page.get_by_label("Label")).to_have_value("team:")
    assert_readable(page)
    page.get_by_label(f"Pick job {ids[1]}").check()
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Cancel jobs").click()
    for job_id in ids:
        assert wait_for_job(site.client, job_id)["state"] == "cancelled"
    assert site.client.get(f"/jobs/{newer}").json()["state"] != "cancelled"


def test_a_form_shows_problems_and_commands_and_submits(site: Site, page: Page, watch: Watch) -> None:
    page.goto("/ui/new")
    page.locator("#field-model-size label").filter(has_text="tiny").click()
    page.locator("#field-model-size label").filter(has_text="small").click()
    page.get_by_label("context_length").fill("64, 128")
    expect(page.locator("#preview h2")).to_have_text("A sweep of 2 jobs")
    expect(page.locator("#as-command")).to_have_text(
        "flopwatch sweep benchmark context_length=64,128 model.size=tiny", use_inner_text=True
    )
    page.locator("#field-model-size label").filter(has_text="small").click()
    expect(page.locator("#preview h2")).to_have_text("A sweep of 4 jobs")
    page.locator("#field-model-size label").filter(has_text="small").click()
    page.get_by_label("batch_size").fill("0")
    expect(page.locator("#problems")).to_contain_text("batch_size: Input should be greater than or equal to 1")
    watch.expect("422")
    page.get_by_role("button", name="Submit").click()
    expect(page.get_by_label("batch_size")).to_have_attribute("aria-invalid", "true")
    expect(page.locator("#field-batch_size-error-1")).to_contain_text("greater than or equal to 1")
    expect(page.get_by_label("context_length")).to_have_value("64, 128")
    assert_readable(page)
    page.get_by_label("batch_size").fill("1")
    page.get_by_role("button", name="Submit").click()
    expect(page).to_have_url(re.compile(r"/ui/sweeps/\d+$"))
    sweep = site.client.get(page.url.removeprefix(str(site.client.base_url)).replace("ui/", "", 1)).json()
    assert sweep["grid"] == {"context_length": [64, 128]}
    assert sweep["base"] == {"kind": "benchmark", "model": {"size": "tiny"}, "batch_size": 1}


@pytest.mark.long
def test_control_of_the_watch(page: Page, watch: Watch) -> None:
    page.goto("/ui")
    watch.check()
    page.evaluate("document.body.append(Object.assign(document.createElement('script'), {textContent: '1'}))")
    wait_until(lambda: watch.console_errors, timeout_s=PATIENCE_S, what="the inline script to be noted")
    with pytest.raises(AssertionError, match="console"):
        watch.check()
    page.evaluate("fetch('http://example.invalid/').catch(() => {})")
    wait_until(lambda: "example.invalid" in str(watch), timeout_s=PATIENCE_S, what="the request to be noted")
    with pytest.raises(AssertionError):
        watch.check()
    watch.expect("")  # the fixture looks once more in the end
    watch.foreign_requests.clear()


def row(page: Page, job_id: int) -> Locator:
    link = page.get_by_role("link", name=str(job_id), exact=True)
    return page.locator("tr").filter(has=link)
