"""Opening the store of files that the settings name."""

from app.settings import Settings
from app.store.files.opening import open_files


def test_a_local_folder_beside_a_shared_database_is_warned_of_once(database, tmp_path, caplog) -> None:
    """`flopwatch serve` looks first whether it can open the files (`dry`); then the server opens them."""
    settings = Settings(data_dir=tmp_path, database_url="postgresql://db.example/flopwatch")
    open_files(settings, database, dry=True)
    assert not caplog.records
    open_files(settings, database)
    [record] = caplog.records
    assert "is a folder of this host" in record.message
