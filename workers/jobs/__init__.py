"""The runners, one per kind, in a file or a folder named like the file of its spec. Importing this package imports no
torch.

Files and folders whose names begin with an underscore are shared by kinds.
"""

import importlib
import pkgutil

from workers.jobs._base import Runner
from workers.outcome import Unsupported


def _walk() -> dict[str, Runner]:
    runners: dict[str, Runner] = {}
    for module_info in pkgutil.iter_modules(__path__):
        if module_info.name.startswith("_"):
            continue
        runner: Runner = importlib.import_module(f"{__name__}.{module_info.name}").RUNNER
        if runner.kind != module_info.name:
            raise RuntimeError(f"{module_info.name} in workers/jobs runs kind {runner.kind!r}: name the file after it")
        runners[runner.kind] = runner
    return runners


RUNNERS: dict[str, Runner] = _walk()


def runner_for(kind: str) -> Runner:
    """Return the runner of a kind. Raises Unsupported: this worker has no runner of that kind."""
    try:
        return RUNNERS[kind]
    except KeyError:
        raise Unsupported(f"no runner for kind {kind!r}; this worker runs {', '.join(sorted(RUNNERS))}") from None
