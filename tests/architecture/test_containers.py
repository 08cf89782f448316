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
def test_both_use_the_one_volume_as_data_folder(compose: dict[str, Any], service: str) -> None:
    definition = compose["services"][service]
    assert f"data:{definition['environment']['FLOPWATCH_DATA_DIR']}" in definition["volumes"]


def test_volumes_are_mounted_where_the_image_writes(compose: dict[str, Any], dockerfile: str) -> None:
    mounted = {volume for service in SERVICES for volume in compose["services"][service]["volumes"]}
    assert {volume.partition(":")[0] for volume in mounted} == set(compose["volumes"])
    written = set(re.findall(r"^VOLUME (/\w+)$", dockerfile, flags=re.MULTILINE))
    assert {volume.partition(":")[2] for volume in mounted} == written
    made = re.search(
        r"install --directory --owner=flopwatch --group=flopwatch (.+?) *\\$", dockerfile, flags=re.MULTILINE
    )
    assert set(made[1].split()) == written, "made for the user that runs in the image"
    caches = re.findall(r"\w+_(?:CACHE|EXTENSIONS)_DIR=(/\w+)/", dockerfile)
    assert caches == ["/cache"] * 3


@pytest.mark.parametrize("service", SERVICES)
def test_each_service_is_a_stage_that_starts_it(compose: dict[str, Any], dockerfile: str, service: str) -> None:
    definition = compose["services"][service]
    stage = stages(dockerfile)[definition["build"]["target"]]
    assert re.findall(r'^CMD \["(\w+)"\]', stage, flags=re.MULTILINE) == definition["command"]
    assert re.search(r"^USER (?!root)\w+", stage, flags=re.MULTILINE)
    assert definition["init"] is True


def test_image_layers(dockerfile: str) -> None:
    parts = stages(dockerfile)
    assert "TORCH" not in parts["base"] + parts["server"]
    worker = parts["worker"]
    assert worker.index('RUN pip install "${TORCH}"\n') < worker.index("from=source")
    assert not re.search(r"^COPY", parts["base"] + worker, flags=re.MULTILINE)


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


def test_the_worker_gets_gpus_and_time_to_stop(compose: dict[str, Any]) -> None:
    worker = compose["services"]["worker"]
    (device,) = worker["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    grace_s = float(worker["environment"]["FLOPWATCH_GRACE_S"])
    assert float(worker["stop_grace_period"].removesuffix("s")) > grace_s


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


def test_the_base_image_is_pinned(dockerfile: str) -> None:
    assert re.search(r"^ARG PYTHON_IMAGE=python:3\.\d+-slim@sha256:[0-9a-f]{64}$", dockerfile, flags=re.MULTILINE)
    assert set(re.findall(r"^FROM (\S+) AS", dockerfile, flags=re.MULTILINE)) == {"${PYTHON_IMAGE}", "base"}


def test_the_containers_need_a_token(compose: dict[str, Any], dockerfile: str) -> None:
    assert compose["services"]["server"]["environment"]["FLOPWATCH_API_TOKEN"].startswith("${FLOPWATCH_API_TOKEN:?")
    assert "FLOPWATCH_API_TOKEN" not in compose["services"]["worker"]["environment"], "jobs could read it"
    assert "FLOPWATCH_INSECURE" not in compose["services"]["server"]["environment"]
    assert not re.search(r"^(?!#).*FLOPWATCH_INSECURE", dockerfile, flags=re.MULTILINE)
