"""Pages that ask for themselves again while something changes: they are answered 304 until it has."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version as package_version
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from app.api.parameters import ETag
from app.web.templates import PLOT_POLICY, render

REVALIDATED = {"Cache-Control": "private, no-cache"}


def page_tag(*parts: str | None) -> ETag:
    """The ETag of a page that these texts and this version of Flopwatch make. A page asks for itself every 2 s."""
    text = json.dumps([*parts, package_version("flopwatch")])
    return ETag(hashlib.sha256(text.encode()).hexdigest()[:20], weak=True)


def unchanged(tag: ETag, *, plots: bool = False) -> Response:
    """The answer to a browser that has the page already. It sets the page's policy anew, so it must tell that, too."""
    policy = {"Content-Security-Policy": PLOT_POLICY} if plots else {}
    return Response(status_code=304, headers={"ETag": str(tag), **REVALIDATED, **policy})


def by_content(request: Request, page: Response) -> Response:
    """The page, or 304 if it is the same as the one that the browser has: for pages that many things change."""
    tag = ETag(hashlib.sha256(page.body).hexdigest()[:20], weak=True)
    if tag.is_known_to(request):
        return unchanged(tag)
    page.headers.update({"ETag": str(tag), **REVALIDATED})
    return page


def tagged(tag: ETag, request: Request, template: str, *, plots: bool = False, **values: Any) -> Response:
    """The page, for the browser to keep and to ask for again only if it has changed."""
    response = render(request, template, plots=plots, **values)
    response.headers.update({"ETag": str(tag), **REVALIDATED})
    return response
