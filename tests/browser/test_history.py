"""The history of a case in many versions, in a browser."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from sqlalchemy import update

from app.store import tables
from tests.app.conftest import Site
from tests.browser.checks import assert_readable
from tests.browser.conftest import PlayedSite
from tests.builders import measured

VERSIONS = 20
CASE = {"model": "small", "context_length": 256, "precision": "bf16"}
SLOWER_FROM = 12
OOM_AT = 15


def finish_versions(site: Site, number: int = VERSIONS) -> None:
    """Finish a job of each version, one a day on one of two devices; from SLOWER_FROM on they are 20 % slower."""
    dice = random.Random(3)
    begin = datetime(2026, 3, 1, 12, tzinfo=UTC)
    site.worker.register()
    for version in range(number):
        job = site.submit()["id"]
        value = (24.0 if version >= SLOWER_FROM else 20.0) * dice.uniform(0.99, 1.01) * (3 if version % 5 == 0 else 1)
        width = value * dice.uniform(0.005, 0.02)
        fields: dict[str, Any] = {"device_key": "1x test CPU" if version % 5 == 0 else "1x NVIDIA H200"}
        row = replace(
            measured("step_ms", None if version == OOM_AT else value, "oom" if version == OOM_AT else "ok", **CASE),
            **fields,
            validity="suspect" if version % 17 == 0 else "valid",
        )
        if row.outcome == "ok":
            row = replace(row, n=20, median_low=value - width, median_high=value + width)
        commit = {"git_commit": f"{dice.getrandbits(160):040x}", "git_dirty": False}
        site.worker.finish(site.worker.claim_job(job), measurements=[row], environment={"software": commit})
        with site.services.database.write() as connection:
            finished = update(tables.job).where(tables.job.c.id == job)
            connection.execute(finished.values(finished_at=begin + timedelta(days=version)))
    for name, job in (("release-1", 8), ("main", 12)):
        assert site.http.put(f"/baselines/{name}", json={"job": job}).status_code == 201


@pytest.fixture
def site(played: PlayedSite) -> PlayedSite:
    return played


@pytest.mark.long
def test_the_history_of_many_versions(site: PlayedSite, page: Page) -> None:
    finish_versions(site)
    page.goto(f"/ui/jobs/{VERSIONS}")
    page.get_by_role("link", name="History: the same case in other jobs").click()
    figure = page.locator("#figure-history")
    expect(figure).to_have_attribute("data-drawn", "yes")
    names = figure.evaluate("figure => figure.querySelector('.plot').data.map(trace => trace.name)")
    assert names == ["1x NVIDIA H200", "1x test CPU", "in a baseline", "suspect", "oom"]
    drawn = figure.evaluate("figure => figure.querySelector('.plot').data.map(trace => trace.x.length)")
    assert drawn == [VERSIONS - VERSIONS // 5, VERSIONS // 5 - 1, 2, 1, 1]
    expect(page.locator("tbody tr")).to_have_count(VERSIONS)
    assert_readable(page)

    page.get_by_label("Pick job 9").check()
    expect(page.get_by_role("button", name="Compare")).to_be_disabled()
    page.get_by_label("Pick job 14").check()
    page.get_by_role("button", name="Compare").click()
    expect(page.get_by_role("heading", name="Compare")).to_be_visible()
    expect(page.locator("#candidate-14")).to_contain_text("1 process each")

    page.goto("/ui/history?job=1&along=version&device=1x NVIDIA H200")
    expect(page.locator("#figure-history")).to_have_attribute("data-drawn", "yes")
    page.goto("/ui/baselines")
    assert_readable(page)
    page.get_by_role("link", name="main").click()
    assert_readable(page)
    page.get_by_role("link", name="History", exact=True).last.click()
    expect(page.locator("#figure-history")).to_have_attribute("data-drawn", "yes")


@pytest.mark.long
def test_a_note_is_written_on_the_page(site: PlayedSite, page: Page) -> None:
    job = site.submit(labels={"kept": "yes"})["id"]
    page.goto(f"/ui/jobs/{job}")
    page.locator("#times summary").first.click()
    page.locator("#describe summary").click()
    assert_readable(page)
    page.get_by_label("Note").fill("No gain.\nSee the profile.")
    page.get_by_label("Labels").fill("kept=yes, tried=fused loss")
    page.get_by_role("button", name="Save").click()
    expect(page.locator("#note")).to_contain_text("See the profile.")
    assert site.job(job)["labels"] == {"kept": "yes", "tried": "fused loss"}
