"""Examines a cluster for `flopwatch doctor --slurm-settings FILE`: commands, controller, what sbatch takes, a node."""

import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from app.checkup import Finding, absent, broken, works
from app.errors import CannotRunHere
from workers.slurm.allocations import of_cluster, of_smallest
from workers.slurm.client import CommandFailed, SlurmClient
from workers.slurm.settings import SlurmSettings

COMMANDS = ("sbatch", "squeue", "scancel", "srun")
NODE_S = 10
"""Seconds for which the check waits for a free node."""


def examine(file: Path) -> Iterator[Finding]:
    """Yield what is found of the cluster with these settings."""
    try:
        settings = SlurmSettings.read(file)
    except CannotRunHere as error:
        yield broken("slurm", error.detail, "deploy/slurm/slurm.toml explains the settings")
        return
    if missing := [command for command in COMMANDS if shutil.which(command) is None]:
        yield broken("slurm", f"no {', '.join(missing)} on PATH", "install Slurm's client, or run it on a login node")
        return
    client = SlurmClient(settings.command_timeout_s)
    arguments = [f"--{name}={value}" for name, value in of_cluster(settings).items() if value]
    arguments += settings.extra_arguments
    try:
        client.allocations()
        client.test(of_smallest(settings))
    except CommandFailed as error:
        cure = "correct partition, account, constraint, GPUs and extra_arguments: sinfo lists what there is"
        yield broken("slurm", str(error), cure)
        return
    where = ", ".join(arguments) or "the default partition"
    yield works("slurm", f"it answers, and takes jobs with {where}")
    yield from _node(settings, client, arguments)


def _node(settings: SlurmSettings, client: SlurmClient, arguments: list[str]) -> Iterator[Finding]:
    """Look from a node at the shared folder."""
    word = secrets.token_hex(8)
    probe = settings.folder / f".doctor-{word}"
    try:
        settings.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe.write_text(word)
    except OSError as error:
        yield broken("folder", f"{settings.folder}: {error.strerror}", "set `folder` to one that you can write")
        return
    try:
        seen = client.run_on_node(arguments, NODE_S, f"cat {probe}")
    except CommandFailed as error:
        yield absent("node", f"none was free within {NODE_S} s to look at the folder from: {error}", "try again later")
        return
    finally:
        probe.unlink(missing_ok=True)
    if seen != word:
        cure = "set `folder` to one that this host and the nodes share under one path"
        yield broken("folder", f"a node does not see what is written in {settings.folder} here", cure)
    else:
        yield works("folder", f"{settings.folder}: a node sees it")
