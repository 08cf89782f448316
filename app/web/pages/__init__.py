"""The pages: each module of this folder has the routes of one page, and its entry in the navigation if it has one.

A module defines `router`, an APIRouter whose paths are relative to /ui, and may define `NAVIGATION`, an Entry. Nothing
else knows the list. Modules whose names begin with an underscore are not pages.
"""

import importlib
import pkgutil
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from app.web.templates import Entry, render, set_navigation

PREFIX = "/ui"


_names = (info.name for info in pkgutil.iter_modules(__path__) if not info.name.startswith("_"))
MODULES = [importlib.import_module(f"{__name__}.{name}") for name in _names]
router = APIRouter(include_in_schema=False)
for _module in MODULES:
    router.include_router(_module.router, prefix=PREFIX)
_entries = [module.NAVIGATION for module in MODULES if hasattr(module, "NAVIGATION")]
set_navigation(sorted([*_entries, Entry("API", "/docs", order=1000)], key=lambda entry: entry.order))


def error_page(request: Request, problem: dict[str, Any]) -> Response | None:
    """Return the page that shows a page's error; None for requests that are not for pages."""
    path = request.url.path
    if path != PREFIX and not path.startswith(f"{PREFIX}/"):
        return None
    return render(request, "error.html", status_code=problem["status"], problem=problem)
