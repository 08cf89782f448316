"""Documents name only commands, targets, settings, routes and files that exist, and all settings and routes."""

import fnmatch
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.cli.specs import local
from app.settings import Settings
from app.specs import KINDS

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]


def shell_lines(text: str) -> Iterator[str]:
    """The lines of the fenced shell blocks, with continued lines joined."""
    for block in re.findall(r"```(?:sh|bash|console)\n(.*?)```", text, flags=re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            yield line.removeprefix("$ ").strip()


def mentioned(text: str, pattern: str) -> set[str]:
    """First groups of `pattern` in shell blocks and `inline code`."""
    inline = re.findall(r"(?<!`)`([^`\n]+)`", text)
    return {match for line in [*shell_lines(text), *inline] for match in re.findall(pattern, line)}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_make_targets_exist(document: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert mentioned(document.read_text(), r"^make ([a-z-]+)") <= targets


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_exist(document: Path, commands: frozenset[str]) -> None:
    assert mentioned(document.read_text(), r"(?:^|[ /(])flopwatch ([a-z]+)") <= commands


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_settings_exist(document: Path, settings: frozenset[str]) -> None:
    assert set(re.findall(r"FLOPWATCH_[A-Z_]*[A-Z]", document.read_text())) <= settings


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    text = document.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+:", target):
            path, _, _ = target.partition("#")
            assert not path or (document.parent / path).exists(), target
    for name in re.findall(
        r"`((?:app|benchmarks|flopwatch|kernels|migrations|parallel|tests|workers)/[\w/.-]*)`", text
    ):
        assert (ROOT / name).exists(), name
    for module in re.findall(r"python -m (benchmarks\.\w+)", text):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


def test_every_setting_is_documented(settings: frozenset[str]) -> None:
    documented = re.findall(r"^\| `(FLOPWATCH_\w+)`", (ROOT / "docs/settings.md").read_text(), flags=re.MULTILINE)
    assert sorted(documented) == sorted(settings)


def test_every_command_is_documented(commands: frozenset[str]) -> None:
    places = re.findall(
        r"^(?:## |\| )(`flopwatch .*?)(?: \||$)", (ROOT / "docs/cli.md").read_text(), flags=re.MULTILINE
    )
    documented = [name for place in places for name in re.findall(r"`flopwatch ([\w-]+)`", place)]
    assert set(documented) == commands, "docs/cli.md has a heading or a row for each command"
    assert len(documented) == len(commands)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind_has_a_page_that_begins_with_its_question(kind: str) -> None:
    page = ROOT / f"docs/kinds/{kind}.md"
    assert page.exists(), f"write docs/kinds/{kind}.md: what it answers, and how to submit one"
    title, first, text = page.read_text().split("\n\n", maxsplit=2)
    assert title == f"# `{kind}`"
    assert "?" in first
    assert f"flopwatch submit {kind} " in next(shell_lines(text))
    assert f"]({kind}.md)" in (ROOT / "docs/kinds/README.md").read_text()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_submitted_specs_are_valid(document: Path) -> None:
    for line in shell_lines(document.read_text()):
        if match := re.match(r"(?:\S*/)?flopwatch submit (\w+)(?= )(.*)", line):
            words = shlex.split(re.sub(r"--label \S+", "", match[2]), comments=True)
            preset = words[words.index("--preset") + 1] if "--preset" in words else None
            # Arguments are refused without the file of a step of one's own, which is not there.
            fields = [word for word in words if re.match(r"(?!arguments\.)[a-z][\w.]*=", word)]
            local(match[1], fields, preset, {})


def test_routes_and_their_page_agree(tmp_path: Path) -> None:
    from app.main import create_app

    schema = create_app(Settings(data_dir=tmp_path)).openapi()
    served = {(method.upper(), path) for path, methods in schema["paths"].items() for method in methods}
    assert set(documented_routes((ROOT / "docs/http-api.md").read_text())) == {
        (method, any_name(path)) for method, path in served
    }


def documented_routes(page: str) -> Iterator[tuple[str, str]]:
    """Every method of a row of the page's table, with every path of the row."""
    for paths, methods in re.findall(r"^\| (`/.*?) \| (.*) \|$", page, flags=re.MULTILINE):
        for method in re.findall(r"`(GET|POST|DELETE|PUT|PATCH)`", methods):
            yield from ((method, any_name(path)) for path in re.findall(r"`(/\S+)`", paths))


def any_name(path: str) -> str:
    return re.sub(r"\{\w+\}", "{}", path)


RELIABILITY = ROOT / "docs" / "reliability.md"
STORE = ROOT / "tests" / "app" / "store"
ON_BOTH_ENGINES = [
    *(path for folder in ("files", "keeping", "queue", "reading") for path in (STORE / folder).glob("test_*.py")),
    ROOT / "tests" / "acceptance" / "test_several_hosts.py",
]
"""Modules whose tests run on both engines, or are beside those of the same promise that run on SQLite."""


def promises(text: str) -> list[list[str]]:
    """The cells of the tables' rows: promise, test, control, and in some the engines on which the tests run."""
    rows = [re.split(r" \| ", line.strip("| ")) for line in text.splitlines() if line.startswith("| ")]
    return [row for row in rows if row[:3] != ["promise", "test", "control"]]


def test_every_promise_has_a_test_that_exists() -> None:
    defined = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^\s*(?:async )?def (test_\w+)", path.read_text(), flags=re.MULTILINE)
    }
    rows = promises(RELIABILITY.read_text())
    assert len(rows) > 50
    for row in rows:
        promise, tests, control, *engines = row
        named = re.findall(r"`(test_[\w*]+)(?:\[[^`\]]*\])?`", f"{tests} {control}")
        assert named or "`test_" in tests, promise
        assert [name for name in named if not fnmatch.filter(defined, name)] == [], promise
        assert "`test_" in control or control.startswith(("none", "chaos", "the same test, ")), promise
        on_both = [path for path in ON_BOTH_ENGINES for name in named if f"def {name}(" in path.read_text()]
        assert engines in ([], ["SQLite"], ["PostgreSQL"]) or (engines == ["both"] and on_both), promise


def test_linked_tests_are_in_the_files_that_are_linked() -> None:
    linked = re.findall(r"\[`(test_\w+)`\]\(\.\./(tests/[\w/]+\.py)\)", RELIABILITY.read_text())
    assert len(linked) > 50
    assert [name for name, path in linked if f"def {name}(" not in (ROOT / path).read_text()] == []
