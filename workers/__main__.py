"""`python -m workers agent | run SPEC | doctor`; only launch.py uses keeper, warm, child and wrapped."""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib import metadata
from pathlib import Path

from app import logs
from app.errors import FlopwatchError
from app.importing import without_collector
from workers.outcome import InvalidEnvironment


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
