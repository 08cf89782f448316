"""A server whose files are on an object store."""

import hashlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.store.files import objects
from tests.object_stores import SECRET, Bucket


@pytest.fixture
def stored(bucket: Bucket, serve: Callable[..., Any], tmp_path: Path) -> Iterator[Any]:
    with serve(tmp_path / "data", artifacts_url=bucket.url, busy_timeout_s=2.0) as site:
        yield site


@pytest.fixture
def content(rng: random.Random) -> bytes:
    return rng.randbytes(10_000)


@pytest.fixture
def url(stored: Any, content: bytes) -> str:
    """The URL of a job's file."""
    job_id = stored.run(artifacts=[stored.stored(content, "trace (1).json.gz")])
    return str(stored.http.get(f"/jobs/{job_id}/artifacts").json()["data"][0]["url"])


def test_downloads(stored: Any, url: str, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "PART_BYTES", 3000)

    def get(**headers: str) -> httpx.Response:
        return stored.http.get(url, headers=headers)

    whole = get()
    assert (whole.status_code, whole.content) == (200, content)
    assert whole.headers["etag"] == f'"{hashlib.sha256(content).hexdigest()}"'
    assert whole.headers["content-disposition"] == "attachment; filename*=utf-8''trace%20%281%29.json.gz"
    assert (whole.headers["content-type"], whole.headers["content-length"]) == ("application/gzip", "10000")
    assert whole.headers["x-content-type-options"] == "nosniff"
    for wanted, expected in [("bytes=9990-99999", content[9990:]), ("bytes=2500-6500", content[2500:6501])]:
        part = get(Range=wanted)
        assert (part.status_code, part.content) == (206, expected), wanted
        assert part.headers["content-range"].endswith("/10000")
    head = stored.http.head(url)
    assert (head.status_code, head.content, head.headers["content-length"]) == (200, b"", "10000")


def test_a_store_that_is_cut_off(stored: Any, url: str, content: bytes, bucket: Bucket) -> None:
    assert stored.http.get("/readyz").status_code == 200
    bucket.network.cut()
    for path in ("/readyz", url):
        answer = stored.http.get(path)
        assert (answer.status_code, answer.json()["code"]) == (503, "store_unreachable")
        assert "retry-after" in answer.headers
        assert SECRET not in answer.text
    assert stored.http.delete(url.partition("/artifacts")[0]).status_code == 204, "its files go later"
    bucket.network.mend()
    assert stored.http.get("/readyz").status_code == 200
    stored.services.files.remove_unreferenced(stored.services.database, 3600)
    assert bucket.names() == set()
