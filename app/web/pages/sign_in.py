"""/ui/sign-in: a browser gets a session for a token; /ui/sign-out ends it."""

import re
from typing import Annotated
from urllib.parse import parse_qs

from fastapi import APIRouter, Query, Request
from fastapi.responses import RedirectResponse, Response

from app.api.bodies import read_limited
from app.api.gate import address_of, cookie_of, is_cross_site
from app.api.guard import cookie_name
from app.api.parameters import NO_QUERY, StrictQuery
from app.api.services import CurrentServices
from app.errors import TooManyRequests, Unauthorized
from app.web.templates import render

router = APIRouter()

HOME = "/ui"
MAX_FORM_BYTES = 64 << 10
"""Anybody may send this form, and to parse one takes the event loop's time."""


class NextQuery(StrictQuery):
    next: str = HOME
    """The page to go to then."""


@router.get("/sign-in")
async def form(request: Request, services: CurrentServices, query: Annotated[NextQuery, Query()]) -> Response:
    wanted = _own_path(query.next)
    if services.guard.is_open:
        return RedirectResponse(wanted, status_code=303)
    # A link on another site comes without the cookie, which is SameSite=Strict; one from this page comes with it.
    page = render(request, "sign_in.html", next=wanted, again=is_cross_site(request.headers))
    page.headers["Cache-Control"] = "no-store"
    return page


@router.post("/sign-in", dependencies=[NO_QUERY])
async def sign_in(request: Request, services: CurrentServices) -> Response:
    raw = await read_limited(request, MAX_FORM_BYTES)
    sent = parse_qs(raw.decode(errors="replace"))
    wanted = _own_path(sent.get("next", [HOME])[0])
    try:
        access = services.guard.by_token(sent.get("token", [""])[0].strip().encode(), address_of(request.scope))
    except (Unauthorized, TooManyRequests) as wrong:
        page = render(request, "sign_in.html", status_code=wrong.status, next=wanted, wrong=wrong.detail)
        page.headers.update(wrong.headers)
        return page
    answer = RedirectResponse(wanted, status_code=303)
    answer.set_cookie(
        cookie_name(request.headers.get("host", "")),
        services.guard.begin_session(access),
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
    return answer


@router.post("/sign-out", dependencies=[NO_QUERY])
async def sign_out(request: Request, services: CurrentServices) -> Response:
    services.guard.end_session(cookie_of(request.headers))
    services.changes.wake_all()
    answer = RedirectResponse("/ui/sign-in", status_code=303)
    name = cookie_name(request.headers.get("host", ""))
    answer.delete_cookie(name, httponly=True, samesite="strict", secure=request.url.scheme == "https")
    return answer


def _own_path(wanted: str) -> str:
    """Return a path of this server; the jobs' page for what leads elsewhere, such as //evil.example."""
    return wanted if re.fullmatch(r"/(?![/\\])[ -~]*", wanted) else HOME
