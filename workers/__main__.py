"""`python -m workers agent | slurm SETTINGS | one-job FILE | run SPEC | doctor [SETTINGS]`; launch.py uses the rest."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from app import logs
from app.errors import FlopwatchError
from app.importing import without_collector
from workers.installed import check_dependencies
from workers.outcome import InvalidEnvironment

if TYPE_CHECKING:
    from app.settings import Settings


def set_up_worker() -> Settings:
    """Check what a worker needs, and set up its log and its umask; returns its settings."""
    check_dependencies()
    with without_collector():
        from app.settings import Settings
        from app.store.database.private import UMASK

    os.umask(UMASK)
    settings = Settings.from_environment()
    logs.set_up(settings.log_level, settings.log_format)
    return settings


def main(arguments: list[str]) -> int:
    """Run one of the worker's processes; returns its exit code."""
    match arguments:
        case ["agent"]:
            settings = set_up_worker()
            with without_collector():
                from workers.agent.agent import serve

            serve(settings)
        case ["slurm", file]:
            settings = set_up_worker()
            with without_collector():
                from workers.slurm.worker import serve as serve_cluster

            serve_cluster(settings, Path(file))
        case ["one-job", file]:
            settings = set_up_worker()
            with without_collector():
                from workers.slurm.one_job import serve as serve_one_job

            serve_one_job(settings, Path(file))
        case ["doctor", *slurm_settings]:
            from workers import doctor

            doctor.main(*map(Path, slurm_settings))
        case ["run", *rest]:
            check_dependencies()
            with without_collector():
                from workers.processes.child import leave
                from workers.run_here import run_here

            return leave(run_here(rest))
        case ["warm", descriptor]:
            from workers.processes import warm

            warm.main(int(descriptor))
        case ["keeper", *descriptors]:
            from workers.processes import keeper

            keeper.main(*map(int, descriptors))
        case ["child", *descriptors]:
            with without_collector():
                from workers.processes import child

            child.main(*map(int, descriptors))
        case ["wrapped", file]:
            with without_collector():
                from workers.processes import child

            return child.main_wrapped(Path(file))
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


def run() -> NoReturn:
    """Run the process that the command line names, and exit."""
    try:
        sys.exit(main(sys.argv[1:]))
    except InvalidEnvironment as error:
        sys.exit(f"flopwatch: {error}")
    except FlopwatchError as error:
        sys.exit(f"flopwatch: {error.title}: {error.detail}")


if __name__ == "__main__":
    run()
