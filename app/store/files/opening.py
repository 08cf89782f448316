"""Opens the store of files that the settings name."""

from __future__ import annotations

from app.settings import Settings
from app.store.database.engine import Database
from app.store.database.private import prepare_data_folder
from app.store.files.artifacts import ArtifactFiles
from app.store.files.store import FileStore


def open_files(settings: Settings, database: Database) -> FileStore:
    """Return the store of FLOPWATCH_ARTIFACTS_URL, for the files of this database.

    Raises CannotRunHere when it cannot be used here. Whether an object store answers is not asked.
    """
    if settings.object_store_url is not None:
        from app.store.files.objects import ObjectFiles  # with a folder, obstore need not be installed

        return ObjectFiles(settings.object_store_url, database)
    if settings.artifacts_url is not None:
        prepare_data_folder(settings.artifacts_dir, "FLOPWATCH_ARTIFACTS_URL")
    return ArtifactFiles(settings.artifacts_dir)
