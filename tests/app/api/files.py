"""A job's file, as the API serves it."""

import hashlib
from pathlib import Path
from typing import Any

from app.store.records import StoredArtifact


def file_of_a_job(site: Any, content: bytes, folder: Path) -> str:
    """Run a job that stores a file with this content; returns the file's URL."""
    source = folder / "trace"
    source.write_bytes(content)
    job_id = site.submit(priority=10)["id"]
    claim = site.worker.claim_job(job_id)
    sha256, size = site.services.files.take(source, claim=claim)
    site.worker.finish(
        claim, artifacts=[StoredArtifact(0, "trace (1).json.gz", "trace", "application/gzip", size, sha256)]
    )
    site.services.files.release([sha256])
    [artifact] = site.http.get(f"/jobs/{job_id}/artifacts").json()["data"]
    facts = {"name", "kind", "media_type", "size", "sha256", "attempt", "unit_index", "unit_title", "url"}
    assert set(artifact) == facts
    assert artifact["sha256"] == hashlib.sha256(content).hexdigest()
    return str(artifact["url"])
