"""/metrics: what it tells, and that Prometheus can read it."""

import logging
import re
import shutil
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families as text_format

from app.errors import DiskFull
from tests.app.conftest import CAPABILITIES, KINDS

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
    assert (value(site, "flopwatch_jobs", state="queued"), value(site, "flopwatch_jobs", state="failed")) == (4, 0)
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
    outcomes = {it: value(site, "flopwatch_outcomes_total", outcome=it) for it in ("succeeded", "failed", "cancelled")}
    assert outcomes == {"succeeded": 1, "failed": 1, "cancelled": 1}, "what was deleted counts, too"
    assert value(site, "flopwatch_oldest_job_age_seconds", state="running") == 0
    assert third.attempt == 1


def test_devices(fresh_site: Any) -> None:
    site = fresh_site
    site.worker.register()
    readings = {"devices": [{"type": "cpu", "utilisation_percent": 12.5}, {**GPU, "power_w": None}]}
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
    new = fresh_site.http.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
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


def test_workers_of_one_host_share_its_devices(fresh_site: Any) -> None:
    site = fresh_site
    site.worker.register()
    gpus = [{"type": "cuda", "uuid": f"GPU-{number}"} for number in range(2)]
    for name, host, devices in (("a", "gpus", gpus[:1]), ("b", "gpus", gpus), ("c", "host", [{"type": "cpu"}])):
        site.services.registration.register_worker(name, host, 2, KINDS, CAPABILITIES, devices, {})
    series = [
        (sample.labels["hostname"], sample.value)
        for sample in families(site.http.get("/metrics").text)["flopwatch_devices"].samples
    ]
    assert sorted(series) == [("gpus", 2), ("host", 1)]


def test_times_devices_and_disk(fresh_site: Any) -> None:
    site = fresh_site
    site.worker.register()
    site.submit()
    claim = site.worker.claim()
    assert value(site, "flopwatch_devices", hostname="host") == 1
    assert value(site, "flopwatch_devices_busy", hostname="host") == 1
    site.worker.finish(claim, "failed")
    assert value(site, "flopwatch_devices_busy", hostname="host") == 0
    assert value(site, "flopwatch_job_waiting_seconds_count", kind="benchmark") == 1
    assert value(site, "flopwatch_job_waiting_seconds_bucket", le="60") == 1
    assert value(site, "flopwatch_job_duration_seconds_count", kind="benchmark", outcome="failed") == 1
    assert (value(site, "flopwatch_job_duration_seconds_sum", outcome="failed") or 0) > 0
    site.http.post(f"/jobs/{claim.job_id}/retry")
    site.worker.finish(site.worker.claim())
    assert value(site, "flopwatch_job_waiting_seconds_count", kind="benchmark") == 1, "a retry waited for its failure"
    assert value(site, "flopwatch_job_duration_seconds_count", outcome="succeeded") == 1
    free = shutil.disk_usage(site.services.settings.data_dir).free
    assert value(site, "flopwatch_disk_free_bytes", folder="data") == pytest.approx(free, rel=0.05)
    assert value(site, "flopwatch_pending_jobs") == 0


def test_jobs_in_a_clusters_queue_are_pending(fresh_site: Any) -> None:
    site = fresh_site
    site.submit()
    site.worker.try_claim(waits_for="Slurm: Resources")
    assert value(site, "flopwatch_pending_jobs") == 1
    assert value(site, "flopwatch_job_waiting_seconds_count", kind="benchmark") is None, "it still waits"


def test_errors_of_the_store_are_counted(fresh_site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise DiskFull("No space is left.")

    monkeypatch.setattr(fresh_site.services.queue, "submit", full)
    assert fresh_site.http.post("/jobs", json={"spec": {"kind": "benchmark"}}).status_code == 507
    assert value(fresh_site, "flopwatch_store_errors_total", code="disk_full") == 1
    fresh_site.http.get("/jobs/999")
    assert value(fresh_site, "flopwatch_store_errors_total", code="not_found") is None


class TestRequestIds:
    @pytest.mark.parametrize(("sent", "is_kept"), [("proxy-7.a", True), ("a b", False), ("x" * 65, False), ("", False)])
    def test_a_proxys_id_is_kept(self, site: Any, sent: str, is_kept: bool) -> None:
        answer = site.http.get("/nothing", headers={"X-Request-Id": sent})
        assert (answer.headers["x-request-id"] == sent) is is_kept
        assert answer.json()["request_id"] == answer.headers["x-request-id"]

    def test_refusals_and_unforeseen_errors_have_it(self, fresh_site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        refused = fresh_site.http.get("/jobs", headers={"Host": "elsewhere.example"})
        assert refused.json()["request_id"] == refused.headers["x-request-id"]
        monkeypatch.setattr(fresh_site.services.reading, "jobs", lambda **_: 1 / 0)
        unforeseen = fresh_site.http.get("/jobs", headers={"X-Request-Id": "mine"})
        assert unforeseen.status_code == 500
        assert (unforeseen.json()["request_id"], unforeseen.headers["x-request-id"]) == ("mine", "mine")


def test_an_end_is_logged_with_state_code_and_time(fresh_site: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "app.store.queue.ends")
    for _ in range(4):
        fresh_site.submit()
    fresh_site.worker.finish(fresh_site.worker.claim())
    fresh_site.worker.finish(fresh_site.worker.claim(), "failed")
    for _ in range(2):  # the second time it has ended
        fresh_site.http.post("/jobs/3/cancel")
    lost = fresh_site.worker.claim()
    for _ in range(2):
        fresh_site.services.queue.recover(fresh_site.services.queue.running()[0])
        if fresh_site.job(lost.job_id)["state"] == "queued":
            fresh_site.worker.claim()
    ended = [record.fields for record in caplog.records if record.name == "app.store.queue.ends"]
    assert [(one["state"], one["code"]) for one in ended] == [
        ("succeeded", None),
        ("failed", "failed"),
        ("cancelled", "cancelled"),
        ("failed", "worker_lost"),
    ]
    assert [one["ran_s"] is None for one in ended] == [False, False, True, False]
