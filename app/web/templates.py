"""The Jinja2 environment, with the filters that templates use."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from fastapi.templating import Jinja2Templates
from markupsafe import Markup, escape

from app.layout import FORMATS, doubts, notes, number, verdict


@functools.cache
def _templates() -> Jinja2Templates:
    templates = Jinja2Templates(directory=Path(__file__).parent / "html")
    templates.env.trim_blocks = templates.env.lstrip_blocks = True
    templates.env.filters |= {
        "number": number,
        "verdict": verdict,
        "doubts": doubts,
        "notes": notes,
        "moment": moment,
        "pretty": pretty,
        "commands": commands,
    }
    templates.env.globals["formats_of_tables"] = FORMATS
    return templates


def render(request: Request, template: str, status_code: int = 200, **values: Any) -> Response:
    """Render a page; values are escaped."""
    return _templates().TemplateResponse(request, template, values, status_code=status_code)


def moment(time: str | None) -> str:
    """2026-01-02T03:04:05.678901Z → 2026-01-02 03:04:05 UTC."""
    return "–" if time is None else f"{time[:10]} {time[11:19]} UTC"


def commands(text: str) -> Markup:
    """Escape a text, and set what stands in `backticks` as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))  # noqa: S704 - all of it is escaped


def pretty(value: Any) -> str:
    """Indented JSON."""
    return json.dumps(value, indent=2, ensure_ascii=False)
