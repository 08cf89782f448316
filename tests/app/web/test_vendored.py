"""Other people's files are those that were published, and none lies there without a record."""

import hashlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
VENDOR = ROOT / "app" / "web" / "static" / "vendor"
VENDORED = (VENDOR, ROOT / "tests" / "browser" / "vendor")
RECORDS = ("README.md", "SHA256SUMS")


@pytest.mark.parametrize("vendor", VENDORED, ids=["pages", "tests"])
def test_the_files_are_those_that_were_published(vendor: Path) -> None:
    lines = (vendor / "SHA256SUMS").read_text().splitlines()
    paths = {path.relative_to(vendor).as_posix(): path for path in vendor.rglob("*") if path.is_file()}
    found = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in paths.items() if name not in RECORDS}
    assert found == {name: sha256 for sha256, name in (line.split("  ", 1) for line in lines)}


@pytest.mark.parametrize("vendor", VENDORED, ids=["pages", "tests"])
def test_each_has_a_package_a_version_a_source_and_a_licence(vendor: Path) -> None:
    text = (vendor / "README.md").read_text()
    rows = re.findall(
        r"^\| `([\w-]+)` \| [@\w./-]+ \| \d+\.\d+\.\d+ \| `[\w/.-]+` \| [\w.-]+ \|$", text, flags=re.MULTILINE
    )
    folders = [path.name for path in vendor.iterdir() if path.is_dir()]
    assert set(rows) == set(folders)
    assert all((vendor / folder / "LICENSE").is_file() for folder in folders)
