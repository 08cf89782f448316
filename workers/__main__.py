"""`python -m workers agent | slurm SETTINGS | one-job FILE | run SPEC`; launch.py alone uses the others."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from app.errors import FlopwatchError
from app.importing import without_collector
from workers.outcome import InvalidEnvironment

if TYPE_CHECKING:
    from app.settings import Settings


def check_packages() -> None:
    """Refuse to run beside another distribution that has a package of the name of one of ours.

    PyPI's distribution `kernels` is one: installed into one environment, both write the same folder.

    Raises:
        InvalidEnvironment: the message names the package, the distribution and the folder.
    """
    home = Path(__file__).resolve().parent.parent
    distributions = metadata.packages_distributions()
    for name in ("app", "flopwatch", "kernels", "migrations", "parallel", "workers"):
        spec = importlib.util.find_spec(name)
        folder = Path(spec.origin).resolve().parent if spec is not None and spec.origin else None
        others = [
            other
            for other in dict.fromkeys(distributions.get(name, ()))
            if other != "flopwatch" and Path(str(metadata.distribution(other).locate_file(name))).resolve() == folder
        ]
        if others:
            wrong = f"the distribution {others[0]!r} has a package {name!r}, too, and writes it to {folder}"
        elif folder != home / name:
            wrong = f"package {name!r} is imported from {folder}, not from {home}"
        else:
            continue
        raise InvalidEnvironment(f"{wrong}: install Flopwatch into an environment of its own")


def check_dependencies() -> None:
    """Refuse to run where only the server's dependencies are installed.

    Raises:
        InvalidEnvironment: a dependency is missing; the message names it, and the cure.
    """
    missing = [name for name in ("torch", "psutil", "pynvml") if importlib.util.find_spec(name) is None]
    if missing:
        raise InvalidEnvironment(f"a worker needs {', '.join(missing)}, too: install flopwatch[worker]")


def set_up_worker() -> Settings:
    """Check what a worker needs, and set up its log and its umask; returns its settings."""
    check_dependencies()
    check_packages()
    with without_collector():
        from app.settings import Settings
        from app.store.database.private import UMASK

    os.umask(UMASK)
    logging.basicConfig(
        level=os.environ.get("FLOPWATCH_LOG_LEVEL", "INFO"), format="%(asctime)s %(levelname)s %(message)s"
    )
    return Settings.from_environment()


def main(arguments: list[str]) -> int:
    """Run one of the worker's processes; returns its exit code."""
    match arguments:
        case ["agent"]:
            settings = set_up_worker()
            with without_collector():
                from workers.agent.agent import serve

            serve(settings)
            return 0
        case ["slurm", file]:
            settings = set_up_worker()
            with without_collector():
                from workers.slurm.worker import serve as serve_cluster

            serve_cluster(settings, Path(file))
            return 0
        case ["one-job", file]:
            settings = set_up_worker()
            with without_collector():
                from workers.slurm.one_job import serve as serve_one_job

            serve_one_job(settings, Path(file))
            return 0
        case ["run", *rest]:
            check_dependencies()
            check_packages()
            with without_collector():
                from workers.run_here import run_here

            return run_here(rest)
        case ["warm", descriptor]:
            from workers.processes import warm

            warm.main(int(descriptor))
            return 0
        case ["keeper", *descriptors]:
            from workers.processes import keeper

            keeper.main(*map(int, descriptors))
            return 0
        case ["child", *descriptors]:
            with without_collector():
                from workers.processes import child

            child.main(*map(int, descriptors))
        case ["wrapped", file]:
            with without_collector():
                from workers.processes import child

            return child.main_wrapped(Path(file))
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except InvalidEnvironment as error:
        sys.exit(f"flopwatch: {error}")
    except FlopwatchError as error:
        sys.exit(f"flopwatch: {error.title}: {error.detail}")
