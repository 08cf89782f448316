"""Files below deploy/: systemd and Kubernetes take them, and what they name exists."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))
MANIFESTS = sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))


def objects(path: Path) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all(path.read_text()) if one is not None]


def pod_of(manifest: dict[str, Any]) -> dict[str, Any] | None:
    return manifest["spec"].get("template", {}).get("spec")


def verified(unit: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """What systemd says of a unit whose program exists."""
    program = folder / "flopwatch"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    copy = folder / unit.name
    copy.write_text(re.sub(r"/\S+/bin/flopwatch", str(program), unit.read_text()))
    command = ["systemd-analyze", "verify", "--man=no", str(copy)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_systemd_takes_it(unit: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    done = verified(unit, tmp_path)
    assert [line for line in done.stderr.splitlines() if unit.name in line] == []
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_systemd_never_gives_it_up(unit: Path) -> None:
    """By default it does after 5 starts within 10 s, and a service ends within a second while its database is away."""
    found = re.search(r"^RestartSec=(\d+)$", unit.read_text(), re.MULTILINE)
    assert 4 * int(found[1]) > 10


@pytest.mark.long
def test_kubernetes_takes_them() -> None:
    """By the schemas that Kubernetes publishes; a field of another name is refused."""
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="make long-test installs it")
    version = kubernetes_validate.latest_version()
    found = [one for path in MANIFESTS for one in objects(path)]
    assert {one["kind"] for one in found} == {"Service", "Deployment", "Job"}
    for one in found:
        kubernetes_validate.validate(one, version, strict=True)


@pytest.mark.parametrize("path", [*UNITS, *MANIFESTS], ids=lambda path: path.name)
def test_commands_and_settings_exist(path: Path, commands: frozenset[str], settings: frozenset[str]) -> None:
    text = path.read_text()
    assert set(re.findall(r"FLOPWATCH_[A-Z_]*[A-Z]", text)) <= settings
    started = set(re.findall(r"bin/flopwatch (\w+)", text)) | set(re.findall(r"args: \[(\w+)\]", text))
    assert started
    assert started <= commands


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_pods_fit_the_images(path: Path) -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    for manifest in objects(path):
        if (pod := pod_of(manifest)) is None:
            continue
        (container,) = pod["containers"]
        assert f" AS {container['image'].removeprefix('flopwatch-')}\n" in dockerfile
        assert f"--uid {pod['securityContext']['runAsUser']} " in dockerfile
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        secrets = [source["secretRef"]["name"] for source in container["envFrom"]]
        assert ("flopwatch-server" in secrets) == (container["args"] == ["serve"]), "jobs must not read the token"


def test_the_service_leads_to_the_server() -> None:
    service, server = objects(ROOT / "deploy/kubernetes/server.yaml")
    assert service["spec"]["selector"].items() <= server["spec"]["template"]["metadata"]["labels"].items()
    names = {port["name"] for port in pod_of(server)["containers"][0]["ports"]}  # type: ignore[index]
    assert service["spec"]["ports"][0]["targetPort"] in names
