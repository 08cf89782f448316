"""Health, metrics, workers, documentation, the token, and requests from other sites."""

import base64
import json
import os
import re
from importlib.metadata import version
from typing import Any

import pytest
from pydantic import TypeAdapter

from app.api import schemas
from app.main import create_app
from app.settings import Settings
from app.specs import KINDS
from tests.app.conftest import TINY
from tools.waiting import wait_until


def test_health(site: Any) -> None:
    assert site.http.get("/healthz").json() == {"status": "ok", "version": version("flopwatch")}
    assert site.http.get("/readyz").json() == {"status": "ready"}


def test_the_log_is_shortened_and_unreferenced_files_are_removed_again_and_again(serve, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("app.api.services.UNREFERENCED_PERIOD_S", 0.01)
    monkeypatch.setattr("app.api.services.CHECKPOINT_S", 0.01)
    orphan = tmp_path / "orphan"
    with serve(tmp_path) as site:
        log = site.services.settings.data_dir / "flopwatch.sqlite3-wal"
        site.submit()
        wait_until(lambda: log.stat().st_size == 0, "the log to be shortened")
        for content in ("first", "second"):
            orphan.write_text(content)
            sha256, _ = site.services.files.put(orphan)
            stored = site.services.files.open_path(sha256)
            os.utime(stored, (0, 0))
            site.services.files.release([sha256])
            wait_until(lambda stored=stored: not stored.exists(), timeout_s=20, what=f"the sweep of the {content}")


def test_answers_have_the_documented_shapes(site: Any, measured: Any) -> None:
    sweep = site.http.post("/sweeps", json={"base": TINY, "grid": {"seed": [1, 2]}, "priority": 10}).json()
    claim = site.worker.claim()
    site.worker.finish(claim, measurements=[measured("forward_ms", 1.0, model="tiny")])
    job = site.job(claim.job_id)
    shapes: list[tuple[Any, Any]] = [
        (schemas.Job, job),
        (schemas.Page[schemas.Job], site.http.get("/jobs").json()),
        (schemas.Page[schemas.Event], site.http.get(job["links"]["events"]).json()),
        (schemas.Page[schemas.Attempt], site.http.get(job["links"]["attempts"]).json()),
        (schemas.Page[schemas.Artifact], site.http.get(job["links"]["artifacts"]).json()),
        (schemas.Measurements, site.http.get(job["links"]["measurements"]).json()),
        (schemas.Sweep, sweep),
    ]
    for shape, answer in shapes:
        TypeAdapter(shape).validate_python(answer, strict=True)
        if shape in (schemas.Job, schemas.Sweep):
            assert set(answer) == set(shape.__annotations__)


def test_openapi_declares_the_headers_that_routes_read(site: Any) -> None:
    paths = site.http.get("/openapi.json").json()["paths"]
    declared = {
        (method, path): {one["name"] for one in operation.get("parameters", ()) if one["in"] == "header"}
        for path, operations in paths.items()
        for method, operation in operations.items()
    }
    assert {route: names for route, names in declared.items() if names} == {
        ("post", "/jobs"): {"Flopwatch-User", "Idempotency-Key", "Prefer"},
        ("post", "/sweeps"): {"Flopwatch-User", "Idempotency-Key"},
        ("put", "/baselines/{name}"): {"Flopwatch-User"},
        ("get", "/jobs/{job_id}"): {"If-None-Match"},
        ("get", "/jobs/{job_id}/events"): {"Last-Event-ID"},
        ("get", "/jobs/{job_id}/artifacts/{name}"): {"Range", "If-None-Match"},
        ("get", "/files/{sha256}"): {"If-None-Match"},
    }


def test_no_two_schemas_of_openapi_have_one_title(site: Any) -> None:
    answer = site.http.get("/openapi.json")
    schemas = answer.json()["components"]["schemas"]
    titles = [schema["title"] for schema in schemas.values() if "title" in schema]
    assert len(titles) == len(set(titles))
    assert {"JobPage", "SweepPage", "WorkerPage"} <= set(schemas)
    assert set(re.findall(r'"\$ref":"#/components/schemas/([^"]+)"', answer.text)) <= set(schemas)


class TestOpenapiForGenerators:
    """What programs that generate clients need."""

    @pytest.fixture
    def schema(self, site: Any) -> dict[str, Any]:
        return site.http.get("/openapi.json").json()

    def operations(self, schema: dict[str, Any]) -> dict[str, dict[str, Any]]:
        return {
            f"{method.upper()} {path}": operation
            for path, operations in schema["paths"].items()
            for method, operation in operations.items()
        }

    def test_specs_name_their_kind(self, schema: dict[str, Any]) -> None:
        for kind in KINDS.values():
            assert "kind" in schema["components"]["schemas"][kind.__name__]["required"]

    def test_operation_ids_are_names(self, schema: dict[str, Any]) -> None:
        ids = {route: operation["operationId"] for route, operation in self.operations(schema).items()}
        assert (ids["POST /jobs"], ids["GET /jobs/{job_id}"]) == ("submit_job", "get_job")
        assert len(set(ids.values())) == len(ids)
        assert [name for name in ids.values() if not re.fullmatch(r"[a-z]+(_[a-z]+){0,2}", name)] == []

    def test_problems_have_one_schema(self, site: Any, schema: dict[str, Any]) -> None:
        for route, operation in self.operations(schema).items():
            content = operation["responses"]["default"]["content"]
            assert content == {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}, route
            assert "422" not in operation["responses"], route
        assert set(schema["components"]["schemas"]["Problem"]["required"]) <= set(site.http.get("/jobs/0").json())

    def test_times_say_so(self, schema: dict[str, Any]) -> None:
        shapes = schema["components"]["schemas"]
        times = {
            (shape, name): field
            for shape in ("Job", "Sweep", "Attempt", "Event", "Worker")
            for name, field in shapes[shape]["properties"].items()
            if name.endswith("_at")
        }
        assert len(times) > 8
        for place, field in times.items():
            assert "date-time" in [one.get("format") for one in field.get("anyOf", [field])], place

    @pytest.mark.parametrize("route", ["GET /tables", "GET /compare", "GET /jobs/{job_id}/tables/{name}"])
    def test_tables_have_every_media_type(self, schema: dict[str, Any], route: str) -> None:
        content = self.operations(schema)[route]["responses"]["200"]["content"]
        assert content.keys() == {"application/json", "text/csv", "text/markdown", "application/x-latex", "text/html"}
        assert content["text/csv"] == {"schema": {"type": "string"}}
        assert "$ref" in content["application/json"]["schema"]

    def test_the_token_is_a_security_scheme(self, schema: dict[str, Any]) -> None:
        schemes = schema["components"]["securitySchemes"]
        assert {name: one["scheme"] for name, one in schemes.items()} == {"bearer": "bearer"}
        assert (schema["security"], schema["paths"]["/healthz"]["get"]["security"]) == ([{"bearer": []}, {}], [])


@pytest.mark.parametrize(
    ("said", "status"),
    [
        ("application/json", 201),
        ("Application/JSON; charset=utf-8", 201),
        (None, 201),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("", 201),
    ],
)
def test_a_body_of_another_content_type_is_refused(site: Any, said: str | None, status: int) -> None:
    before, headers = site.rows(), {} if said is None else {"Content-Type": said}
    answer = site.http.post("/jobs", content=json.dumps({"spec": TINY}), headers=headers)
    assert answer.status_code == status
    if status == 415:
        assert answer.json()["code"] == "unsupported_media_type"
        assert "application/json" in answer.json()["detail"]
        assert site.rows() == before


def test_docs_need_no_other_host(site: Any) -> None:
    page = site.http.get("/docs")
    assert page.status_code == 200
    references = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(references) >= 4
    for reference in references:
        assert reference.startswith("/")
        assert site.http.get(reference).status_code == 200, reference
    assert "default-src 'none'" in page.headers["content-security-policy"]


@pytest.fixture(scope="module")
def guarded(serve: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    with serve(tmp_path_factory.mktemp("guarded"), api_token="s3cret-ü") as site:
        yield site


TOKEN = "s3cret-ü".encode()


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer"},
        {"Authorization": "Digest s3cret"},
        {b"Authorization": b"Bearer \xe9"},
        {"Authorization": "Basic " + base64.b64encode("user:s3cret-ü".encode()).decode()},
        {"Cookie": "flopwatch_session=s3cret"},
    ],
    ids=str,
)
def test_without_the_token(guarded: Any, headers: Any) -> None:
    before = guarded.rows()
    paths = ("/jobs", "/docs", "/openapi.json", "/metrics", "/readyz", "/nothing", "/")
    for path in paths:
        response = guarded.http.get(path, headers=headers)
        assert (response.status_code, response.json()["code"]) == (401, "unauthorized"), path
        assert response.headers["www-authenticate"].startswith("Bearer")
    page = guarded.http.get("/ui", headers=headers)
    assert (page.status_code, page.headers["content-type"]) == (401, "text/html; charset=utf-8")
    assert guarded.http.post("/jobs", json={"spec": TINY}, headers=headers).status_code == 401
    assert (guarded.http.get("/healthz", headers=headers).status_code, guarded.rows()) == (200, before)


CROSS_SITE = [
    ({"Sec-Fetch-Site": "cross-site"}, False),
    ({"Sec-Fetch-Site": "same-site"}, False),
    ({"Sec-Fetch-Site": "same-origin"}, True),
    ({"Sec-Fetch-Site": "none"}, True),
    ({"Origin": "https://evil.example"}, False),
    ({"Origin": "null"}, False),
    ({"Origin": "http://[::1"}, False),
    ({"Origin": ""}, False),
    ({"Origin": "{url}"}, True),
    ({"Referer": "https://evil.example/page"}, False),
    ({"Referer": "{url}/ui/new"}, True),
    ({"Origin": "{url}", "Referer": "https://evil.example/"}, True),
    ({}, True),
]


@pytest.mark.parametrize(("headers", "allowed"), CROSS_SITE, ids=[str(headers) for headers, _ in CROSS_SITE])
def test_requests_that_another_site_sends(site: Any, headers: dict[str, str], *, allowed: bool) -> None:
    sent = {name: value.replace("{url}", site.url) for name, value in headers.items()}
    before = site.rows()
    response = site.http.post("/jobs", json={"spec": TINY}, headers=sent)
    if allowed:
        assert response.status_code == 201
    else:
        assert (response.status_code, response.json()["code"]) == (403, "cross_site_request")
        assert site.rows() == before
    assert site.http.get("/jobs", headers=sent).status_code == 200, "reading is what links do"


def test_nothing_is_built_before_the_start(tmp_path: Any) -> None:
    create_app(Settings(data_dir=tmp_path / "data"))
    assert not (tmp_path / "data").exists()
