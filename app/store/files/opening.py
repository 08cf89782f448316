"""Opens the store of files that the settings name."""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from app.errors import CannotRunHere, StoreUnreachable
from app.settings import Settings
from app.store.database.engine import Database
from app.store.database.moved import NOTE
from app.store.database.private import prepare_data_folder
from app.store.files.artifacts import ArtifactFiles
from app.store.files.store import FileStore

if TYPE_CHECKING:
    from app.store.files.objects import ObjectFiles

logger = logging.getLogger(__name__)


def open_files(settings: Settings, database: Database, *, claim: bool = False, dry: bool = False) -> FileStore:
    """Return the store of FLOPWATCH_ARTIFACTS_URL, for the files of this database; `claim` makes it their owner; with
    `dry` nothing is written, not even a first note of the owner. Raises CannotRunHere when it cannot be used here, or
    belongs to another database. An object store that does not answer is not asked whose it is."""
    files = _opened(settings, database)
    if claim:
        files.refuse_empty(database)
        files.claim(database, anew=True)
    with suppress(StoreUnreachable):
        files.refuse_foreign(database, dry=dry)
    if not dry and isinstance(files, ArtifactFiles) and not str(settings.resolved_database_url).startswith("sqlite"):
        logger.warning(
            "%s is a folder of this host: if workers of other hosts share the database, nobody can read their files"
            " before FLOPWATCH_ARTIFACTS_URL is an object store",
            settings.artifacts_dir,
        )
    folder = settings.data_dir / "artifacts"
    if not dry and settings.artifacts_url is not None and not (folder / NOTE).exists():
        # For a process that lacks the database's URL (see moved.py). What the process stores there belongs elsewhere.
        note = replace(files.owner_for(database), store="elsewhere")
        ArtifactFiles(folder).write_note(json.dumps(asdict(note)).encode())
    return files


def _opened(settings: Settings, database: Database) -> ArtifactFiles | ObjectFiles:
    if settings.object_store_url is not None:
        from app.store.files.objects import ObjectFiles  # with a folder, obstore need not be installed

        return ObjectFiles(settings.object_store_url, database)
    files = ArtifactFiles(settings.artifacts_dir)
    if settings.artifacts_url is not None:
        prepare_data_folder(settings.artifacts_dir, "FLOPWATCH_ARTIFACTS_URL")
        try:
            files.check_locks()
        except OSError as error:
            raise CannotRunHere(
                f"FLOPWATCH_ARTIFACTS_URL: {error.filename}, the locks beside the folder, cannot be opened:"
                f" {error.strerror}. Name a folder inside of it, {settings.artifacts_dir / 'artifacts'}."
            ) from error
    return files
