"""Headless Chromium, and the service of the acceptance tests."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from selenium.webdriver import Chrome, ChromeOptions, ChromeService

from tests.acceptance.conftest import site, started_service

__all__ = ["browser", "site", "started_service"]

FLAGS = (
    "--headless",
    "--no-sandbox",  # the sandbox does not work as root, and only our own pages are shown
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1200,900",
)


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    """A browser with an empty profile, which notes its console and its requests; its start takes seconds of a core."""
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        pytest.skip("Debian's packages chromium and chromium-driver are not installed")
    options = ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('browser')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = Chrome(options, ChromeService(chromedriver))
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture
def browser(chromium: Chrome) -> Iterator[Chrome]:
    """The browser as if it were new: no page, cache or cookie, and nothing noted."""
    yield chromium
    chromium.get("about:blank")
    for command in ("Network.clearBrowserCache", "Network.clearBrowserCookies"):
        chromium.execute_cdp_cmd(command, {})
    for log in ("browser", "performance"):
        chromium.get_log(log)  # type: ignore[no-untyped-call]
