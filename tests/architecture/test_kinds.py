"""A job kind is a spec, a runner and their tests, all named after it."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from app.specs import KINDS
from tests.workers.reporting import Report
from workers.jobs import RUNNERS

TESTS = Path(__file__).parents[1]


def test_every_spec_has_a_runner_and_every_runner_a_spec() -> None:
    assert set(RUNNERS) == set(KINDS)
    assert KINDS


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("package", ["app.specs", "workers.jobs"])
def test_every_kind_has_its_tests_where_the_how_to_says(kind: str, package: str) -> None:
    folder = TESTS / package.replace(".", "/")
    files = [folder / f"test_{kind}.py"] if not (folder / kind).is_dir() else sorted((folder / kind).glob("test_*.py"))
    ways = [rf"{re.escape(package)}(\.| import .*\b){kind}\b"]
    if package == "workers.jobs":
        ways.append(r"tests\.workers\.reporting import .*\breported\b")
    imported = re.compile(f"^from ({'|'.join(ways)})", flags=re.MULTILINE)
    assert files, f"docs/how-to-add-a-job-kind.md asks for tests of {kind} in {folder}"
    for file in files:
        assert file.exists(), f"docs/how-to-add-a-job-kind.md asks for {file.relative_to(TESTS.parent)}"
        assert imported.search(file.read_text()), f"{file.name} does not import {kind} from {package}"


ONLY_CLIENTS_KNOW = {("compare", "baseline"), ("compare", "candidate"), ("diagnosis", "step")}
"""Fields without a default, as kinds and names."""


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_field_is_described_and_has_a_default(kind: str) -> None:
    described = KINDS[kind].model_json_schema()["properties"]
    for name, field in KINDS[kind].model_fields.items():
        if name != "kind":
            assert field.is_required() == ((kind, name) in ONLY_CLIENTS_KNOW), f"{kind}.{name} has no default"
            is_described = "description" in described[name] or hasattr(field.annotation, "model_fields")
            assert is_described, f"{kind}.{name} is not described"


def test_the_example_of_the_how_to_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (TESTS.parent / "docs/how-to-add-a-job-kind.md").read_text()
    spec_text, runner_text, *_ = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    for name, text in (("app.specs.sort", spec_text), ("workers.jobs.sort", runner_text)):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        exec(text, vars(sys.modules[name]))
    runner = sys.modules["workers.jobs.sort"].RUNNER
    spec = sys.modules["app.specs.sort"].SortSpec(length=64, measure_steps=3, device="cpu")
    report = Report(tmp_path)
    runner.run(spec, runner.plan(spec)[0], report)
    assert report.cell(length=64)["sort_ms", "sort"]["outcome"] == "ok"
    assert {check["name"] for check in report.verdict_on(length=64)["checks"]} >= {"variation", "steady"}
