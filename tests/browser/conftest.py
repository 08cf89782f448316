"""Headless Chromium by Playwright, and the service of the acceptance tests.

The fixture `page` fails its test when a page asks another host for anything, writes an error to its console, or breaks
its policy. `page.goto("/ui")` is relative to the site's address.
"""

import contextlib
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect, sync_playwright

from tests.acceptance.conftest import Site, site, started_service
from tests.app import conftest as played_sites

__all__ = ["PlayedSite", "chromium", "page", "played", "site", "started_service", "watch"]

PATIENCE_MS = 30_000
FLAGS = (
    "--no-sandbox",  # the sandbox does not work as root, and only our own pages are shown
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    # A tenth and a twentieth of the tests' processor time: a second process for each page that none of them needs, and
    # optimizing scripts that run for a second.
    "--disable-features=SpareRendererForSitePerProcess",
    "--js-flags=--no-opt",
)
# Violations of a page's policy are errors of its console, too; this also finds those that a page's script hides.
NOTE_VIOLATIONS = """
document.addEventListener("securitypolicyviolation", (event) =>
  console.error(`policy violation: ${event.violatedDirective} by ${event.blockedURI || event.sourceFile}`));
"""


@dataclass
class Watch:
    """Collects requests to other hosts, and errors on the console."""

    own_host: str
    foreign_requests: list[str] = field(default_factory=list)
    console_errors: list[str] = field(default_factory=list)
    expected: list[str] = field(default_factory=list)

    def expect(self, pattern: str) -> None:
        """Allow console errors that match this regular expression: Chromium logs each answer that is an error."""
        self.expected.append(pattern)

    def request(self, request: Request) -> None:
        address = urlsplit(request.url)
        if address.scheme not in ("data", "blob", "about") and address.netloc != self.own_host:
            self.foreign_requests.append(request.url)

    def console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.console_errors.append(f"{message.text} ({message.location['url']})")

    def check(self) -> None:
        assert self.foreign_requests == [], "requests to other hosts"
        unexpected = [text for text in self.console_errors if not any(re.search(one, text) for one in self.expected)]
        assert unexpected == [], "errors on the console"


_started = contextlib.ExitStack()
"""Ends the browser. Pytest has packages' fixtures end with the session where folders are no packages, as these are."""
_browsers: list[Browser] = []


@pytest.fixture
def chromium() -> Browser:
    """The browser of all tests of this folder; its start takes seconds of a core."""
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("Debian's package chromium is not installed")
    if not _browsers:
        expect.set_options(timeout=PATIENCE_MS)
        browser = _started.enter_context(sync_playwright()).chromium.launch(executable_path=path, args=list(FLAGS))
        _browsers.append(browser)
        _started.callback(_browsers.clear)
        _started.callback(browser.close)
    return _browsers[0]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """End the browser with the last test of this folder: its event loop is in the way of other tests' own."""
    if nextitem is None or Path(__file__).parent not in nextitem.path.parents:
        _started.close()


class PlayedSite(played_sites.Site):
    """A server whose worker the test plays; with a `client`, as the site of the acceptance tests."""

    @property
    def client(self) -> httpx.Client:
        return self.http


@pytest.fixture
def played(tmp_path: Path) -> Iterator[PlayedSite]:
    """A module's fixture `site` returns this one if its tests play the worker."""
    with played_sites.serving(tmp_path, lease_s=600) as running:
        yield PlayedSite(running.url, running.services, running.worker, running.http)


@pytest.fixture
def watch(site: Site) -> Watch:
    """The watch of the test's page: `watch.expect("422")` before a page that answers so."""
    return Watch(site.client.base_url.netloc.decode())


@pytest.fixture
def page(chromium: Browser, site: Site, watch: Watch) -> Iterator[Page]:
    """A new browser's only page, 1400 pixels wide."""
    with watched_page(chromium, str(site.client.base_url), watch) as opened:
        yield opened


@contextlib.contextmanager
def watched_page(chromium: Browser, url: str, watch: Watch) -> Iterator[Page]:
    """A new browser's only page, on the site at this address; fails in the end if the watch has seen anything."""
    context = chromium.new_context(
        base_url=url,
        viewport={"width": 1400, "height": 900},
        reduced_motion="reduce",  # a colour is judged when it has changed, not while it does
    )
    context.set_default_timeout(PATIENCE_MS)
    context.add_init_script(NOTE_VIOLATIONS)
    context.on("request", watch.request)
    context.on("console", watch.console)
    context.on("weberror", lambda error: watch.console_errors.append(str(error.error)))
    yield context.new_page()
    context.close()
    watch.check()
