"""/specs, and names that only workers know."""

from typing import Any

import pytest

from app.specs import KINDS, spec_adapter
from tests.app.conftest import TINY


def test_every_kind_is_described(site: Any) -> None:
    page = site.http.get("/specs").json()
    assert [spec["kind"] for spec in page["data"]] == sorted(KINDS)
    for spec in page["data"]:
        assert spec["description"]
        assert spec["schema"]["additionalProperties"] is False
        for name, field in spec["schema"]["properties"].items():
            assert name == "kind" or "description" in field or "$ref" in field, name
        spec_adapter.validate_python(spec["example"])
        for preset in spec["presets"].values():
            spec_adapter.validate_python({"kind": spec["kind"], **preset})


def described(site: Any, kind: str) -> dict[str, Any]:
    [found] = [spec for spec in site.http.get("/specs").json()["data"] if spec["kind"] == kind]
    return dict(found)


def test_names_are_free_until_a_worker_registers(fresh_site: Any) -> None:
    site = fresh_site

    def answer(**fields: Any) -> Any:
        return site.http.post("/jobs", json={"spec": TINY | fields})

    assert answer(attention="mine").status_code == 201
    assert "enum" not in described(site, "benchmark")["schema"]["properties"]["attention"]

    site.worker.register(capabilities=frozenset({"attention:eager", "attention:flex", "model:transformer_lm"}))
    before = site.rows()
    for fields, pointer, known in [
        ({"attention": "mine"}, "/spec/attention", "eager, flex"),
        ({"model": {"size": "tiny", "name": "other"}}, "/spec/model/name", "transformer_lm"),
    ]:
        [error] = answer(**fields).json()["errors"]
        assert (error["pointer"], known in error["detail"]) == (pointer, True)
    assert site.rows() == before
    assert answer(attention="flex").status_code == 201

    schema = described(site, "benchmark")["schema"]
    assert schema["properties"]["attention"]["enum"] == ["eager", "flex"]
    assert schema["$defs"]["ModelSpec"]["properties"]["name"]["enum"] == ["transformer_lm"]
    assert described(site, "attention")["schema"]["properties"]["implementations"]["items"]["enum"] == ["eager", "flex"]

    sweep = site.http.post("/sweeps", json={"base": TINY, "grid": {"attention": ["eager", "mine"]}})
    assert [error["pointer"] for error in sweep.json()["errors"]] == ["/grid/attention/1"]


def test_names_are_looked_for_where_they_are_marked(fresh_site: Any) -> None:
    """Not where a value happens to be the same: a model may have the name of an attention."""
    site = fresh_site
    capabilities = frozenset({"attention:eager", "attention:triton", "model:transformer_lm", "model:triton"})
    site.worker.register(kinds=frozenset({"attention", "benchmark", "compare"}), capabilities=capabilities)

    def errors(spec: dict[str, Any]) -> list[tuple[str, str]]:
        response = site.http.post("/jobs", json={"spec": spec})
        assert response.status_code in (201, 422), response.text
        return [(error["pointer"], error["detail"]) for error in response.json().get("errors", [])]

    same = {**TINY, "attention": "tiny", "model": {"size": "tiny", "name": "tiny"}}
    assert [pointer for pointer, _ in errors(same)] == ["/spec/model/name", "/spec/attention"]
    grid = {"kind": "attention", "implementations": ["eager", "nothing", "triton", "neither"]}
    assert [pointer for pointer, _ in errors(grid)] == ["/spec/implementations/1", "/spec/implementations/3"]
    [(pointer, detail)] = errors({"kind": "compare", "baseline": TINY, "candidate": {**TINY, "attention": "nothing"}})
    assert pointer == "/spec/candidate/attention"
    assert "eager, triton" in detail
    assert errors({"kind": "compare", "baseline": TINY, "candidate": {**TINY, "attention": "triton"}}) == []
    [(pointer, _), *_] = errors({"kind": "compare", "baseline": {"kind": "kernel"}, "candidate": {"kind": "kernel"}})
    assert pointer == "/spec/baseline/kind"


def test_a_tool_that_no_worker_has_is_refused(fresh_site: Any) -> None:
    site = fresh_site
    profile = {**TINY, "kind": "profile", "device": "cuda"}
    asks = {"nsys": True, "ncu": {"kernels": "flash"}}
    job = site.http.post("/jobs", json={"spec": {**profile, **asks}})
    assert job.status_code == 201, "no worker has registered: the one that claims it decides"
    assert "enum" not in described(site, "profile")["schema"]["properties"]["nsys"]
    names = {"attention:eager", "model:transformer_lm", "tool:ncu"}
    site.worker.register(kinds=frozenset({"profile"}), capabilities=frozenset(names))
    refused = site.http.post("/jobs", json={"spec": {**profile, **asks}})
    assert refused.status_code == 422
    [error] = refused.json()["errors"]
    assert error == {"pointer": "/spec/nsys", "detail": 'No worker has the tool "nsys"; they have: ncu'}
    assert site.http.post("/jobs", json={"spec": {**profile, "ncu": {}}}).status_code == 201
    assert site.http.post("/jobs", json={"spec": {**profile, "nsys": False, "ncu": None}}).status_code == 201
    fields = described(site, "profile")["schema"]["properties"]
    assert (fields["nsys"]["enum"], "enum" in fields["ncu"]) == ([False], False)


def test_a_kind_that_no_worker_runs(fresh_site: Any) -> None:
    fresh_site.worker.register(kinds=frozenset({"profile"}))
    [error] = fresh_site.http.post("/jobs", json={"spec": TINY}).json()["errors"]
    assert error["pointer"] == "/spec/kind"
    assert "profile" in error["detail"]
    assert described(fresh_site, "benchmark")["available"] is False


@pytest.mark.parametrize("state", ["draining", "stopped", "lost"])
def test_names_of_absent_workers_still_count(fresh_site: Any, state: str) -> None:
    fresh_site.worker.register()
    fresh_site.services.registration.set_worker_state(fresh_site.worker.id, state)
    job = fresh_site.http.post("/jobs", json={"spec": TINY})
    assert job.status_code == 201
    assert job.json()["waiting"] is not None
    assert fresh_site.http.post("/jobs", json={"spec": {**TINY, "attention": "x"}}).status_code == 422
