"""Jobs of several units, as users see them: a kind of the tests' own, a wrapped unit, a crash, and a comparison."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.acceptance.conftest import PLUGINS, environment
from tests.acceptance.sabotage import get
from tests.forked import ForkedService
from tools.service import Service, submit, wait_for_job
from workers.jobs.compare import turns

pytestmark = pytest.mark.acceptance

COMPARED = {
    "kind": "benchmark",
    "model": {"size": "tiny"},
    "batch_size": 1,
    "context_length": 8,
    "mode": "forward",
    "warmup_steps": 1,
    "measure_steps": 3,
    "device": "cpu",
}


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A server and a worker that know the kind of tests/plugins/staged_kind."""
    folder = tmp_path_factory.mktemp("units")
    (folder / "misbehave").mkdir()
    variables = environment(folder)
    path = os.pathsep.join([str(PLUGINS / "staged_kind"), variables["PYTHONPATH"]])
    with ForkedService(folder / "service", {**variables, "PYTHONPATH": path}) as running:
        running.start_server()
        running.start_worker(UNITS="forked")
        try:
            yield running
        finally:
            print(running.logs()[-20_000:])


@pytest.fixture(scope="module")
def client(staged: Service) -> httpx.Client:
    return staged.client()


def run(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    return wait_for_job(client, submit(client, {"spec": {"kind": "staged", **fields}}))


@pytest.fixture(scope="module")
def succeeded(client: httpx.Client) -> dict[str, Any]:
    return run(client)


@pytest.fixture(scope="module")
def crashed(client: httpx.Client) -> dict[str, Any]:
    return run(client, crash_at=2)


def read(client: httpx.Client, url: str) -> str:
    return client.get(url).raise_for_status().text


def page(client: httpx.Client, url: str) -> dict[str, Any]:
    found: dict[str, Any] = client.get(url).raise_for_status().json()
    return found


class TestSucceeded:
    def test_units_are_listed_with_what_is_theirs(self, client: httpx.Client, succeeded: dict[str, Any]) -> None:
        assert (succeeded["state"], succeeded["error"]) == ("succeeded", None)
        units = get(client, f"/jobs/{succeeded['id']}/units")
        assert [(unit["unit_index"], unit["title"], unit["outcome"]) for unit in units] == [
            (0, "first stage", "succeeded"),
            (1, "second stage", "succeeded"),
        ]
        assert all(unit["environment"]["software"]["python"] for unit in units)
        assert [unit["validity"]["counts"] for unit in units] == [{"valid": 2, "suspect": 1}] * 2
        assert succeeded["validity"]["counts"] == {"valid": 4, "suspect": 2}
        assert [(check["case"], check["unit"]) for check in succeeded["validity"]["checks"]] == [
            ("length 2", "first stage"),
            ("length 2", "second stage"),
        ]

    def test_measurements_name_their_unit_and_verdict(self, client: httpx.Client, succeeded: dict[str, Any]) -> None:
        rows = page(client, f"/jobs/{succeeded['id']}/measurements")["rows"]
        assert [(row["unit_index"], row["unit_title"], row["length"], row["validity"]) for row in rows] == [
            (index, title, length, "suspect" if length == 2 else "valid")
            for index, title in enumerate(["first stage", "second stage"])
            for length in (1, 2, 3)
        ]
        assert len({row["case_key"] for row in rows}) == 3, "both stages measure the same cases"

    def test_artifacts_of_one_name_are_both_kept(self, client: httpx.Client, succeeded: dict[str, Any]) -> None:
        artifacts = get(client, f"/jobs/{succeeded['id']}/artifacts")
        assert {one["name"]: read(client, one["url"]) for one in artifacts} == {
            "trace.json": '{"of": "first stage"}',
            "trace-unit-1.json": '{"of": "second stage"}',
            "report.txt": "the program ended with 0\n",
        }

    def test_tables_of_units_are_one(self, client: httpx.Client, succeeded: dict[str, Any]) -> None:
        tables = {table["name"]: table for table in get(client, f"/jobs/{succeeded['id']}/tables")}
        assert {name: table["rows"] for name, table in tables.items()} == {
            "checks": 6,
            "counters": 5,
            "dtypes": 6,
            "operations": 4,
        }
        operations = page(client, tables["operations"]["url"] + "?sort=-time")["rows"]
        expected = [(0, "add", 1.5, 3), (1, "add", 1.5, 3), (0, "copy", 0.5, 1), (1, "copy", 0.5, 1)]
        assert [tuple(row.values()) for row in operations] == expected

    def test_what_the_wrapper_wrote_is_collected(self, client: httpx.Client, succeeded: dict[str, Any]) -> None:
        rows = page(client, f"/jobs/{succeeded['id']}/tables/counters")["rows"]
        assert [row["word"] for row in rows] == ["the", "program", "ended", "with", "0"]
        log = read(client, f"/jobs/{succeeded['id']}/logs")
        assert "first stage in process" in log, "output passes through the wrapper"


class TestCrashed:
    def test_what_was_reported_before_is_kept_as_partial(self, client: httpx.Client, crashed: dict[str, Any]) -> None:
        assert (crashed["state"], crashed["error"]["code"]) == ("failed", "crashed")
        assert crashed["error"]["signal"] == "SIGSEGV"
        job = f"/jobs/{crashed['id']}"
        units = get(client, f"{job}/units")
        assert [(unit["title"], unit["outcome"], unit["partial"]) for unit in units] == [
            ("first stage", "succeeded", True),
            ("second stage", "crashed", True),
        ]
        assert "SIGSEGV" in units[1]["reason"]
        rows = page(client, f"{job}/measurements")["rows"]
        assert [(row["unit_index"], row["length"], row["partial"]) for row in rows] == [
            (0, 1, True),
            (0, 2, True),
            (0, 3, True),
            (1, 1, True),
        ]
        tables = {table["name"]: table for table in get(client, f"{job}/tables")}
        assert tables.keys() == {"checks", "counters", "dtypes", "operations"}
        assert all(table["partial"] for table in tables.values())
        assert {row["unit_index"] for row in page(client, tables["operations"]["url"])["rows"]} == {0, 1}
        names = {one["name"] for one in get(client, f"{job}/artifacts")}
        assert names == {"trace.json", "trace-unit-1.json", "report.txt"}

    def test_a_unit_that_goes_on_stays_one_unit(self, client: httpx.Client) -> None:
        job = run(client, crash_at=2, goes_on=True)
        assert (job["state"], job["error"]) == ("succeeded", None)
        units = get(client, f"/jobs/{job['id']}/units")
        assert [(unit["unit_index"], unit["title"], unit["outcome"]) for unit in units] == [
            (0, "first stage", "succeeded"),
            (1, "second stage", "succeeded"),
        ]
        assert "SIGSEGV" in units[1]["reason"]
        rows = page(client, f"/jobs/{job['id']}/measurements")["rows"]
        assert [(row["unit_index"], row["length"]) for row in rows] == [
            (unit, length) for unit in (0, 1) for length in (1, 2, 3)
        ]
        log = read(client, f"/jobs/{job['id']}/logs")
        assert "second stage, the rest in process" in log


def test_a_spec_is_compared_with_itself(client: httpx.Client) -> None:
    spec = {"kind": "compare", "baseline": COMPARED, "candidate": COMPARED, "replicates": 2}
    job = wait_for_job(client, submit(client, {"spec": spec}), timeout_s=180)
    assert (job["state"], job["error"]) == ("succeeded", None)
    units = get(client, f"/jobs/{job['id']}/units")
    order = turns(2, job["spec"]["seed"])
    assert job["spec"]["seed"] is not None, "drawn at submission, and kept"
    assert [(unit["unit_index"], unit["side"]) for unit in units] == list(enumerate(order))
    titles = [f"{side}, replicate {order[: at + 1].count(side)} of 2" for at, side in enumerate(order)]
    assert [unit["title"] for unit in units] == titles
    rows = page(client, f"/jobs/{job['id']}/measurements")["rows"]
    assert {row["unit_index"] for row in rows} == set(range(4))
    alone = wait_for_job(client, submit(client, {"spec": COMPARED}))
    (key,) = {row["case_key"] for row in page(client, f"/jobs/{alone['id']}/measurements")["rows"]}
    assert {row["case_key"] for row in rows} == {key}, "both sides keep their case's key"
    sides = page(client, f"/tables?job={job['id']}")["rows"]
    assert [row["side"] for row in sides] == ["baseline", "candidate"]
    assert [row["forward_ms_n"] for row in sides] == [2, 2]
    environments = {unit["unit_index"]: unit["environment"] for unit in units}
    assert len(environments) == 4
    assert all(environments.values())
