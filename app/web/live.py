"""Pages that refresh themselves; they are answered 304 until something has changed."""

from __future__ import annotations

import hashlib
import json
import time
from importlib.metadata import version as package_version
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from app.api.parameters import ETag
from app.web.templates import PLOT_POLICY, render

REVALIDATED = {"Cache-Control": "private, no-cache"}


def page_tag(*parts: str | None) -> ETag:
    """Return the ETag of a page that depends on these texts and on this version of Flopwatch. Pages refresh every 2
    s."""
    text = json.dumps([*parts, package_version("flopwatch")])
    return ETag(hashlib.sha256(text.encode()).hexdigest()[:20], weak=True)


def clock(*, finished: bool) -> str:
    """Return a part for `page_tag`: ages and times so far go on every 10 s until everything has finished."""
    return "" if finished else str(int(time.monotonic() // 10))


def unchanged(tag: ETag, *, plots: bool = False) -> Response:
    """Return the answer to a browser that already has the page. It must include the page's policy, which it
    replaces."""
    policy = {"Content-Security-Policy": PLOT_POLICY} if plots else {}
    return Response(status_code=304, headers={"ETag": str(tag), **REVALIDATED, **policy})


def by_content(request: Request, page: Response) -> Response:
    """Return the page, or 304 if the browser already has the same one: for pages that depend on many things."""
    tag = ETag(hashlib.sha256(page.body).hexdigest()[:20], weak=True)
    if tag.is_known_to(request):
        return unchanged(tag)
    page.headers.update({"ETag": str(tag), **REVALIDATED})
    return page


def tagged(tag: ETag, request: Request, template: str, *, plots: bool = False, **values: Any) -> Response:
    """Return the page with an ETag, so that the browser loads it again only if it has changed."""
    response = render(request, template, plots=plots, **values)
    response.headers.update({"ETag": str(tag), **REVALIDATED})
    return response
