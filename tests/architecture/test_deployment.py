"""The examples in `deploy` are valid, and name commands, options and settings that exist."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import typer
import yaml

KUBERNETES = sorted((Path(__file__).parents[2] / "deploy" / "kubernetes").glob("*.yaml"))
UNITS = sorted((Path(__file__).parents[2] / "deploy" / "systemd").glob("*.service"))


def options_of(command: str) -> set[str]:
    from app.cli.commands import cli

    found = vars(typer.main.get_command(cli))["commands"][command]
    return {name for parameter in found.params for name in parameter.opts}


def test_there_are_units() -> None:
    assert len(UNITS) == 3


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_systemd_takes_the_unit(unit: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed here")
    # It also looks for the program and the user, which this host lacks.
    text = re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", unit.read_text(), flags=re.MULTILINE)
    text = re.sub(r"^User=\S+", "User=root", text, flags=re.MULTILINE)
    copy = tmp_path / unit.name
    copy.write_text(text)
    result = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")
    copy.write_text(text.replace("KillMode=mixed", "KillMod=mixed"))
    result = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=60)
    assert "KillMod" in result.stderr, "the control"


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_commands_and_settings_exist(unit: Path, commands: frozenset[str], settings: frozenset[str]) -> None:
    text = unit.read_text()
    (line,) = re.findall(r"^ExecStart=(.+)$", text, flags=re.MULTILINE)
    _, command, *arguments = shlex.split(line)
    assert command in commands
    assert {word for word in arguments if word.startswith("--")} <= options_of(command)
    assert set(re.findall(r"FLOPWATCH_[A-Z_]*[A-Z]", text)) <= settings


@pytest.mark.parametrize("file", KUBERNETES, ids=lambda path: path.name)
def test_kubernetes_takes_the_objects(file: Path, commands: frozenset[str], settings: frozenset[str]) -> None:
    validator = pytest.importorskip("kubernetes_validate")
    objects = list(yaml.safe_load_all(file.read_text()))
    assert [one["kind"] for one in objects] == ["Deployment", "Service", "Deployment"]
    for one in objects:
        validator.validate(one, validator.latest_version(), strict=True)
        if one["kind"] == "Deployment":
            (container,) = one["spec"]["template"]["spec"]["containers"]
            assert set(container["args"]) <= commands
            container["arguments"] = container.pop("args")
            with pytest.raises(Exception, match="arguments"):
                validator.validate(one, validator.latest_version(), strict=True)
    assert set(re.findall(r"FLOPWATCH_[A-Z_]*[A-Z]", file.read_text())) <= settings
