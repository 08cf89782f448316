"""/baselines over HTTP: bodies, names, answers; and comparisons with a baseline."""

from typing import Any

import pytest

from app.store.records import UnitRecord
from tests.builders import STEADY


@pytest.fixture
def run(site: Any, measured: Any) -> Any:
    """Run a job of so many processes with these times, and return its id."""

    def job(*times: float, environment: dict[str, Any] | None = None) -> int:
        found = [measured("step_ms", time, unit_index=unit, model="tiny") for unit, time in enumerate(times)]
        units = [UnitRecord(unit, "replicate", "succeeded", environment=environment) for unit in range(len(times))]
        return int(site.run(measurements=found, units=units))

    return job


def test_put_get_list_and_delete(site: Any, run: Any) -> None:
    job = run(*STEADY)
    made = site.http.put("/baselines/first", json={"job": job})
    assert (made.status_code, made.headers["location"]) == (201, "/baselines/first")
    assert (made.json()["jobs"], made.json()["left_out"]) == ([job], [])
    assert site.http.put("/baselines/first", json={"job": job}).status_code == 200
    shown = site.http.get("/baselines/first").json()
    assert [(case["jobs"], case["kind"]) for case in shown["cases"]] == [([job], "benchmark")]
    site.http.put("/baselines/second", json={"job": job})
    # Other tests of this module have baselines, too.
    page = site.http.get("/baselines", params={"after": "firs", "limit": 1}).json()
    assert ([one["name"] for one in page["data"]], page["next"]) == (["first"], "first")
    rest = site.http.get("/baselines", params={"after": "first"}).json()
    names = [one["name"] for one in rest["data"]]
    assert {"first", "second"} & set(names) == {"second"}
    assert names == sorted(names)
    refused = site.http.delete(f"/jobs/{job}")
    assert (refused.status_code, refused.json()["code"]) == (409, "in_baseline")
    assert refused.json()["baselines"] == ["first", "second"]
    for name in ("first", "second"):
        assert site.http.delete(f"/baselines/{name}").status_code == 204
    assert site.http.delete(f"/jobs/{job}").status_code == 204
    assert site.http.get("/baselines/first").status_code == 404


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ({}, ""),
        ({"job": 1, "sweep": 1}, ""),
        ({"job": 0}, "/job"),
        ({"job": "1"}, "/job"),
        ({"jobs": [1]}, "/jobs"),
        ({"sweep": 2**70}, "/sweep"),
    ],
)
def test_wrong_bodies(site: Any, body: dict[str, Any], pointer: str) -> None:
    refused = site.http.put("/baselines/main", json=body)
    assert refused.status_code == 422
    assert [error["pointer"] for error in refused.json()["errors"]] == [pointer]


@pytest.mark.parametrize("name", ["", "-x", "a b", "ä", "a" * 64, "a%2Fb", "a/b"])
def test_names_that_no_baseline_has(site: Any, name: str) -> None:
    for answer in (site.http.get(f"/baselines/{name}"), site.http.put(f"/baselines/{name}", json={"job": 1})):
        assert (answer.status_code, "should match pattern" in answer.json()["detail"]) == (422, True)


def gate(site: Any, name: str, job: int, **query: Any) -> dict[str, Any]:
    asked = {"baseline_name": name, "candidate": job, "fail_above_percent": 5, **query}
    response = site.http.get("/compare", params=asked)
    assert response.status_code == 200, response.text
    return response.json()


def test_the_gate_of_a_comparison_with_a_baseline(site: Any, run: Any) -> None:
    torch = {"software": {"torch": "2.13"}}
    site.http.put("/baselines/gate", json={"job": run(*STEADY, environment=torch)}).raise_for_status()
    same, slower, elsewhere = (
        run(*STEADY[::-1], environment=torch),
        run(*(time * 1.2 for time in STEADY), environment=torch),
        run(*STEADY, environment={"software": {"torch": "2.11"}}),
    )
    outcomes = [gate(site, "gate", job)["gate"]["outcome"] for job in (same, slower, elsewhere)]
    assert outcomes == ["passed", "not_confirmed", "not_comparable"]
    answer = gate(site, "gate", slower)
    assert answer["baseline"]["name"] == "gate"
    assert answer["sentence"].startswith("step_ms: candidate is 1.20× slower, 95 % CI ")
    assert answer["conclusion"] == "worse"
    assert gate(site, "gate", elsewhere)["sentence"] == "not comparable: torch 2.13 against 2.11"
    for query in ({"job": same}, {"baseline": same}):
        asked = {"baseline_name": "gate", "candidate": same, **query}
        assert site.http.get("/compare", params=asked).status_code == 422
    assert site.http.get("/compare", params={"baseline_name": "gate"}).json()["errors"][0]["pointer"] == "/candidate"
