"""/docs is Swagger UI; /static has its files and ours, so that browsers load all of them from this server."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import Response
from fastapi.staticfiles import StaticFiles

from app.api.parameters import NO_QUERY
from app.web.templates import render

router = APIRouter(include_in_schema=False)

# Swagger UI sets style attributes.
DOCS_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; frame-ancestors 'none'"
)


def static_files() -> StaticFiles:
    return StaticFiles(directory=Path(__file__).parent / "static")


@router.get("/docs", dependencies=[NO_QUERY])
async def docs(request: Request) -> Response:
    response = render(request, "docs.html")
    response.headers["Content-Security-Policy"] = DOCS_POLICY
    return response
