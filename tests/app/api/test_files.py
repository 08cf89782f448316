"""Uploaded code: what is taken, who may run it, where it is shown, and how long it stays."""

import hashlib
import io
import zipfile
from datetime import timedelta
from typing import Any

import pytest

from app.specs._code import RUNS_CODE
from app.store.files.artifacts import ArtifactFiles
from app.store.keeping.pruning import KEEP_UNUSED_CODE, Pruning, Retention
from app.store.tables import utc_now

SOURCE = b"def attention(q, k, v, is_causal):\n    return v  # \xc3\xbc\n"
ABLE = frozenset({"attention:eager", "attention:sdpa_flash", "model:transformer_lm"})
KINDS = frozenset({"attention", "benchmark", "compare"})


def sha256_of(source: bytes) -> str:
    return hashlib.sha256(source).hexdigest()


def upload(site: Any, source: bytes = SOURCE) -> str:
    assert site.http.put(f"/files/{sha256_of(source)}", content=source).status_code in (200, 201)
    return sha256_of(source)


def spec_of(sha256: str, **fields: Any) -> dict[str, Any]:
    return {"kind": "attention", "code": {"sha256": sha256, "function": "attention"}, **fields}


@pytest.fixture
def able_site(fresh_site: Any) -> Any:
    """A site with a worker that may run uploaded code."""
    fresh_site.worker.register(KINDS, ABLE | {RUNS_CODE})
    return fresh_site


class TestUploading:
    def test_a_file_is_kept_and_shown_as_plain_text(self, site: Any) -> None:
        source = SOURCE + b"# that no other test has uploaded\n"
        sha256 = sha256_of(source)
        first = site.http.put(f"/files/{sha256}", content=source)
        assert (first.status_code, first.headers["location"]) == (201, f"/files/{sha256}")
        assert first.json() == {"sha256": sha256, "size": len(source), "url": f"/files/{sha256}"}
        assert site.http.put(f"/files/{sha256}", content=source).status_code == 200
        shown = site.http.get(f"/files/{sha256}")
        assert shown.content == source
        assert shown.headers["content-type"] == "text/plain; charset=utf-8"
        assert shown.headers["x-content-type-options"] == "nosniff"
        assert site.http.get(f"/files/{sha256}", headers={"If-None-Match": shown.headers["etag"]}).status_code == 304

    def test_a_packed_folder_is_taken_and_returned_as_it_is(self, site: Any) -> None:
        content = b"PK\x03\x04 and what only a worker looks into \xff\0"
        shown = site.http.get(f"/files/{upload(site, content)}")
        assert (shown.content, shown.headers["content-type"]) == (content, "application/zip")

    @pytest.mark.parametrize("name", ["n" * 300, "", "../out.py", "/x.py", "d/" * 2000 + "x.py"], ids=lambda it: it[:9])
    def test_a_folder_with_an_impossible_name_is_refused(self, site: Any, name: str) -> None:
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w") as archive:
            archive.writestr(zipfile.ZipInfo("fine.py"), "x = 1\n")
            archive.writestr(zipfile.ZipInfo(name), "x = 1\n")
        answer = site.http.put(f"/files/{sha256_of(content.getvalue())}", content=content.getvalue())
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")
        assert f"{name[:80]!r}" in answer.json()["detail"]

    def test_a_damaged_file_is_an_error_until_it_is_uploaded_again(self, site: Any) -> None:
        source = SOURCE + b"# that a disk changes\n"
        stored = site.services.files.open_path(upload(site, source))
        stored.write_bytes(source.replace(b"return v", b"return k"))
        answer = site.http.get(f"/files/{sha256_of(source)}")
        assert (answer.status_code, answer.json()["code"]) == (500, "damaged")
        assert f"PUT /files/{sha256_of(source)}" in answer.json()["detail"]
        upload(site, source)
        assert site.http.get(f"/files/{sha256_of(source)}").content == source
        assert stored.stat().st_mode & 0o077 == 0
        assert list(stored.parents[1].joinpath("incoming").iterdir()) == []

    @pytest.mark.parametrize(
        ("content", "words"),
        [(b"\xff\xfe", "not UTF-8"), (b" \n", "empty"), (b"x = '\0'", "NUL")],
        ids=["not text", "empty", "with NUL"],
    )
    def test_a_file_that_is_no_source_text_is_refused(self, site: Any, content: bytes, words: str) -> None:
        answer = site.http.put(f"/files/{sha256_of(content)}", content=content)
        assert answer.status_code == 422
        assert words in answer.json()["detail"]
        assert site.http.get(f"/files/{sha256_of(content)}").status_code == 404

    def test_another_content_than_the_path_says_is_refused(self, site: Any) -> None:
        answer = site.http.put(f"/files/{'0' * 64}", content=b"pass\n")
        assert answer.status_code == 422
        assert sha256_of(b"pass\n") in answer.json()["detail"]
        assert site.http.get(f"/files/{'0' * 64}").status_code == 404

    def test_a_file_may_be_larger_than_other_bodies_up_to_a_limit(self, site, monkeypatch) -> None:
        limit = 2 * site.services.settings.max_body_bytes
        monkeypatch.setattr("app.api.files.MAX_BYTES", limit)
        for size, status in ((limit, 201), (limit + 1, 413)):
            content = b"#" * size
            assert site.http.put(f"/files/{sha256_of(content)}", content=content).status_code == status


class TestWhoMayRunIt:
    def test_it_is_refused_with_the_cure_where_no_worker_may(self, fresh_site: Any) -> None:
        fresh_site.worker.register(KINDS, ABLE)
        answer = fresh_site.http.post("/jobs", json={"spec": spec_of(upload(fresh_site))})
        assert answer.status_code == 422
        (error,) = answer.json()["errors"]
        assert error["pointer"] == "/spec/code"
        assert "with --allow-code" in error["detail"]

    def test_a_comparison_and_a_sweep_are_refused_at_the_field(self, fresh_site: Any) -> None:
        fresh_site.worker.register(KINDS, ABLE)
        side = {"kind": "attention", "implementations": ["eager"]}
        spec = {"kind": "compare", "baseline": side, "candidate": spec_of(upload(fresh_site))}
        refused = fresh_site.http.post("/jobs", json={"spec": spec}).json()
        assert [error["pointer"] for error in refused["errors"]] == ["/spec/candidate/code"]
        swept = {"base": spec_of(upload(fresh_site)), "grid": {"seed": [1, 2]}}
        refused = fresh_site.http.post("/sweeps", json=swept).json()
        assert [error["pointer"] for error in refused["errors"]] == ["/base/code"]

    def test_a_file_that_was_not_uploaded_is_refused(self, able_site: Any) -> None:
        answer = able_site.http.post("/jobs", json={"spec": spec_of("0" * 64)})
        assert answer.status_code == 422
        (error,) = answer.json()["errors"]
        assert error["pointer"] == "/spec/code/sha256"
        assert "PUT /files/0000" in error["detail"]

    def test_only_a_worker_that_may_run_it_claims_it(self, able_site: Any) -> None:
        job = able_site.http.post("/jobs", json={"spec": spec_of(upload(able_site))}).json()
        assert job["waiting"] is None
        able_site.services.registration.set_worker_state(able_site.worker.id, "stopped")
        waiting = able_site.http.get(f"/jobs/{job['id']}").json()["waiting"]
        allow_it = "start `flopwatch up`, or `flopwatch worker`, with --allow-code"
        assert waiting == f"no worker is connected: if none is starting, {allow_it}"
        able_site.worker.id = "other"
        able_site.worker.register(KINDS, ABLE)
        waiting = able_site.http.get(f"/jobs/{job['id']}").json()["waiting"]
        assert "runs uploaded code: start `flopwatch up`, or `flopwatch worker`, with --allow-code" in waiting
        assert able_site.worker.try_claim("attention", can=ABLE) is None
        assert able_site.worker.claim("attention", can=ABLE | {RUNS_CODE}).job_id == job["id"]


class TestJobsWithCode:
    def test_links_lead_to_the_source(self, able_site: Any) -> None:
        sha256 = upload(able_site)
        job = able_site.http.post("/jobs", json={"spec": spec_of(sha256)}).json()
        assert job["links"]["code"] == f"/files/{sha256}"
        side = {"kind": "benchmark"}
        own = {**side, "attention_code": {"sha256": sha256, "function": "attention"}}
        spec = {"kind": "compare", "baseline": side, "candidate": own}
        job = able_site.http.post("/jobs", json={"spec": spec}).raise_for_status().json()
        assert job["links"]["candidate_attention_code"] == f"/files/{sha256}"
        plain = able_site.http.post("/jobs", json={"spec": side}).json()
        assert not [name for name in plain["links"] if "code" in name]

    def test_a_resumed_sweep_keeps_the_file(self, able_site: Any) -> None:
        sha256 = upload(able_site)
        body = {"base": spec_of(sha256), "grid": {"seed": [1, 2]}}
        sweep = able_site.http.post("/sweeps", json=body).raise_for_status().json()
        first = able_site.http.get("/jobs", params={"sweep": sweep["id"]}).json()["data"]
        able_site.http.post(f"/sweeps/{sweep['id']}/cancel").raise_for_status()
        able_site.http.post(f"/sweeps/{sweep['id']}/resume").raise_for_status()
        for job in first:
            able_site.http.delete(f"/jobs/{job['id']}").raise_for_status()
        prune(able_site, after=2 * KEEP_UNUSED_CODE)
        assert able_site.http.get(f"/files/{sha256}").status_code == 200
        able_site.http.post(f"/sweeps/{sweep['id']}/cancel").raise_for_status()
        for job in able_site.http.get("/jobs", params={"sweep": sweep["id"]}).json()["data"]:
            able_site.http.delete(f"/jobs/{job['id']}").raise_for_status()
        prune(able_site, after=2 * KEEP_UNUSED_CODE)
        gone = able_site.http.post(f"/sweeps/{sweep['id']}/resume")
        assert (gone.status_code, "upload it again" in gone.json()["detail"]) == (409, True)

    def test_an_unused_file_goes_after_a_day_and_a_used_one_stays(self, able_site: Any) -> None:
        used, unused = upload(able_site), upload(able_site, b"pass\n")
        job = able_site.http.post("/jobs", json={"spec": spec_of(used)}).json()
        assert prune(able_site, after=KEEP_UNUSED_CODE / 2) == 0
        assert prune(able_site, after=2 * KEEP_UNUSED_CODE) == 1
        assert able_site.http.get(f"/files/{unused}").status_code == 404
        assert able_site.http.get(f"/files/{used}").status_code == 200
        able_site.http.post(f"/jobs/{job['id']}/cancel").raise_for_status()
        able_site.http.delete(f"/jobs/{job['id']}").raise_for_status()
        assert prune(able_site, after=2 * KEEP_UNUSED_CODE) == 1
        assert not list(able_site.services.settings.artifacts_dir.glob("??/*"))

    def test_it_is_no_orphan_to_the_sweep_of_artifacts(self, able_site: Any) -> None:
        sha256 = upload(able_site)
        files = ArtifactFiles(able_site.services.settings.artifacts_dir)
        assert files.remove_unreferenced(able_site.services.database, older_than_s=-10.0) == []
        assert able_site.http.get(f"/files/{sha256}").status_code == 200


def prune(site: Any, *, after: timedelta) -> int:
    """Prune as the server would in some time; returns how many uploaded files went."""
    services = site.services
    pruning = Pruning(services.slices, services.files, Retention.of(services.settings), clock=lambda: utc_now() + after)
    planned = pruning.plan().code_files
    assert pruning.run().code_files == planned
    return planned
