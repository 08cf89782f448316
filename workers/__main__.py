"""`python -m workers agent | run SPEC`; only launch.py uses keeper, warm, child and wrapped."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from pathlib import Path

from app.errors import FlopwatchError
from app.importing import without_collector
from workers.outcome import InvalidEnvironment


def check_packages() -> None:
    """Refuse to run if another distribution's package `kernels` shadows ours.

    Raises:
        InvalidEnvironment: another package shadows ours; the message names its folder.
    """
    home = Path(__file__).resolve().parent.parent
    for name in ("app", "flopwatch", "kernels", "parallel"):
        found = importlib.util.find_spec(name)
        origin = Path(found.origin).resolve() if found is not None and found.origin else None
        if origin is None or origin.parent.parent != home:
            raise InvalidEnvironment(f"package {name!r} is imported from {origin}, not from {home}: mend sys.path")


def check_dependencies() -> None:
    """Refuse to run where only the server's dependencies are installed.

    Raises:
        InvalidEnvironment: a dependency is missing; the message names it, and the cure.
    """
    missing = [name for name in ("torch", "psutil", "pynvml") if importlib.util.find_spec(name) is None]
    if missing:
        raise InvalidEnvironment(f"a worker needs {', '.join(missing)}, too: install flopwatch[worker]")


def main(arguments: list[str]) -> int:
    """Run one of the worker's processes; returns its exit code."""
    match arguments:
        case ["agent"]:
            check_dependencies()
            with without_collector():
                from app.settings import Settings
                from app.store.database.private import UMASK
                from workers.agent.agent import serve

            os.umask(UMASK)
            logging.basicConfig(
                level=os.environ.get("FLOPWATCH_LOG_LEVEL", "INFO"), format="%(asctime)s %(levelname)s %(message)s"
            )
            check_packages()
            serve(Settings.from_environment())
            return 0
        case ["run", *rest]:
            check_dependencies()
            with without_collector():
                from workers.run_here import run_here

            check_packages()
            return run_here(rest)
        case ["warm", descriptor]:
            from workers.processes import warm

            warm.main(int(descriptor))
            return 0
        case ["keeper", control, messages, log]:
            from workers.processes import keeper

            keeper.main(int(control), int(messages), int(log))
            return 0
        case ["child", messages]:
            with without_collector():
                from workers.processes import child

            return child.main(int(messages))
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
