"""Dockerfile and docker-compose.yml name only commands, settings, files, stages and routes that exist."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.settings import Settings

SERVICES = ("server", "worker")


@pytest.fixture(scope="module")
def compose(root: Path) -> dict[str, Any]:
    return yaml.safe_load((root / "docker-compose.yml").read_text())


@pytest.fixture(scope="module")
def dockerfile(root: Path) -> str:
    return (root / "Dockerfile").read_text()


@pytest.mark.parametrize("service", SERVICES)
def test_commands_exist(compose: dict[str, Any], commands: frozenset[str], service: str) -> None:
    name, *arguments = compose["services"][service]["command"]
    assert name in commands
    assert not arguments, "check the options, too, once there are some"


@pytest.mark.parametrize("service", SERVICES)
def test_settings_exist(compose: dict[str, Any], settings: frozenset[str], service: str) -> None:
    environment = compose["services"][service]["environment"]
    assert set(environment) <= settings
    Settings.model_validate(
        {name.removeprefix("FLOPWATCH_").lower(): value for name, value in environment.items() if value is not None}
    )


@pytest.mark.parametrize("service", SERVICES)
def test_each_service_is_a_stage_that_starts_it(compose: dict[str, Any], dockerfile: str, service: str) -> None:
    definition = compose["services"][service]
    stage = stages(dockerfile)[definition["build"]["target"]]
    assert re.findall(r'^CMD \["(\w+)"\]', stage, flags=re.MULTILINE) == definition["command"]
    assert re.search(r"^USER (?!root)\w+", stage, flags=re.MULTILINE)
    assert definition["init"] is True


def stages(dockerfile: str) -> dict[str, str]:
    """The text of each stage by its name."""
    parts = re.split(r"^FROM \S+ AS (\w+)$", dockerfile, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_the_server_is_probed_where_it_listens(compose: dict[str, Any], dockerfile: str) -> None:
    server = compose["services"]["server"]
    port = re.search(r"FLOPWATCH_PORT=(\d+)", dockerfile)
    assert f"http://127.0.0.1:{port[1]}/healthz" in server["healthcheck"]["test"][-1]
    compile(server["healthcheck"]["test"][-1], "healthcheck", "exec")
    assert server["ports"] == [f"127.0.0.1:{port[1]}:{port[1]}"]


def test_the_image_is_built_from_files_that_exist(root, dockerfile, commands, settings) -> None:
    copied = [
        source
        for line in re.findall(r"^COPY (?!--from)(.+)$", dockerfile, flags=re.MULTILINE)
        for source in line.split()[:-1]
    ]
    assert copied
    kept = {line[1:] for line in (root / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert set(copied) == kept
    assert all((root / source).exists() for source in copied)
    assert set(re.findall(r"FLOPWATCH_[A-Z_]+", dockerfile)) <= settings
    assert set(re.findall(r'^CMD \["(\w+)"\]', dockerfile, flags=re.MULTILINE)) <= commands


def test_the_containers_need_a_token(compose: dict[str, Any], dockerfile: str) -> None:
    assert compose["services"]["server"]["environment"]["FLOPWATCH_API_TOKEN"].startswith("${FLOPWATCH_API_TOKEN:?")
    assert "FLOPWATCH_API_TOKEN" not in compose["services"]["worker"]["environment"], "jobs could read it"
    assert "FLOPWATCH_INSECURE" not in compose["services"]["server"]["environment"]
    assert not re.search(r"^(?!#).*FLOPWATCH_INSECURE", dockerfile, flags=re.MULTILINE)
