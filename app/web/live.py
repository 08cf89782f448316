"""Pages that refresh themselves; they are answered 304 until something has changed, and made once for all browsers."""

import asyncio
import functools
import hashlib
import json
import time
from collections.abc import Callable
from typing import Any

from anyio.to_thread import run_sync
from fastapi import Request
from fastapi.responses import Response

from app.api.parameters import ETag
from app.web.templates import PLOT_POLICY, render
from flopwatch.version import own_version

REVALIDATED = {"Cache-Control": "private, no-cache", "Vary": "HX-Request"}
SHARED_S = 1.0
"""Age of a page, made for one browser, with which the refresh of another one may still be answered."""
MAX_SHARED = 64
KEPT = ("etag", "cache-control", "vary", "content-security-policy")
"""Headers of a page that a 304 repeats: a browser replaces those that it has."""

Known = Callable[[ETag], bool]
"""Tells whether the page with this tag need not be made, since somebody has it."""


class Refreshes:
    """The pages with which refreshes were answered last, by address. It belongs to one event loop."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[float, asyncio.Task[Response]]] = {}

    async def answer(self, request: Request, make: Callable[[Known], Response]) -> Response:
        """Return the page that `make` makes in a thread, or 304 if the browser has it already.

        A refresh is answered with what another one has got within SHARED_S. It says nothing about who asked.
        """
        if not is_refresh(request):
            return await run_sync(make, lambda tag: tag.is_known_to(request))
        address, now = str(request.url), time.monotonic()
        began, making = self._made.get(address, (now, None))
        if making is None or (making.done() and now - began > SHARED_S):
            making = asyncio.create_task(_made_again(make, making))
            making.add_done_callback(lambda made: made.cancelled() or made.exception())  # nobody may wait for it
            self._made.pop(address, None)
            self._made[address] = now, making
            for oldest in list(self._made)[:-MAX_SHARED]:
                del self._made[oldest]
        page = await asyncio.shield(making)
        tag = ETag(page.headers["ETag"].removeprefix("W/").strip('"'))
        headers = dict(page.headers)
        if tag.is_known_to(request):
            return Response(status_code=304, headers={name: headers[name] for name in KEPT if name in headers})
        return Response(page.body, headers=headers)


async def _made_again(make: Callable[[Known], Response], last: asyncio.Task[Response] | None) -> Response:
    """Return the page that `make` makes, or the last one as long as nothing has changed."""
    former = None if last is None or last.cancelled() or last.exception() else last.result()
    page = await run_sync(make, lambda tag: former is not None and former.headers["ETag"] == str(tag))
    return former if former is not None and page.status_code == 304 else page


def is_refresh(request: Request) -> bool:
    """Return True if a page refreshes itself: it takes only the part of the answer that is the same for everybody."""
    return "hx-request" in request.headers


async def refreshed(request: Request, make: Callable[[Known], Response]) -> Response:
    """Answer with a page; see Refreshes.answer."""
    refreshes: Refreshes = request.app.state.refreshes
    return await refreshes.answer(request, make)


@functools.cache
def _version() -> str:
    return own_version()


def page_tag(*parts: str | None) -> ETag:
    """Return the ETag of a page that depends on these texts and this version of Flopwatch. Pages refresh every 2 s."""
    text = json.dumps([*parts, _version()])
    return ETag(hashlib.sha256(text.encode()).hexdigest()[:20], weak=True)


def clock(*, finished: bool) -> str:
    """Return a part for `page_tag`: ages and times so far go on every 10 s until everything has finished."""
    return "" if finished else str(int(time.monotonic() // 10))


def unchanged(tag: ETag, *, plots: bool = False) -> Response:
    """Return the answer to a browser that has the page already, with the page's policy, which it replaces."""
    policy = {"Content-Security-Policy": PLOT_POLICY} if plots else {}
    return Response(status_code=304, headers={"ETag": str(tag), **REVALIDATED, **policy})


def by_content(known: Known, page: Response) -> Response:
    """Return the page, or 304 if its tag is known: for pages that depend on many things."""
    tag = ETag(hashlib.sha256(page.body).hexdigest()[:20], weak=True)
    if known(tag):
        return unchanged(tag)
    page.headers.update({"ETag": str(tag), **REVALIDATED})
    return page


def tagged(tag: ETag, request: Request, template: str, *, plots: bool = False, **values: Any) -> Response:
    """Return the page with an ETag, so that the browser loads it again only if it has changed."""
    response = render(request, template, plots=plots, **values)
    response.headers.update({"ETag": str(tag), **REVALIDATED})
    return response
