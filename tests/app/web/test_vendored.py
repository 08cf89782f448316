"""Other people's files are those that were published, and none lies there without a record."""

import hashlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
VENDORED = (ROOT / "app" / "web" / "static" / "vendor", ROOT / "tests" / "browser" / "vendor")
RECORDS = ("README.md", "SHA256SUMS")


@pytest.mark.parametrize("vendor", VENDORED, ids=["pages", "tests"])
def test_the_files_are_those_that_were_published(vendor: Path) -> None:
    lines = (vendor / "SHA256SUMS").read_text().splitlines()
    paths = {path.relative_to(vendor).as_posix(): path for path in vendor.rglob("*") if path.is_file()}
    found = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in paths.items() if name not in RECORDS}
    assert found == {name: sha256 for sha256, name in (line.split("  ", 1) for line in lines)}
