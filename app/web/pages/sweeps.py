"""/ui/sweeps: the sweeps, newest first."""

from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from app.api.parameters import Cursor, StrictQuery
from app.api.services import CurrentServices
from app.web.parameters import NONE_IF_EMPTY
from app.web.templates import Entry, render
from flopwatch.text.values import value_text

router = APIRouter()
NAVIGATION = Entry("Sweeps", "/ui/sweeps", order=30)

SWEEPS_PER_PAGE = 25
MAX_SHOWN_VALUES = 8
"""Largest number of values of a path that the list names; for more it shows the first, the last and their number."""


class SweepsQuery(StrictQuery):
    after: Annotated[Cursor | None, NONE_IF_EMPTY] = None


@router.get("/sweeps")
def sweeps(request: Request, services: CurrentServices, query: Annotated[SweepsQuery, Query()]) -> Response:
    sweeps, following = services.reading.sweeps(limit=SWEEPS_PER_PAGE, after=query.after)
    return render(
        request,
        "sweeps.html",
        sweeps=[{**sweep, "varies": varies(sweep), "total": sum(sweep["counts"].values())} for sweep in sweeps],
        older=None if following is None else f"/ui/sweeps?{urlencode({'after': following})}",
        newest=query.after is not None,
        this="/ui/sweeps" + (f"?{urlencode({'after': query.after})}" if query.after else ""),
    )


def varies(sweep: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the paths of a sweep's grid with their values in words."""
    grid = [(path, listed(values)) for path, values in sweep["grid"].items() if isinstance(values, list)]
    fit = sweep["fit"]
    return grid if fit is None else [*grid, (fit["axis"], f"the largest that fits, up to {fit['upto']}")]


def listed(values: list[Any]) -> str:
    texts = [value_text(value) for value in values]
    if len(texts) <= MAX_SHOWN_VALUES:
        return ", ".join(texts)
    return f"{texts[0]}, {texts[1]} … {texts[-1]} ({len(texts)} values)"
