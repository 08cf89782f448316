"""What a job tells while it runs: its output, however much, and its progress."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import httpx
import psutil
import pytest

from flopwatch.packages import START
from tests.acceptance.conftest import Site, short_job
from tests.acceptance.sabotage import fails_without, get, open_gate, plain_job, wait_for_start, wait_for_state
from tests.app.api.streams import STREAM, parse_stream
from tools.service import Service, submit

pytestmark = pytest.mark.acceptance

OUTPUT_BYTES = 100_000_000
GROWTH_BYTES = 50_000_000
"""How much an agent may grow that takes so much output: half of it."""
LOG_BYTES = 1_000_000
"""How much of it may be kept."""


class Peak:
    """The largest resident set of a process while inside, in bytes."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.before = self.bytes = self._process.memory_info().rss

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.01):
            self.bytes = max(self.bytes, self._process.memory_info().rss)


def test_a_job_that_prints_100_mb(site: Site) -> None:
    client = site.client
    with Peak(site.worker.pid) as peak:
        job_id = submit(client, plain_job("chatty", timeout_s=60.0))
        wait_for_state(client, job_id, "succeeded")
    growth = peak.bytes - peak.before
    print(f"the agent grew from {peak.before >> 20} MiB by {growth >> 20} MiB")
    assert growth < GROWTH_BYTES, "the agent keeps the output"
    text = client.get(f"/jobs/{job_id}/logs").text
    assert text.startswith("first line\nxxx")
    assert text.endswith("xxx\nlast line\n")
    assert len(text) < LOG_BYTES
    (note,) = [line for line in text.splitlines() if "bytes cut" in line]
    cut = int("".join(filter(str.isdigit, note)))
    kept = len(text) - len(f"\n{note}\n")
    assert kept + cut == OUTPUT_BYTES + len("first line\nlast line\n")
    events = get(client, f"/jobs/{job_id}/events?limit=500")
    assert sum(len(event["data"]["text"]) for event in events if event["type"] == "log") < 2 * LOG_BYTES


def test_control_all_output_is_kept(beside: Service, start_beside: Callable[..., Site]) -> None:
    with fails_without(beside, "capped_log", match="keeps the output"):
        test_a_job_that_prints_100_mb(start_beside())


def followed(client: httpx.Client, job_id: int, until: Callable[[Any], bool]) -> list[tuple[str, dict[str, Any]]]:
    """Types and data of the job's live events, from the first to one whose data are such as `until` says."""
    found: list[tuple[str, dict[str, Any]]] = []
    with client.stream("GET", f"/jobs/{job_id}/events", headers=STREAM, timeout=60.0) as stream:
        for _, kind, data in parse_stream(stream.iter_lines()):
            found.append((kind, data))
            if until(data):
                return found
    raise AssertionError(f"the stream ended too early: {found}")


def test_each_replicate_has_an_interpreter(start_beside: Callable[..., Site]) -> None:
    site = start_beside()
    client, folder = site.client, site.folder
    job_id = submit(client, short_job("gated", replicates=2))
    (first,) = wait_for_start(folder)
    assert psutil.Process(first).cmdline()[1:5] == ["-P", START, "workers", "child"]

    def waits(data: dict[str, Any], done: int = 0) -> bool:
        progress = data.get("done"), data.get("total"), str(data.get("message")).rpartition(", ")[2]
        return progress == (done, 2, f"replicate {done + 1} of 2: measuring")

    # Progress that a busy store has let wait is not told any more when there is newer one.
    kinds = [kind for kind, _ in followed(client, job_id, waits)]
    assert (kinds[:2], set(kinds[2:])) == (["state", "state"], {"progress"})
    assert waits(get(client, f"/jobs/{job_id}")["progress"])
    open_gate(folder, first)
    (second,) = wait_for_start(folder, 2)
    assert second != first
    # What is told last before the gate is told on any host.
    assert followed(client, job_id, lambda data: waits(data, done=1))[-1][0] == "progress"
    assert get(client, f"/jobs/{job_id}/measurements")["rows"] == [], "nothing is recorded before the end"
    open_gate(folder, second)
    wait_for_state(client, job_id, "succeeded")
    events = get(client, f"/jobs/{job_id}/events")
    assert [(event["type"], event["data"]) for event in events] == followed(client, job_id, lambda it: "error" in it)
    done = [event["data"]["done"] for event in events if event["type"] == "progress"]
    assert done == sorted(done)
    assert get(client, f"/jobs/{job_id}")["progress"]["done"] == 2
    states = [event["data"]["state"] for event in events if event["type"] == "state"]
    assert states == ["queued", "running", "succeeded"]
    assert events[-1]["type"] == "done"
    steps = [row for row in get(client, f"/jobs/{job_id}/measurements")["rows"] if row["metric"] == "step_ms"]
    assert [(row["unit_index"], row["partial"], row["n"]) for row in steps] == [(0, False, 1), (1, False, 1)]
    names = [artifact["name"] for artifact in get(client, f"/jobs/{job_id}/artifacts")]
    assert names == ["samples-unit-1.csv.gz", "samples.csv.gz"]
