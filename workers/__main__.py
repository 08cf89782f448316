"""`python -m workers agent | run SPEC | doctor`; only launch.py uses keeper, warm, child and wrapped."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from app import logs
from app.errors import FlopwatchError
from app.importing import without_collector
from workers.installed import check_dependencies, check_packages
from workers.outcome import InvalidEnvironment


def main(arguments: list[str]) -> int:
    """Run one of the worker's processes; returns its exit code."""
    match arguments:
        case ["agent"]:
            check_dependencies()
            check_packages()
            with without_collector():
                from app.settings import Settings
                from app.store.database.private import UMASK
                from workers.agent.agent import serve

            os.umask(UMASK)
            settings = Settings.from_environment()
            logs.set_up(settings.log_level, settings.log_format)
            serve(settings)
            return 0
        case ["doctor"]:
            from workers import doctor

            doctor.main()
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
