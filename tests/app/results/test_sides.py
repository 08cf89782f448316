"""Results of one's own code by release 0.1.0 beside those of later releases.

The database was written by that release: jobs 1 and 2 measured two versions of an attention function beside `eager`.
"""

import gzip
from pathlib import Path

import pytest

from app.errors import InvalidRequest
from app.results import compare
from app.settings import Settings
from app.specs import spec_adapter
from app.store.reading.queries import Reading
from tests.app.results.conftest import table
from tests.releases.record import FOLDER


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    settings = Settings(data_dir=tmp_path, database_url=None)
    database = tmp_path / "flopwatch.sqlite3"
    database.write_bytes(gzip.decompress((FOLDER / "0.1.0" / "own-code.sqlite3.gz").read_bytes()))
    database.chmod(0o600)
    return settings


def test_ones_own_code_of_0_1_0_has_its_table_and_is_compared_with_itself(database, ended, record) -> None:
    spec = Reading(database).job(1)[0]["spec"]
    now = spec | {"code": spec["code"] | {"file": "attention.py"}}
    cases = spec_adapter.validate_python(now).cases()
    rows = [record("forward_ms", phase="forward", case=dict(case.coordinates), case_key=case.key) for case in cases]
    again = ended(now, measurements=rows)
    shown = table(database, jobs=[1, again], columns=["forward_ms"])
    at = [column.name for column in shown.columns].index("implementation")
    assert [row[at] for row in shown.rows] == ["eager", "mine@cec46459", "eager", "mine@attention.py"]
    assert compare(database, [1], [2]).rows
    for sides, old in ((([1], [again]), "baseline"), (([again], [1]), "candidate")):
        with pytest.raises(InvalidRequest, match=rf"^Release 0\.1\.0, .* measured the {old}: measure it again"):
            compare(database, *sides)
