"""Answers errors as RFC 9457 problem+json: ours, the framework's and unexpected ones."""

import re
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic_core import to_json
from starlette.exceptions import HTTPException

from app.api.metrics import REQUEST_ID
from app.api.pointers import parameter_errors
from app.errors import PROBLEM_PREFIX, FlopwatchError, InvalidRequest
from app.logs import request_id

PROBLEM_MEDIA_TYPE = "application/problem+json"

# Codes for statuses that the framework itself raises.
HTTP_CODES = {400: "bad_request", 404: "not_found", 405: "method_not_allowed", 416: "range_not_satisfiable"}

PROBLEM_SCHEMA: dict[str, Any] = {
    "title": "Problem",
    "type": "object",
    "required": ["type", "title", "status", "detail", "instance", "code"],
    "properties": {
        **{name: {"type": "string"} for name in ("type", "title", "detail", "instance", "code", "request_id")},
        "status": {"type": "integer"},
        "errors": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["pointer", "detail"],
                "properties": {"pointer": {"type": "string"}, "detail": {"type": "string"}},
            },
        },
    },
}
# The errors of every route, for /openapi.json.
DOCUMENTED: dict[str, Any] = {
    "description": "A problem (RFC 9457).",
    "content": {PROBLEM_MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
}


def problem(error: FlopwatchError, instance: str) -> dict[str, Any]:
    """Return the problem object of an error; `instance` is the request's path."""
    body = {**_body(error.code, error.title, error.status, error.detail, instance), **error.extensions}
    if error.errors:
        body["errors"] = [{"pointer": field.pointer, "detail": field.detail} for field in error.errors]
    return body


def problem_response(body: dict[str, Any], headers: Mapping[str, str] | None = None) -> Response:
    return Response(to_json(body), status_code=body["status"], media_type=PROBLEM_MEDIA_TYPE, headers=headers)


def http_problem(error: HTTPException, request: Request) -> dict[str, Any]:
    """Return the problem object of an error that the framework raised: no such route, wrong method, …"""
    code = HTTP_CODES.get(error.status_code, "http_error")
    title = HTTPStatus(error.status_code).phrase
    detail = error.detail if error.detail != title else ""
    if error.status_code == HTTPStatus.NOT_FOUND and not detail:
        detail = f"There is nothing at {request.url.path}; /docs lists the routes."
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        detail = f"{request.url.path} does not take {request.method}; it takes {', '.join(allowed_methods(request))}."
    return _body(code, title, error.status_code, detail or title, request.url.path)


def _body(code: str, title: str, status: int, detail: str, instance: str) -> dict[str, Any]:
    body = {"type": PROBLEM_PREFIX + code, "title": title, "status": status, "detail": detail, "instance": instance}
    return {**body, "code": code, **({} if (found := request_id()) is None else {"request_id": found})}


def allowed_methods(request: Request) -> list[str]:
    """Return the methods of all routes with the request's path; the framework names only those of the first.

    A path of its own counts more than one with a parameter: `/jobs/cancel` is no job. What the document leaves out,
    pages and static files, takes GET.
    """
    paths, path = request.app.openapi()["paths"], request.url.path
    templates = (
        [path]
        if path in paths
        else [one for one in paths if re.fullmatch(re.sub(r"\\{[^}]*\\}", "[^/]+", re.escape(one)), path)]
    )
    methods = {method.upper() for template in templates for method in paths[template]} or {"GET"}
    return sorted(methods | ({"HEAD"} if "GET" in methods else set()))


# Function that makes a page of a problem, or returns None when the request is not for a page.
ErrorPage = Callable[[Request, dict[str, Any]], Response | None]


def install(app: FastAPI, error_page: ErrorPage) -> None:
    """Make `app` answer every error as a problem, and errors of pages with a page."""

    def answer(request: Request, body: dict[str, Any], headers: Mapping[str, str] | None = None) -> Response:
        page = error_page(request, body)
        if page is None:
            return problem_response(body, headers)
        page.headers.update(headers or {})
        return page

    @app.exception_handler(FlopwatchError)
    async def _ours(request: Request, error: FlopwatchError) -> Response:
        request.app.state.requests.note_error(error)
        return answer(request, problem(error, request.url.path), error.headers)

    @app.exception_handler(RequestValidationError)
    async def _parameters(request: Request, error: RequestValidationError) -> Response:
        queries = [parameter.field_info.annotation for parameter in request.scope["route"].dependant.query_params]
        known = [name for query in queries for name in getattr(query, "model_fields", ())]
        errors = parameter_errors(error.errors(), known)
        invalid = InvalidRequest("; ".join(field.detail for field in errors), errors=errors)
        return answer(request, problem(invalid, request.url.path))

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Response:
        headers = dict(error.headers or {})
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            headers["Allow"] = ", ".join(allowed_methods(request))
        return answer(request, http_problem(error, request), headers)

    @app.exception_handler(Exception)
    async def _unforeseen(request: Request, _error: Exception) -> Response:
        # The server logs the traceback; the client must not see it.
        unforeseen = FlopwatchError("An error that we did not foresee; the server's log says more.")
        # After an error uvicorn ends the connection, whatever a client may have sent on it meanwhile: say so.
        headers = {"Connection": "close"} | ({} if (found := request_id()) is None else {REQUEST_ID: found})
        return answer(request, problem(unforeseen, request.url.path), headers)
