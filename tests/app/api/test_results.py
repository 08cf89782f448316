"""Results of a job: log, measurements, files, and tables of them."""

import hashlib
import random
from typing import Any

import httpx
import pytest

from app.store.files import store
from app.store.records import StoredArtifact, UnitRecord
from flopwatch import DownloadFailed, Flopwatch, Refused


@pytest.fixture
def content(rng: random.Random) -> bytes:
    return rng.randbytes(10_000)


@pytest.fixture
def downloadable(site: Any, content: bytes) -> str:
    """The URL of a job's file."""
    job_id = site.run(artifacts=[site.stored(content, "trace (1).json.gz")])
    [artifact] = site.http.get(f"/jobs/{job_id}/artifacts").json()["data"]
    facts = {"name", "kind", "media_type", "size", "sha256", "attempt", "unit_index", "unit_title", "url"}
    assert (set(artifact), artifact["sha256"]) == (facts, hashlib.sha256(content).hexdigest())
    return artifact["url"]


def test_ranges(site: Any, downloadable: str, content: bytes) -> None:
    def get(**headers: str) -> Any:
        return site.http.get(downloadable, headers=headers)

    etag = get().headers["etag"]
    for wanted, expected in [
        ("bytes=0-9", content[:10]),
        ("bytes=10-", content[10:]),
        ("bytes=-7", content[-7:]),
        ("bytes=9990-99999", content[9990:]),
        (f"bytes=9990-{'9' * 5000}", content[9990:]),
        (f"bytes={'0' * 5000}9990-", content[9990:]),
        (f"bytes=-{'9' * 5000}", content),
    ]:
        response = get(Range=wanted)
        assert (response.status_code, response.content) == (206, expected), wanted[:20]
        assert response.headers["content-range"].endswith("/10000")
    assert get(Range="bytes=5-", **{"If-Range": etag}).content == content[5:]
    assert get(Range="bytes=5-", **{"If-Range": '"another"'}).content == content
    for wanted in ("lines=1-2", "bytes=x-", "bytes=", "bytes=9-3", "bytes", "bytes=0-4,-3"):
        assert get(Range=wanted).content == content, wanted
    for wanted in ("bytes=10000-", "bytes=-0", f"bytes={'9' * 5000}-", f"bytes=-{'0' * 5000}"):
        response = get(Range=wanted)
        assert (response.status_code, response.headers["content-range"]) == (416, "bytes */10000")
        assert response.json()["code"] == "range_not_satisfiable"
    response = get(**{"If-None-Match": etag})
    assert (response.status_code, response.content) == (304, b"")


@pytest.mark.parametrize("change", ["reversed", "shorter", "longer", "empty"])
@pytest.mark.parametrize("small", [True, False])
def test_no_client_takes_a_changed_file_for_whole(fresh_site, tmp_path, content, change, small, monkeypatch) -> None:
    if not small:
        monkeypatch.setattr(store, "SMALL_BYTES", 100)
        monkeypatch.setattr(store, "CHUNK_BYTES", 3000)
    file = fresh_site.stored(content, "file")
    job_id = fresh_site.run(artifacts=[file])
    url, path = f"/jobs/{job_id}/artifacts/file", fresh_site.services.files.open_path(file.sha256)
    assert fresh_site.http.get(url).content == content
    changed = {"reversed": content[::-1], "shorter": content[:-1], "longer": content + b"x", "empty": b""}[change]
    path.write_bytes(changed)
    if small or len(changed) != len(content):
        answer = fresh_site.http.get(url)
        assert (answer.status_code, answer.json()["code"]) == (500, "damaged")
        assert fresh_site.http.get(url, headers={"Range": "bytes=0-9"}).status_code == 500
        assert str(path.parent) not in answer.text
    else:
        with pytest.raises(httpx.RemoteProtocolError):
            fresh_site.http.get(url)
    with Flopwatch(fresh_site.url) as client, pytest.raises((DownloadFailed, Refused), match=r"damaged"):
        client.download(job_id, to=tmp_path / "to")
    assert list((tmp_path / "to").iterdir()) == []


@pytest.mark.parametrize(
    ("stored", "sent"),
    [
        ("text/€", "application/octet-stream"),
        ("text/plain\r\nX-Injected: 1", "application/octet-stream"),
        ("", "application/octet-stream"),
        ("text", "application/octet-stream"),
        ("application/vnd.a+json", "application/vnd.a+json"),
        ('application/x; a="b c"; d=e', 'application/x; a="b c"; d=e'),
    ],
)
def test_a_media_type_that_no_header_can_carry(site: Any, stored: str, sent: str) -> None:
    job_id = site.run(artifacts=[site.stored(b"content", "file", stored)])
    response = site.http.get(f"/jobs/{job_id}/artifacts/file")
    assert (response.status_code, response.content) == (200, b"content")
    assert response.headers["content-type"] == sent
    assert "x-injected" not in response.headers


def test_unknown_artifact(site: Any) -> None:
    job_id = site.submit()["id"]
    for name in ("nothing", "..%2f..%2fflopwatch.sqlite3", "%00"):
        response = site.http.get(f"/jobs/{job_id}/artifacts/{name}")
        assert (response.status_code, response.json()["code"]) == (404, "not_found")


def test_deleting_a_job_deletes_its_files(site: Any, downloadable: str, content: bytes) -> None:
    path = site.services.files.open_path(hashlib.sha256(content).hexdigest())
    assert path.is_file()
    assert site.http.delete(downloadable.partition("/artifacts")[0]).status_code == 204
    assert not path.exists()


def test_log(site: Any) -> None:
    job_id = site.submit(priority=10)["id"]
    path = f"/jobs/{job_id}/logs"
    assert site.http.get(path).text == ""
    claim = site.worker.claim_job(job_id)
    site.worker.report(claim, "log", text="so far\n")
    assert site.http.get(path).text == "so far\n"
    site.worker.finish(claim, log="naïve <b>\n")
    response = site.http.get(path)
    assert (response.text, response.headers["content-type"]) == ("naïve <b>\n", "text/plain; charset=utf-8")


def test_measurements_page_by_page(site: Any, measured: Any) -> None:
    rows = [measured("forward_ms", 1.0, context_length=length) for length in range(5)]
    path = f"/jobs/{site.run(measurements=rows)}/measurements"
    first = site.http.get(path, params={"limit": 3}).json()
    rest = site.http.get(path, params={"limit": 3, "after": first["next"]}).json()
    assert [row["context_length"] for row in first["rows"] + rest["rows"]] == list(range(5))
    assert rest["next"] is None
    for query in ("limit=0", "limit=10001", "limit=x", "after=x", "after=-1", "next=3"):
        assert site.http.get(f"{path}?{query}").status_code == 422, query


@pytest.fixture
def profiled(site: Any, measured: Any, reported: Any) -> str:
    """The path of a job that failed in its second unit; both had reported a table and a file."""
    columns = {"kernel": "string", "total_ms": "number", "calls": "integer"}
    job_id = site.run(
        "failed",
        measurements=[measured("forward_ms", 1.0, model="tiny")],
        tables=[
            reported("kernels", [["b|<i>", 2.0, 1], ["a", None, 3], ["c", 1.5, 2]], **columns),
            reported("kernels", [["d", 0.5, 9]], unit_index=1, **columns),
            reported("a/b", [[1]], unit_index=1, x="integer"),
        ],
        units=[UnitRecord(0, "replicate 0", "succeeded"), UnitRecord(1, "replicate 1", "crashed", reason="signal 11")],
        artifacts=[
            StoredArtifact(0, "trace.json.gz", "trace", "application/gzip", 3, "ab" * 32),
            StoredArtifact(1, "trace-unit-1.json.gz", "trace", "application/gzip", 3, "cd" * 32),
        ],
    )
    return f"/jobs/{job_id}"


def test_own_tables(site: Any, profiled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = site.http.get(f"{profiled}/tables").json()
    assert listed["next"] is None
    odd, kernels = listed["data"]
    assert (kernels["name"], kernels["rows"], kernels["units"], kernels["partial"]) == ("kernels", 4, [0, 1], True)
    assert [column["name"] for column in kernels["columns"]] == ["unit_index", "kernel", "total_ms", "calls"]
    table = site.http.get(kernels["url"]).json()
    assert table["columns"] == kernels["columns"]
    assert table["rows"][0] == {"unit_index": 0, "kernel": "b|<i>", "total_ms": 2.0, "calls": 1}
    assert [row["unit_index"] for row in table["rows"]] == [0, 0, 0, 1]
    assert site.http.get(odd["url"]).json()["rows"] == [{"unit_index": 1, "x": 1}], "a name may have a slash"
    assert site.http.get(kernels["url"], params={"unit": 1}).json()["rows"] == table["rows"][3:]
    monkeypatch.setattr("app.api.results.MAX_ROWS", 3)
    page = site.http.get(kernels["url"], params={"limit": 20_000}).json()
    assert (page["rows"], page["next"]) == (table["rows"][:3], "3")
    assert len(site.http.get(kernels["url"], params={"limit": 20_000, "format": "csv"}).text.splitlines()) == 5


@pytest.mark.parametrize(
    ("path", "status", "told"),
    [
        ("kernel", 404, "it has: a/b, kernels"),
        ("kernels?unit=7", 404, "these have: 0, 1"),
        ("kernels?sort=seconds", 422, "unit_index, kernel, total_ms, calls"),
        ("kernels?sort=-seconds", 422, "unit_index, kernel, total_ms, calls"),
        ("kernels?after=x", 422, "match pattern"),
        ("kernels?limit=0", 422, "limit"),
        ("kernels?unit=-1", 422, "unit"),
        ("kernels?unit=99999999999999999999", 422, "unit"),
        ("kernels?format=xml", 422, "format"),
        ("kernels?order=calls", 422, "order"),
    ],
)
def test_an_unknown_table_or_column_is_refused(site: Any, profiled: str, path: str, status: int, told: str) -> None:
    response = site.http.get(f"{profiled}/tables/{path}")
    assert response.status_code == status
    assert told in response.json()["detail"]
