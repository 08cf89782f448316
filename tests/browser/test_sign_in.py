"""Signing in with a token, in headless Chromium; and what the page of another origin can do with the session."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect

from app.api import gate
from app.api.guard import COOKIE
from tests.app.api.test_access import BOOTSTRAP, bearer, made
from tests.app.conftest import Site, serving
from tests.browser.checks import assert_fits, assert_readable, at_both_widths
from tests.browser.conftest import Watch, watched_page

pytestmark = pytest.mark.acceptance

OTHER_ORIGIN = "http://127.0.0.1:5999"
"""Of the same site, so the browser sends it the cookie, although that is SameSite=Strict."""


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Site]:
    with serving(tmp_path, api_token=BOOTSTRAP) as site:
        yield site


@pytest.fixture
def seen(guarded: Site) -> Watch:
    return Watch(urlsplit(guarded.url).netloc)


@pytest.fixture
def page(chromium: Browser, guarded: Site, seen: Watch) -> Iterator[Page]:
    with watched_page(chromium, guarded.url, seen) as opened:
        yield opened


def sign_in(page: Page, token: str) -> None:
    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Sign in").click()


def jobs(site: Site) -> list[Any]:
    return site.http.get("/jobs", headers=bearer(BOOTSTRAP)).raise_for_status().json()["data"]


def test_signing_in_and_out(guarded: Site, page: Page, seen: Watch) -> None:
    page.goto("/ui/new?kind=benchmark")
    expect(page).to_have_url(re.compile(r"/ui/sign-in\?next="))
    assert_readable(page)
    assert page.get_by_label("Token").bounding_box()["width"] < 500, "a token needs no more"
    seen.expect("401")
    sign_in(page, "hunter2")
    expect(page.get_by_role("alert")).to_contain_text("is no token")
    sign_in(page, made(guarded, "ada", "submit"))
    expect(page).to_have_url(re.compile(r"/ui/new\?kind=benchmark$"))
    [cookie] = page.context.cookies()
    name = f"{COOKIE}_{guarded.url.rpartition(':')[2]}"
    assert (cookie["name"], cookie["httpOnly"], cookie["sameSite"]) == (name, True, "Strict")
    assert cookie["expires"] == -1, "it ends with the browser"
    assert page.evaluate("document.cookie + JSON.stringify({...localStorage, ...sessionStorage})") == "{}"
    page.get_by_role("button", name="Submit").click()
    expect(page).to_have_url(re.compile(r"/ui/jobs/\d+$"))
    assert [job["submitted_by"] for job in jobs(guarded)] == ["ada"]
    for _scheme in at_both_widths(page):
        assert_fits(page)
    page.get_by_role("button", name="Sign out (ada)").click()
    expect(page).to_have_url(re.compile("/ui/sign-in$"))
    assert page.context.cookies() == []


@pytest.mark.long
def test_a_page_that_follows_a_job_asks_to_sign_in_again(guarded: Site, page: Page, seen: Watch) -> None:
    token = made(guarded, "bob", "read")
    page.goto("/ui")
    sign_in(page, token)
    expect(page.get_by_role("button", name="Sign out (bob)")).to_be_visible()
    seen.expect("401")
    guarded.http.delete(f"/tokens/{token.split('_')[1]}", headers=bearer(BOOTSTRAP)).raise_for_status()
    expect(page).to_have_url(re.compile(r"/ui/sign-in\?next=%2Fui$"))


def attack(guarded: Site, page: Page, seen: Watch) -> int:
    """The number of jobs that a page of another origin gets submitted by the browser of somebody who is signed in."""
    form = f'<form method="post" action="{guarded.url}/ui/new"><input name="kind" value="benchmark"></form>'
    body = f"<!doctype html><link rel=icon href=data:,>{form}<script>document.forms[0].submit()</script>"
    page.goto("/ui/sign-in")
    sign_in(page, made(guarded, "ada", "submit"))
    expect(page.get_by_role("button", name="Sign out (ada)")).to_be_visible()
    page.route(f"{OTHER_ORIGIN}/**", lambda route: route.fulfill(body=body, content_type="text/html"))
    with page.expect_response(lambda it: it.request.method == "POST" and it.url.endswith("/ui/new")) as sent:
        page.goto(f"{OTHER_ORIGIN}/", wait_until="commit")
    assert COOKIE in sent.value.request.all_headers().get("cookie", ""), "the browser sends the session"
    seen.foreign_requests.remove(f"{OTHER_ORIGIN}/")
    return len(jobs(guarded))


@pytest.mark.long
def test_a_foreign_origin_changes_nothing(guarded: Site, page: Page, seen: Watch) -> None:
    seen.expect("403")
    assert attack(guarded, page, seen) == 0


@pytest.mark.long
def test_control_of_the_foreign_origin(guarded: Site, page: Page, seen: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "is_cross_site", lambda *_, **__: False)
    assert attack(guarded, page, seen) == 1
