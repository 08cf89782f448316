import os
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine, text
from sqlalchemy.dialects import postgresql
from sqlmodel import SQLModel

from app.errors import CannotRunHere, DatabaseNewer
from app.settings import Settings
from app.store.database import migrating, sqlite
from app.store.database.engine import Database, open_database, open_existing
from app.store.queue.transitions import Queue
from app.store.reading.queries import Reading
from tests.forked import PROJECT, forkserver

SCHEMA = "SELECT name, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite%' AND name != 'alembic_version' ORDER BY name"


def set_revision(settings: Settings, revision: str) -> None:
    database = Database(settings.resolved_database_url)
    with database.write() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = :new"), {"new": revision})
    database.close()


def test_the_upgraded_schema_is_that_of_the_tables(database: Database) -> None:
    with database.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection), SQLModel.metadata) == []


def test_the_upgraded_indexes_are_those_of_the_tables(database: Database, tmp_path: Path) -> None:
    """Also in what Alembic does not compare: order and conditions."""
    engine = create_engine(f"sqlite:///{tmp_path}/created.sqlite3", module=sqlite.driver())
    SQLModel.metadata.create_all(engine)
    indexes = "SELECT name, sql FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL ORDER BY name"
    with engine.connect() as created, database.read() as upgraded:
        expected = created.execute(text(indexes)).all()
        assert upgraded.execute(text(indexes)).all() == expected
    assert "ix_job_claimable" in {name for name, _ in expected}
    engine.dispose()


def test_ids_have_64_bits_on_other_databases_too() -> None:
    dialect = postgresql.dialect()  # type: ignore[no-untyped-call]
    for table in SQLModel.metadata.tables.values():
        for column in table.columns:
            if column.name == "id" or column.name.endswith("_id"):
                kind = column.type.compile(dialect)
                assert kind in ("BIGINT", "VARCHAR"), f"{column} is {kind}"


@pytest.mark.parametrize(
    ("revision", "error", "message"),
    [
        ("9999", DatabaseNewer, r"9999.*upgrade Flopwatch"),
        ("0009", CannotRunHere, r"revision 0009\): begin with an empty data folder"),
    ],
)
def test_a_database_of_another_revision_is_refused(settings, revision, error, message) -> None:
    set_revision(settings, revision)
    file = settings.data_dir / "flopwatch.sqlite3"
    before = file.read_bytes()
    with pytest.raises(error, match=message):
        open_database(settings)
    with pytest.raises(error, match=message):
        open_existing(settings)
    assert file.read_bytes() == before


def test_somebody_elses_database_is_refused(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/other.sqlite3")
    with database.write() as connection:
        connection.exec_driver_sql("CREATE TABLE recipe (id INTEGER)")
    with pytest.raises(CannotRunHere, match=r"not Flopwatch's.*recipe"):
        database.migrate()
    database.close()


@pytest.fixture
def next_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the migrations with one more revision, which rebuilds a table that others refer to."""
    folder = tmp_path / "migrations"
    (folder / "versions").mkdir(parents=True)
    for name in ("env.py", "script.py.mako"):
        (folder / name).write_bytes((migrating.migrations_folder() / name).read_bytes())
    for script in (migrating.migrations_folder() / "versions").glob("*.py"):
        (folder / "versions" / script.name).write_bytes(script.read_bytes())
    newest = migrating.revisions()[-1]
    (folder / "versions" / "9000_rebuild_job.py").write_text(
        f'revision, down_revision = "9000", "{newest}"\n'
        "import sqlalchemy as sa\n"
        "from alembic import op\n"
        "def upgrade():\n"
        '    with op.batch_alter_table("job", recreate="always") as job:\n'
        '        job.alter_column("kind", type_=sa.String(100))\n'
    )
    monkeypatch.setattr(migrating, "migrations_folder", lambda: folder)
    return folder / "versions" / "9000_rebuild_job.py"


def test_an_older_database_is_upgraded_and_keeps_its_rows(settings: Settings, shop: Any, next_revision: Path) -> None:
    claim = shop.running_job(labels={"a": "b"})
    with pytest.raises(CannotRunHere, match="start the server once"):
        open_existing(settings)
    database = open_database(settings)
    reading = Reading(database)
    assert reading.job(claim.job_id)[0]["labels"] == {"a": "b"}
    assert [event["data"]["state"] for event in reading.events(claim.job_id)] == ["queued", "running"]
    with database.read() as connection:
        assert connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one() == "9000"
        # Off while tables were copied: the copy's DROP TABLE would have deleted all that refers to the jobs.
        assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar_one() == 1
    database.close()


def test_a_migration_that_fails_leaves_the_database_as_it_was(settings: Settings, next_revision: Path) -> None:
    with next_revision.open("a") as script:
        script.write("    op.execute(\"INSERT INTO event VALUES (1, 77, 1, 'state', '{}', '2020')\")\n")
    before = Database(settings.resolved_database_url)
    with before.read() as connection:
        schema = connection.execute(text(SCHEMA)).all()
    with pytest.raises(CannotRunHere, match="broke 1 reference"):
        open_database(settings)
    with before.read() as connection:
        assert connection.execute(text(SCHEMA)).all() == schema
        assert connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one() != "9000"
        assert connection.execute(text("SELECT count(*) FROM event")).scalar_one() == 0
    before.close()


def test_processes_that_start_together_migrate_once(tmp_path: Path) -> None:
    settings, gate, output = Settings(data_dir=tmp_path / "data"), tmp_path / "gate", tmp_path / "output"
    program = (
        "import sys, time; from pathlib import Path\n"
        "from app.settings import Settings; from app.store.database.engine import open_database\n"
        "while not Path(sys.argv[2]).exists(): time.sleep(0.001)\n"
        "open_database(Settings.model_validate_json(sys.argv[1])).close()"
    )
    arguments = ["-c", program, settings.model_dump_json(), str(gate)]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    processes = [forkserver().start(arguments, environment, output) for _ in range(4)]
    gate.touch()
    assert [process.wait(60) for process in processes] == [0] * 4, output.read_text()
    database = Database(settings.resolved_database_url)
    assert Queue(database).running() == []
    database.close()
