"""/metrics: what it tells, and that Prometheus can read it."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families as text_format

OPEN_METRICS = {"Accept": "application/openmetrics-text; version=1.0.0"}
GPU = {"type": "cuda", "uuid": "GPU-1", "utilisation_percent": 50, "memory_used_mib": 3, "sm_clock_mhz": 1980}


def families(text: str) -> dict[str, Metric]:
    return {family.name: family for family in text_format(text)}


def value(site: Any, name: str, **labels: str) -> float | None:
    """One sample, as Prometheus reads it; None if there is none."""
    for family in text_format(site.http.get("/metrics").text):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return float(sample.value)
    return None


def test_the_queue(fresh_site: Any) -> None:
    site = fresh_site
    site.worker.register()
    for _ in range(4):
        site.submit()
    assert value(site, "flopwatch_jobs", state="queued") == 4
    assert value(site, "flopwatch_jobs", state="failed") == 0
    assert value(site, "flopwatch_workers", state="active") == 1
    first, second, third = (site.worker.claim() for _ in range(3))
    assert (value(site, "flopwatch_oldest_job_age_seconds", state="running") or 0) > 0
    assert (value(site, "flopwatch_oldest_job_age_seconds", state="queued") or 0) > 0
    site.worker.finish(first)
    site.worker.finish(second, "failed")
    site.http.post("/jobs/4/cancel")
    site.http.delete(f"/jobs/{first.job_id}")
    for attempt in site.services.queue.running():
        assert site.services.queue.recover(attempt) == "queued"
    assert value(site, "flopwatch_claims_total", kind="benchmark") == 3
    assert value(site, "flopwatch_lease_losses_total", kind="benchmark") == 1
    outcomes = {
        code: value(site, "flopwatch_outcomes_total", outcome=code) for code in ("succeeded", "failed", "cancelled")
    }
    assert outcomes == {"succeeded": 1, "failed": 1, "cancelled": 1}, "what was deleted counts, too"
    assert value(site, "flopwatch_oldest_job_age_seconds", state="running") == 0
    assert third.attempt == 1


def test_counts_survive_the_server(serve: Any, tmp_path: Any) -> None:
    with serve(tmp_path) as site:
        site.submit()
        site.worker.finish(site.worker.claim())
    with serve(tmp_path) as site:
        assert value(site, "flopwatch_outcomes_total", outcome="succeeded") == 1
        assert value(site, "flopwatch_http_requests_total", route="/jobs") is None, "of the process that has ended"


def test_devices(fresh_site: Any) -> None:
    site = fresh_site
    site.worker.register()
    readings = {
        "devices": [{"type": "cpu", "utilisation_percent": 12.5, "memory_used_mib": 1}, {**GPU, "power_w": None}]
    }
    site.services.queue.renew([], (site.worker.id, "active"), readings)
    assert value(site, "flopwatch_device_utilization_ratio", device="cpu") == 0.125
    assert value(site, "flopwatch_device_memory_used_bytes", device="GPU-1", hostname="host") == 3 << 20
    assert value(site, "flopwatch_device_sm_clock_hertz", device="GPU-1") == 1.98e9
    assert value(site, "flopwatch_device_power_watts", device="GPU-1") is None


def test_requests_by_their_route(fresh_site: Any) -> None:
    site = fresh_site
    job = site.submit()["id"]
    for path in (f"/jobs/{job}", f"/jobs/{job}", "/jobs/999", "/nothing/here", "/ui"):
        site.http.get(path)
    assert value(site, "flopwatch_http_requests_total", method="GET", route="/jobs/{job_id}", status="200") == 2
    assert value(site, "flopwatch_http_requests_total", method="GET", route="/jobs/{job_id}", status="404") == 1
    assert value(site, "flopwatch_http_requests_total", route="none", status="404") == 1
    assert value(site, "flopwatch_http_requests_total", method="POST", route="/jobs", status="201") == 1
    assert value(site, "flopwatch_http_requests_total", route="/ui", status="200") == 1
    assert value(site, "flopwatch_http_request_duration_seconds_count", route="/jobs/{job_id}") == 3


def test_no_request_makes_labels_without_bound(fresh_site: Any) -> None:
    for number in range(20):
        fresh_site.http.request(f"VERB{number}", f"/jobs/x{number}")
    samples = [one for family in text_format(fresh_site.http.get("/metrics").text) for one in family.samples]
    series = {
        (one.labels["method"], one.labels["route"]) for one in samples if one.name == "flopwatch_http_requests_total"
    }
    assert {method for method, _ in series} <= {"other", "GET"}
    assert len(series) <= 2


def test_prometheus_reads_it(fresh_site: Any) -> None:
    """By both of its formats, and every name follows its conventions."""
    test_the_queue(fresh_site)
    plain = fresh_site.http.get("/metrics")
    assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")
    new = fresh_site.http.get("/metrics", headers=OPEN_METRICS)
    assert new.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    old_names = {name.removesuffix("_total") for name in families(plain.text)}
    read = list(open_metrics(new.text))
    assert {family.name for family in read if not family.name.endswith("_created")} <= {
        name.removesuffix("_created").removesuffix("_info") for name in old_names
    }
    seen: set[Any] = set()
    for family in read:
        assert re.fullmatch(r"flopwatch_[a-z0-9_]+", family.name)
        assert family.documentation.endswith("."), family.name
        for sample in family.samples:
            series = (sample.name, tuple(sorted(sample.labels.items())))
            assert series not in seen, "Prometheus refuses a scrape with one series twice"
            seen.add(series)


def test_promtool_has_nothing_to_say(fresh_site: Any) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool (Debian's package prometheus) is not installed")
    test_the_queue(fresh_site)
    text = fresh_site.http.get("/metrics").text
    done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
