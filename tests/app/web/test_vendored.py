"""Other people's files are those that were published, and none lies there without a record."""

import hashlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
VENDOR = ROOT / "app" / "web" / "static" / "vendor"
VENDORED = (VENDOR, ROOT / "tests" / "browser" / "vendor")
RECORDS = ("README.md", "SHA256SUMS")


def differences(folder: Path) -> list[str]:
    """What is wrong with the files below the folder, by its SHA256SUMS."""
    lines = (folder / "SHA256SUMS").read_text().splitlines()
    recorded = {name: sha256 for sha256, name in (line.split("  ", 1) for line in lines)}
    present = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} - set(RECORDS)
    changed = [
        f"{name} is not what was published"
        for name in sorted(present & set(recorded))
        if hashlib.sha256((folder / name).read_bytes()).hexdigest() != recorded[name]
    ]
    return [
        *changed,
        *(f"{name} has no record" for name in sorted(present - set(recorded))),
        *(f"{name} is not there" for name in sorted(set(recorded) - present)),
    ]


@pytest.mark.parametrize("vendor", VENDORED, ids=["pages", "tests"])
def test_the_files_are_those_that_were_published(vendor: Path) -> None:
    assert differences(vendor) == []


@pytest.mark.parametrize("vendor", VENDORED, ids=["pages", "tests"])
def test_each_has_a_package_a_version_a_source_and_a_licence(vendor: Path) -> None:
    text = (vendor / "README.md").read_text()
    rows = re.findall(
        r"^\| `([\w-]+)` \| [@\w./-]+ \| \d+\.\d+\.\d+ \| `[\w/.-]+` \| [\w.-]+ \|$", text, flags=re.MULTILINE
    )
    folders = [path.name for path in vendor.iterdir() if path.is_dir()]
    assert set(rows) == set(folders)
    assert all((vendor / folder / "LICENSE").is_file() for folder in folders)


@pytest.mark.parametrize("damage", ["is not what was published", "has no record", "is not there"])
def test_control_of_the_records(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "vendor"
    for path in VENDOR.rglob("*"):
        if path.is_file():
            copy = folder / path.relative_to(VENDOR)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    script = folder / "htmx" / "htmx.min.js"
    if damage == "is not what was published":
        script.write_bytes(script.read_bytes() + b" ")
    elif damage == "has no record":
        script = folder / "htmx" / "extension.js"
        script.write_bytes(b"alert(1)")
    else:
        script.unlink()
    assert differences(folder) == [f"{script.relative_to(folder).as_posix()} {damage}"]
