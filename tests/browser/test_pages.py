"""The pages in headless Chromium, over the real server and a real worker."""

from __future__ import annotations

import json
from collections.abc import Callable
from urllib.parse import urlsplit

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

from tests.acceptance.conftest import Site, short_job
from tools.service import submit, wait_for_job, wait_until

pytestmark = pytest.mark.acceptance

PATIENCE_S = 30.0


def test_jobs_are_listed_followed_and_cancelled(site: Site, browser: Chrome) -> None:
    client, url = site.client, str(site.client.base_url).rstrip("/")
    running = client.post("/jobs", json=short_job("gated", name="followed", labels={"team": "a"})).json()["id"]
    wait_until((site.folder / "started").exists, timeout_s=PATIENCE_S, what="the job to run")
    queued = client.post("/jobs", json=short_job("gated", name="cancelled")).json()["id"]

    browser.get(url)
    assert urlsplit(browser.current_url).path == "/ui"
    assert "followed" in row(browser, running).text
    assert row(browser, running).find_element(By.CLASS_NAME, "state").text == "running"
    row(browser, queued).find_element(By.LINK_TEXT, str(queued)).click()
    wait_for_state(browser, "queued")
    button(browser, "Cancel job").click()
    wait_for_state(browser, "cancelled")
    assert wait_for_job(client, queued)["state"] == "cancelled"
    assert not browser.find_elements(By.XPATH, "//button[.='Cancel job']")

    browser.get(f"{url}/ui/jobs/{running}")
    wait_for_state(browser, "running")
    browser.execute_script("window.loadedOnce = true")
    (site.folder / "open").touch()
    wait_for_state(browser, "succeeded")
    assert browser.execute_script("return window.loadedOnce === true")
    main = browser.find_element(By.TAG_NAME, "main").text
    assert "forward_ms" in main
    assert "samples.csv.gz" in main

    browser.get(f"{url}/ui?state=succeeded&label=team:a")
    assert [link.text for link in browser.find_elements(By.CSS_SELECTOR, "tbody td:first-child a")] == [str(running)]
    browser.get(f"{url}/ui/workers")
    assert "active" in browser.find_element(By.TAG_NAME, "main").text
    assert complaints(browser) == []
    assert hosts(browser) == {urlsplit(url).netloc}


def test_a_job_of_many_cells_is_readable(site: Site, browser: Chrome) -> None:
    client, url = site.client, str(site.client.base_url).rstrip("/")
    spec = {"kind": "attention", "implementations": ["eager", "tiled", "triton", "flex"]}
    spec |= {
        "sequence_lengths": [8, 16, 32],
        "dtypes": ["fp32"],
        "device": "cpu",
        "warmup_steps": 0,
        "measure_steps": 2,
    }
    job_id = submit(client, {"spec": spec})
    browser.get(f"{url}/ui/jobs/{job_id}")
    # The page follows the job by itself, and the table appears.
    own_table = '[aria-label="Table of results"] tbody tr'
    wait(browser, lambda: browser.find_elements(By.CSS_SELECTOR, own_table))
    assert len(browser.find_elements(By.CSS_SELECTOR, own_table)) == 12
    details = browser.find_element(By.ID, "measurements")
    assert not details.find_element(By.TAG_NAME, "table").is_displayed()
    details.find_element(By.TAG_NAME, "summary").click()
    reasons = details.find_elements(By.CSS_SELECTOR, ".reason")
    right = browser.execute_script("return arguments[0].getBoundingClientRect().right", details)
    assert reasons
    for reason in reasons:
        assert browser.execute_script("return arguments[0].getBoundingClientRect().right", reason) <= right
    assert fits(browser)

    browser.get(f"{url}/ui")
    assert fits(browser)
    heads = browser.find_elements(By.TAG_NAME, "th")
    assert heads[-1].text == "Finished"
    assert browser.execute_script("return arguments[0].getBoundingClientRect().right", heads[-1]) <= 1200
    browser.get(f"{url}/tables?job={job_id}&format=html")
    assert browser.execute_script("return document.compatMode") == "CSS1Compat"
    assert complaints(browser) == []


def fits(browser: Chrome) -> bool:
    """Whether the page itself needs no sideways scrolling; its tables may."""
    return bool(browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth"))


def test_docs_need_no_other_host(site: Site, browser: Chrome) -> None:
    url = str(site.client.base_url).rstrip("/")
    browser.get(f"{url}/docs")
    wait(browser, lambda: browser.find_elements(By.CSS_SELECTOR, ".opblock"))
    operations = [element.text for element in browser.find_elements(By.CSS_SELECTOR, ".opblock-summary-path")]
    assert "/jobs/{job_id}/cancel" in [operation.replace("\u200b", "") for operation in operations]
    assert complaints(browser) == []
    assert hosts(browser) == {urlsplit(url).netloc}


def wait(browser: Chrome, condition: Callable[[], object]) -> None:
    """Wait for a condition of the page, which may be replaced meanwhile."""
    WebDriverWait(browser, PATIENCE_S, poll_frequency=0.05).until(lambda _browser: condition())


def wait_for_state(browser: Chrome, state: str) -> None:
    """Wait until the job's page says that it is in this state."""
    wait(
        browser, lambda: browser.execute_script("return document.querySelector('article .state')?.textContent") == state
    )


def row(browser: Chrome, job_id: int) -> WebElement:
    return browser.find_element(By.XPATH, f"//tr[td/a='{job_id}']")


def button(browser: Chrome, label: str) -> WebElement:
    return browser.find_element(By.XPATH, f"//button[.='{label}']")


def complaints(browser: Chrome) -> list[str]:
    """What the console says; policy violations and failed requests are there too."""
    return [entry["message"] for entry in browser.get_log("browser")]  # type: ignore[no-untyped-call]


def hosts(browser: Chrome) -> set[str]:
    """Every host that a page asked for something."""
    entries = browser.get_log("performance")  # type: ignore[no-untyped-call]
    messages = [json.loads(entry["message"])["message"] for entry in entries]
    urls = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    return {urlsplit(url).netloc for url in urls if urlsplit(url).scheme in ("http", "https", "ws", "wss")}
