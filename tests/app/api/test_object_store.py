"""A server whose files are on an object store."""

import hashlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.app.api.files import file_of_a_job
from tests.object_stores import SECRET, Bucket


@pytest.fixture
def stored(bucket: Bucket, serve: Callable[..., Any], tmp_path: Path) -> Iterator[Any]:
    with serve(tmp_path / "data", artifacts_url=bucket.url, busy_timeout_s=2.0) as site:
        yield site


@pytest.fixture
def content(rng: random.Random) -> bytes:
    return rng.randbytes(10_000)


@pytest.fixture
def url(stored: Any, content: bytes, tmp_path: Path) -> str:
    """The URL of a job's file."""
    return file_of_a_job(stored, content, tmp_path)


def test_no_client_takes_a_changed_file_for_whole(stored: Any, url: str, content: bytes, bucket: Bucket) -> None:
    [name] = bucket.names()
    bucket.request("PUT", name, content[::-1])
    with pytest.raises(httpx.RemoteProtocolError):
        stored.http.get(url)


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


def test_uploaded_code(stored: Any, bucket: Bucket) -> None:
    source = b"def attention(q, k, v, is_causal):\n    return v\n"
    path = f"/files/{hashlib.sha256(source).hexdigest()}"
    assert [stored.http.put(path, content=source).status_code for _ in range(2)] == [201, 200]
    assert stored.http.get(path).content == source
    assert len(bucket.names()) == 1


def test_deleting_a_job_deletes_its_files(stored: Any, url: str, bucket: Bucket) -> None:
    assert len(bucket.names()) == 1
    assert stored.http.delete(url.partition("/artifacts")[0]).status_code == 204
    assert bucket.names() == set()
