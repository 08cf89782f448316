"""What a job's page shows of its kind, in headless Chromium: real jobs, tiny ones."""

import re
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.acceptance.conftest import Site
from tests.browser.checks import WIDTHS, assert_readable
from tests.browser.conftest import Watch
from tools.service import submit, wait_for_job

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(180)]

STEP: dict[str, Any] = {
    "model": {"d_model": 8, "d_ff": 8, "num_layers": 1, "num_heads": 1, "vocab_size": 16},
    "context_length": 4,
    "batch_size": 1,
    "warmup_steps": 1,
    "device": "cpu",
}
PERFETTO = """<!doctype html><title>waiting</title><script>
addEventListener("message", ({ data, source, origin }) => {
  if (data === "PING") source.postMessage("PONG", origin);
  else document.title = `${data.perfetto.fileName}: ${data.perfetto.buffer.byteLength} bytes`;
});
</script>"""


def shown(site: Site, page: Page, kind: str, **fields: Any) -> int:
    """The page of a job of this kind, which has ended, with its panels."""
    job_id = submit(site.client, {"spec": {"kind": kind, **STEP, **fields}})
    assert wait_for_job(site.client, job_id, timeout_s=90)["state"] == "succeeded"
    page.goto(f"/ui/jobs/{job_id}")
    expect(page.locator("#panels h2")).to_be_visible()
    return job_id


def opened(page: Page, name: str) -> Locator:
    """A panel, opened if it is closed: only the first one of a page is open."""
    panel = page.locator(f"#panel-{name}")
    if panel.evaluate("one => one.matches('details:not([open])')"):
        panel.locator("summary").first.click()
    panel.scroll_into_view_if_needed()
    return panel


def drawn(page: Page, name: str) -> Locator:
    """A panel whose plot has been drawn."""
    panel = opened(page, name)
    expect(panel.locator("figure")).to_have_attribute("data-drawn", "yes")
    return panel


def rows(panel: Locator) -> Locator:
    return panel.locator("tbody tr")


@pytest.mark.long
def test_a_profile_with_kernels_flame_graph_and_trace(site: Site, page: Page, watch: Watch) -> None:
    page.set_viewport_size({"width": WIDTHS[1], "height": 844})
    job_id = shown(site, page, "profile", measure_steps=2, profile_steps=1)
    expect(page.locator("#panel-classes figure")).to_have_attribute("data-drawn", "waiting")
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert page.locator("script[src*=plotly]").count() == 0, "a phone loads Plotly when one scrolls to a plot"
    page.set_viewport_size({"width": WIDTHS[0], "height": 900})
    expect(drawn(page, "classes").locator(".plot")).to_have_accessible_name(re.compile("by class"))
    roofline = opened(page, "roofline")
    # On a busy host the ceilings are not steady, and not recorded.
    expect(roofline.locator("[data-drawn=yes]").or_(roofline.get_by_text("not recorded")).first).to_be_visible()
    if roofline.locator("figure").count():
        roofline.get_by_text("Numbers of this plot").click()
        expect(roofline.locator("td", has_text="aten::mm 4×8 · 8×16, fp32").first).to_be_visible()

    kernels = opened(page, "kernels")
    expect(rows(kernels).first).to_be_visible()
    kernels.locator("#explorer-words").press_sequentially("matmul ")
    expect(kernels.get_by_role("status")).to_contain_text("that match")
    expect(rows(kernels).filter(has_not_text="matmul")).to_have_count(0)
    kernels.locator("#explorer-words").press_sequentially("BMM")
    expect(rows(kernels)).to_have_count(1)
    expect(kernels.locator("#explorer-words")).to_have_value("matmul BMM")
    kernels.locator("#explorer-table").select_option("kernels-optimizer")
    expect(kernels.get_by_role("region", name="Table kernels-optimizer")).to_be_visible()
    expect(page).to_have_title(re.compile(rf"^Job {job_id}: "))

    expect(opened(page, "flame-graph").locator(".plot text", has_text="forward").first).to_be_visible()
    assert_readable(page)
    hand_the_trace_over(page, watch, site.client.get(f"/jobs/{job_id}/artifacts/trace.json.gz").content)


def hand_the_trace_over(page: Page, watch: Watch, trace: bytes) -> None:
    answer = {"body": PERFETTO, "content_type": "text/html"}
    page.context.route("https://ui.perfetto.dev/**", lambda route: route.fulfill(**answer))
    watch.expect("postMessage")  # Chromium logs each message that comes before the tab has its address
    assert watch.foreign_requests == []
    opened(page, "trace")
    with page.expect_popup() as popup:
        page.get_by_role("button", name="Open in Perfetto").click()
    expect(popup.value).to_have_title(f"trace.json.gz: {len(trace)} bytes")
    expect(page.locator("#panel-trace").get_by_role("status")).to_have_text("Perfetto has the trace.")
    assert watch.foreign_requests == ["https://ui.perfetto.dev/"]
    watch.foreign_requests.clear()
