"""Compressed answers: what is, and what must not be."""

from typing import Any

GZIP = {"Accept-Encoding": "gzip"}


def raw(site: Any, path: str, **headers: str) -> tuple[Any, bytes]:
    """Return an answer and its body as it was sent."""
    with site.http.stream("GET", path, headers={**GZIP, **headers}) as answer:
        return answer, b"".join(answer.iter_raw())


def test_pages_tables_and_scripts_are_compressed(site: Any) -> None:
    script = "/static/vendor/plotly/plotly-cartesian.min.js?v=1"
    for path, most in (("/ui/new", 0.25), ("/openapi.json", 0.25), (script, 0.4)):
        answer, body = raw(site, path)
        assert answer.headers["content-encoding"] == "gzip", path
        assert "accept-encoding" in answer.headers["vary"].lower()
        plain = site.http.get(path, headers={"Accept-Encoding": "identity"})
        assert "content-encoding" not in plain.headers
        assert len(body) < most * len(plain.content), path
        assert site.http.get(path, headers=GZIP).content == plain.content
    tag = site.http.get(script, headers=GZIP).headers["etag"]
    assert tag.startswith("W/"), "the bytes differ"
    assert site.http.get(script, headers={**GZIP, "If-None-Match": tag}).status_code == 304
    assert site.http.head("/ui/new", headers=GZIP).status_code == 200


def test_files_with_ranges_are_sent_as_they_are_stored(site: Any) -> None:
    text = b"0123456789" * 1000
    job_id = site.run(artifacts=[site.stored(text, "trace.json", "application/json")])
    for wanted, status, content in (("", 200, text), ("bytes=3-5", 206, b"345")):
        answer, body = raw(site, f"/jobs/{job_id}/artifacts/trace.json", **({"Range": wanted} if wanted else {}))
        assert (answer.status_code, body) == (status, content)
        assert "content-encoding" not in answer.headers
