"""Python files that users upload for their jobs (`code` in a spec), stored as the artifacts' files are.

A row of `code_file` keeps a file's content, and rows of `job_code` keep that row. Retention deletes a file that no job
names (see pruning.py).
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, insert, select, update

from app.errors import Conflict, NotFound
from app.specs._code import RUNS_CODE, codes_of
from app.store import tables
from app.store.database.engine import Database
from app.store.files.store import FileStore
from app.store.tables import utc_now

_file, _use = tables.code_file.c, tables.job_code.c


class Uploads:
    """The uploaded files of one database."""

    def __init__(self, database: Database, files: FileStore) -> None:
        self._database = database
        self._files = files

    def put(self, content: bytes) -> tuple[dict[str, Any], bool]:
        """Store a file, or repair it; returns the public file, and True if it is new.

        Raises DiskFull or StorageFailed.
        """
        sha256, size = self._files.put_bytes(content)
        try:
            with self._database.write() as connection:
                self._files.check_kept(connection, sha256)
                row = {"size": size, "put_at": utc_now()}
                known = connection.execute(update(tables.code_file).where(_file.sha256 == sha256).values(row)).rowcount
                if not known:
                    connection.execute(insert(tables.code_file), {"sha256": sha256, **row})
        finally:
            self._files.release([sha256])
        return {"sha256": sha256, "size": size, "url": url_of(sha256)}, not known

    def read(self, sha256: str) -> bytes:
        """Return a file's content. Raises NotFound; Damaged if the disk has another content."""
        with self._database.read() as connection:
            if not existing_files(connection, [sha256]):
                raise NotFound(f"Nobody has uploaded a file with the SHA-256 {sha256}, or no job names it any more.")
        return self._files.read(sha256)

    def known(self, sha256s: Collection[str]) -> set[str]:
        """Return those of the files that are there."""
        with self._database.read() as connection:
            return existing_files(connection, sha256s)


def url_of(sha256: str) -> str:
    """Return the URL at which clients read an uploaded file."""
    return f"/files/{sha256}"


def missing_file_message(sha256: str) -> str:
    """Return a sentence that the file was removed, and how to bring it back."""
    return f"The file {sha256} is not there any more: upload it again (PUT {url_of(sha256)})."


def existing_files(connection: Connection, sha256s: Collection[str]) -> set[str]:
    return set(connection.execute(select(_file.sha256).where(_file.sha256.in_(sha256s))).scalars())


def record_code_use(connection: Connection, jobs: Sequence[Mapping[Any, Any]]) -> None:
    """Record which uploaded files new jobs name, so that the files stay; `jobs` are rows with ids.

    Raises Conflict if a file was removed meanwhile.
    """
    rows = [
        {"job_id": job["id"], "sha256": sha256}
        for job in jobs
        if RUNS_CODE in job["requirements"]
        for sha256 in {sha256 for _, sha256 in codes_of(job["spec"])}
    ]
    if not rows:
        return
    wanted = {row["sha256"] for row in rows}
    if gone := wanted - existing_files(connection, wanted):
        raise Conflict(missing_file_message(min(gone)))
    connection.execute(insert(tables.job_code), rows)
