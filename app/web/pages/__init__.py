"""The pages: each module of this folder has the routes of one page, and its entry in the navigation if it has one.

A module defines `router`, an APIRouter whose paths begin behind /ui, and may define `NAVIGATION`, an Entry. Nothing
else knows the list. Modules whose names begin with an underscore are no pages.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from app.web.templates import Entry, render, set_navigation

PREFIX = "/ui"


def _walk() -> tuple[APIRouter, list[Entry]]:
    found = APIRouter(include_in_schema=False)
    entries: list[Entry] = []
    for module_info in pkgutil.iter_modules(__path__):
        if module_info.name.startswith("_"):
            continue
        module = importlib.import_module(f"{__name__}.{module_info.name}")
        if getattr(module, "router", None) is None:
            raise RuntimeError(f"{module.__name__} must define `router`, an APIRouter")
        found.include_router(module.router, prefix=PREFIX)
        if (entry := getattr(module, "NAVIGATION", None)) is not None:
            entries.append(entry)
    return found, sorted(entries, key=lambda entry: entry.order)


router, _entries = _walk()
set_navigation([*_entries, Entry("API", "/docs", order=1000)])


def error_page(request: Request, problem: dict[str, Any]) -> Response | None:
    """Return the page that shows a page's error; None for requests that are not for pages."""
    path = request.url.path
    if path != PREFIX and not path.startswith(f"{PREFIX}/"):
        return None
    return render(request, "error.html", status_code=problem["status"], problem=problem)
