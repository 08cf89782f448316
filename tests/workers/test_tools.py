"""Finding the outside profilers of a host."""

from pathlib import Path

import pytest

from tests.plugins.profilers import install
from workers import tools
from workers.agent import agent


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this host has is not found."""
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    folders = {name: (str(tmp_path / name / "20*"),) for name in tools.FOLDERS}
    monkeypatch.setattr(tools, "FOLDERS", folders)


def test_the_newest_of_the_usual_folders_is_taken(tmp_path: Path) -> None:
    for version in ("2024.10.0", "2024.9.1", "2023.11.9"):
        install(tmp_path / "ncu" / version, "ncu")
    tool = tools.find("ncu")
    assert tool.path == str(tmp_path / "ncu/2024.10.0/ncu")


def test_one_that_does_not_run_is_none(tmp_path: Path) -> None:
    install(tmp_path / "path", "ncu", "broken")
    assert tools.find("ncu") is None
    working = install(tmp_path / "ncu/2024.1", "ncu")
    tool = tools.find("ncu")
    assert tool.path == str(working)


def test_workers_register_the_tools_that_they_have(tmp_path: Path) -> None:
    def registered() -> set[str]:
        return {name for name in agent.capabilities(allow_code=False) if name.startswith("tool:")}

    assert registered() == set()
    install(tmp_path / "path", "nsys")
    assert registered() == {"tool:nsys"}
    assert "attention:eager" in agent.capabilities(allow_code=False)
