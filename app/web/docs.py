"""/docs is Swagger UI; /static has its files and ours, so that browsers load all of them from this server."""

import os

from fastapi import APIRouter, Request
from fastapi.responses import Response
from fastapi.staticfiles import StaticFiles
from starlette.staticfiles import PathLike
from starlette.types import Scope

from app.api.parameters import NO_QUERY
from app.web.templates import STATIC, render

router = APIRouter(include_in_schema=False)

# Swagger UI sets style attributes.
DOCS_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; frame-ancestors 'none'"
)


class _StaticFiles(StaticFiles):
    """Files that browsers cache without limit if their address has their version, and revalidate otherwise."""

    def file_response(
        self, full_path: PathLike, stat_result: os.stat_result, scope: Scope, status_code: int = 200
    ) -> Response:
        response = super().file_response(full_path, stat_result, scope, status_code)
        # The ETag is of the file; what is sent may be compressed.
        response.headers["ETag"] = f"W/{response.headers['ETag']}"
        versioned = scope["query_string"].startswith(b"v=")
        response.headers["Cache-Control"] = "public, max-age=31536000, immutable" if versioned else "no-cache"
        return response


def static_files() -> StaticFiles:
    return _StaticFiles(directory=STATIC)


@router.get("/docs", dependencies=[NO_QUERY])
async def docs(request: Request) -> Response:
    response = render(request, "docs.html")
    response.headers["Content-Security-Policy"] = DOCS_POLICY
    return response
