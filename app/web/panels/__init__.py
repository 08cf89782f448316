"""The panels of a job's page: plots and other views of the kind's results.

Each module of this folder has the panels of the kind it is named after: it defines `panels(results)`, which returns the
panels that this job's results allow. A kind without a module gets `cells.panels`, charts of its spec's `table_columns`.
Modules whose names begin with an underscore, and `cells`, are shared. Panels are made anew for each request; a plot is
drawn only when a browser asks for it.
"""

import importlib
import logging
import pkgutil
from collections.abc import Callable, Iterable, Mapping

from app.web.panels import cells
from app.web.panels._panel import Panel
from app.web.panels._results import JobResults

__all__ = ["JobResults", "Panel", "panels_of"]

logger = logging.getLogger(__name__)

SHARED = "cells"
TRACE = "trace"
"""Kind of the artifacts that are Chrome traces."""


def _walk() -> Mapping[str, Callable[[JobResults], Iterable[Panel]]]:
    names = [info.name for info in pkgutil.iter_modules(__path__)]
    own = [name for name in names if not name.startswith("_") and name != SHARED]
    return {name: importlib.import_module(f"{__name__}.{name}").panels for name in own}


_PANELS = _walk()


def panels_of(results: JobResults) -> list[Panel]:
    """Return the panels of a job, in the order in which its page shows them. A job of any kind may have a trace."""
    kind = results.job["kind"]
    try:
        own = list(_PANELS.get(kind, cells.panels)(results))
    except (KeyError, TypeError, ValueError):
        # A plug-in or another version may report a table of a known name with other columns.
        logger.warning(
            "job %s of kind %s has tables that its panels do not know", results.job["id"], kind, exc_info=True
        )
        own = []
    return [*own, *traces(results)]


def traces(results: JobResults) -> list[Panel]:
    """Return a panel for the first Chrome trace of a job."""
    artifacts = [artifact for artifact in results.artifacts.values() if artifact["kind"] == TRACE]
    return [Panel("trace", "Trace", template="trace.html", values={"trace": artifacts[0]}) for _ in artifacts[:1]]
