"""The metrics of /metrics: the state of the database's jobs, workers and devices, which every server of the database
tells alike, and the requests of this process."""

import re
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import STORE_UNAVAILABLE, Damaged, DatabaseFailed, FlopwatchError
from app.logs import note_request
from app.store.reading.monitoring import Snapshot
from flopwatch.defaults import TIME
from flopwatch.text.times import current_time

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
PAGES = "/ui"
MIB, MHZ = float(1 << 20), 1e6
READINGS = (
    ("utilisation_percent", "utilization_ratio", "Part of the time in which the device worked.", 0.01),
    ("memory_used_mib", "memory_used_bytes", "Used memory.", MIB),
    ("temperature_c", "temperature_celsius", "Temperature.", 1.0),
    ("power_w", "power_watts", "Power.", 1.0),
    ("sm_clock_mhz", "sm_clock_hertz", "Clock of the multiprocessors.", MHZ),
    ("memory_clock_mhz", "memory_clock_hertz", "Clock of the memory.", MHZ),
)
"""Each reading that workers store, with the name, the text and the unit of its metric."""
HISTOGRAMS = {
    "waiting": "Time from submission to the start of the first attempt, again if a worker gives the job back.",
    "duration": "Time of the last attempt of jobs that ended.",
}
REQUEST_ID = "X-Request-Id"
STORE_ERRORS = (*STORE_UNAVAILABLE, Damaged, DatabaseFailed)


class Requests:
    """The requests of one application."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._count = Counter(
            "flopwatch_http_requests",
            "Requests that this process answered.",
            ["method", "route", "status"],
            registry=self.registry,
        )
        self._latency = Histogram(
            "flopwatch_http_request_duration_seconds",
            "Time until the head of the answer; with Prefer: wait it includes the waiting.",
            ["method", "route"],
            buckets=BUCKETS_S,
            registry=self.registry,
        )
        self._errors = Counter(
            "flopwatch_store_errors",
            "Errors of the database and the store of files that this process met, by code.",
            ["code"],
            registry=self.registry,
        )

    def note_error(self, error: FlopwatchError) -> None:
        """Count an error of the database or the store."""
        if isinstance(error, STORE_ERRORS):
            self._errors.labels(error.code).inc()

    def note(self, method: str, route: str, status: int, seconds: float) -> None:
        method = method if method in METHODS else "other"
        self._count.labels(method, route, str(status)).inc()
        self._latency.labels(method, route).observe(seconds)


class Counted:
    """ASGI middleware that gives every request an id, tells the database's time, and notes it by its route: paths would
    be without bound."""

    def __init__(self, app: ASGIApp, requests: Requests) -> None:
        self.app = app
        self.requests = requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = id_of(scope)
        note_request(request_id)  # of this request's task alone
        started, is_noted = time.perf_counter(), False

        async def send_and_note(message: Message) -> None:
            nonlocal is_noted
            if message["type"] == "http.response.start" and not is_noted:
                is_noted = True
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID], headers[TIME] = request_id, current_time().isoformat()
                seconds = time.perf_counter() - started
                self.requests.note(scope["method"], route_of(scope), message["status"], seconds)
            await send(message)

        await self.app(scope, receive, send_and_note)


def id_of(scope: Scope) -> str:
    """Return the id of a request: the client's or proxy's own if it is one, else a new one."""
    sent = Headers(scope=scope).get(REQUEST_ID, "")
    return sent if re.fullmatch(r"[\w.-]{1,64}", sent, re.ASCII) else secrets.token_hex(8)


def route_of(scope: Scope) -> str:
    """Return the path of the request's route, with its parameters' names; "none" if there is no such route, or the
    request was refused before it."""
    path: str | None = getattr(scope.get("route"), "path", None)
    if path is None:
        return "none"
    # A route of an included router knows its path without the prefix.
    return path if path.startswith(PAGES) or not scope["path"].startswith(PAGES) else PAGES + path


class FromDatabase(Collector):
    """The metrics of one reading of the database."""

    def __init__(self, snapshot: Snapshot, version: str, free_bytes: Mapping[str, int]) -> None:
        """free_bytes: the free space of folders of this server."""
        self._now = snapshot
        self._version = version
        self._free_bytes = free_bytes

    def collect(self) -> Iterator[Metric]:
        now = self._now
        yield InfoMetricFamily("flopwatch_build", "The server's version.", value={"version": self._version})
        yield _gauge("flopwatch_jobs", "Jobs by state.", "state", now.jobs)
        yield _gauge(
            "flopwatch_oldest_job_age_seconds",
            "Time since the oldest queued job was submitted, and since the oldest running one was started.",
            "state",
            now.oldest_s,
        )
        yield _gauge("flopwatch_workers", "Workers by state.", "state", now.workers)
        yield _gauge(
            "flopwatch_webhooks", "Notifications that wait for an end, or for delivery.", "state", now.webhooks
        )
        texts = {
            "claims": "Attempts that workers began.",
            "outcomes": "Ends of jobs: succeeded, or the error's code.",
            "lease_losses": "Attempts taken from workers that had fallen silent.",
        }
        for name, text in texts.items():
            labels = ["kind", "outcome"] if name == "outcomes" else ["kind"]
            family = CounterMetricFamily(f"flopwatch_{name}", text, labels=labels)
            for kind, outcome, number in now.tallies.get(name, ()):
                family.add_metric([kind, outcome][: len(labels)], number)
            yield family
        for name, text in HISTOGRAMS.items():
            labels = ["kind", "outcome"] if name == "duration" else ["kind"]
            times = HistogramMetricFamily(f"flopwatch_job_{name}_seconds", text, labels=labels)
            for (of, kind, outcome), histogram in now.histograms.items():
                if of == name:
                    times.add_metric([kind, outcome][: len(labels)], [*histogram.counts.items()], histogram.sum_s)
            yield times
        text = "Jobs that wait in a cluster's queue; they are among the queued ones."
        yield GaugeMetricFamily("flopwatch_pending_jobs", text, value=now.pending)
        labels = ["worker", "hostname"]
        total = GaugeMetricFamily(
            "flopwatch_devices", "GPUs of a living worker; without one 1, its CPU.", labels=labels
        )
        busy = GaugeMetricFamily("flopwatch_devices_busy", "Those of them that running jobs hold.", labels=labels)
        for worker, hostname, number, in_use in now.devices:
            total.add_metric([worker, hostname], number)
            busy.add_metric([worker, hostname], in_use)
        yield from (total, busy)
        yield _gauge("flopwatch_disk_free_bytes", "Free space of a folder of this server.", "folder", self._free_bytes)
        yield from _devices(now.workers_readings)


def _gauge(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family


def _devices(workers: Iterable[tuple[str, str, Mapping[str, Any]]]) -> Iterator[Metric]:
    """Yield the last readings of living workers' devices. Values that a device does not report are left out."""
    workers = list(workers)
    labels = ["worker", "hostname", "device"]
    for reading, name, text, unit in READINGS:
        family = GaugeMetricFamily(f"flopwatch_device_{name}", text, labels=labels)
        for worker, hostname, readings in workers:
            for device in readings.get("devices") or ():
                value = device.get(reading)
                if isinstance(value, (int, float)):
                    which = str(device.get("uuid") or device.get("type"))
                    family.add_metric([worker, hostname, which], value * unit)
        yield family
