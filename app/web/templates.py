"""The Jinja2 environment: filters, the navigation, the addresses of static files, and the policies of pages."""

import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from fastapi.templating import Jinja2Templates
from markupsafe import Markup, escape

from app import results
from app.metrics import in_a_sentence, readable
from app.results.rendering import with_code
from app.states import FIRST_IN_QUEUE
from flopwatch.table_options import FORMATS
from flopwatch.text.numbers import NOTHING, number
from flopwatch.text.times import age, duration, moment, ran, rough_duration
from flopwatch.text.validity import doubts, noisy_host, notes, verdict, why

STATIC = Path(__file__).parent / "static"

PLOT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
"""Plotly sets style attributes, and makes its downloadable pictures from data and blob URLs. It needs no eval."""


@dataclass(frozen=True)
class Entry:
    """A page in the navigation; those with a smaller `order` stand further left."""

    title: str
    path: str
    order: int


@functools.cache
def _templates() -> Jinja2Templates:
    templates = Jinja2Templates(directory=Path(__file__).parent / "html")
    templates.env.auto_reload = False
    templates.env.trim_blocks = templates.env.lstrip_blocks = True
    filters = (
        *(breakable, short_hash, number, noisy_host, verdict, doubts, why, notes, pretty, plain, commands, readable),
        *(in_a_sentence, age, ago, ran, duration, rough_duration),
    )
    templates.env.filters |= {each.__name__: each for each in filters}
    templates.env.filters |= {"moment": lambda time: moment(time) or NOTHING, "kind": kind_title}
    templates.env.globals |= {"formats_of_tables": FORMATS, "first_in_queue": FIRST_IN_QUEUE, "asset": asset}
    return templates


def set_navigation(entries: Sequence[Entry]) -> None:
    """Show these entries in the header of every page; templates link other pages only if `has_page` says that they
    exist."""
    paths = {entry.path for entry in entries}
    _templates().env.globals |= {"navigation": list(entries), "has_page": paths.__contains__}


def render(request: Request, template: str, status_code: int = 200, *, plots: bool = False, **values: Any) -> Response:
    """Render a page; values are escaped. A page with plots gets the policy that lets Plotly draw."""
    headers = {"Content-Security-Policy": PLOT_POLICY} if plots else None
    return _templates().TemplateResponse(request, template, values, status_code=status_code, headers=headers)


def page_text(template: str, **values: Any) -> str:
    """Return the text of a page that stands alone; values are escaped."""
    return str(_templates().get_template(template).render(**values))


def embedded(figure: Mapping[str, Any]) -> dict[str, Any]:
    """Return a figure for the macro `figure` of parts.html: `json`; `height`, in pixels, if it has one; `id`, which
    changes with it, since a page draws a figure again only when its id changes; and `is_cut`, True if its note says
    what is left out."""
    # Inside a script element nothing but "</" could end it.
    text = json.dumps(figure, allow_nan=False).replace("<", "\\u003c")
    digest = hashlib.sha256(text.encode()).hexdigest()
    is_cut, height = bool(figure.get("note")), figure.get("layout", {}).get("height")
    return {"json": Markup(text), "id": f"plot-{digest[:20]}", "is_cut": is_cut, "height": height}  # noqa: S704  # no "<" is left


@functools.cache
def asset(name: str) -> str:
    """Return the address of a static file, which changes with its content, so that browsers may keep it for ever."""
    digest = hashlib.sha256((STATIC / name).read_bytes()).hexdigest()
    return f"/static/{name}?v={digest[:12]}"


def ago(time: str) -> str:
    """Return the age of a time, to the minute, so that a page that refreshes itself does not change every second."""
    text = age(time) or ""
    return "just now" if text.endswith(" s ago") else text


def commands(text: str) -> Markup:
    """Escape a text, and mark up parts in `backticks` as code."""
    return Markup(with_code(text))  # noqa: S704 - all of it is escaped


def pretty(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)


def kind_title(kind: str) -> str:
    """Return the name of a kind of job as a heading: "mixed_precision" is "Mixed precision"."""
    return {"ddp": "Data parallel"}.get(kind, kind.replace("_", " ").capitalize())


def breakable(text: str, after: str = "/@") -> Markup:
    """Return a text with places to break after these characters, rather than within a word: a case's names have none
    else."""
    return Markup(re.sub(f"([{after}])", r"\1<wbr>", str(escape(text))))  # noqa: S704  # escaped


def short_hash(value: Any) -> Any:
    """Return a hash's first digits; anything else as it is."""
    return value[:8] if isinstance(value, str) and re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", value) else value


def plain(value: Any) -> str:
    """Write a value for people: texts unchanged, lists with commas, others as JSON; "–" if there is none."""
    if value is None:
        return NOTHING
    if isinstance(value, list):
        return ", ".join(map(plain, value))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def table(sheet: results.Sheet) -> Markup:
    """Return a table of results as HTML, whose heads may be broken after underscores; empty if it has no rows."""
    text = results.render(sheet, "html") if sheet.rows else ""
    text = re.sub("<th[^<]*</th>", lambda head: head[0].replace("_", "_<wbr>"), text)
    return Markup(text)  # noqa: S704  # its cells are escaped
