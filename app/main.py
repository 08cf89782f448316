"""The application: routes, pages, error handlers, lifespan. Only routes are built at import."""

import contextlib
import json
import re
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Depends, FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.responses import RedirectResponse
from pydantic.json_schema import models_json_schema

from app.api import (
    baselines,
    bulk,
    compare,
    events,
    files,
    health,
    history,
    jobs,
    problems,
    queue,
    results,
    specs,
    sweeps,
    tables,
    tokens,
    workers,
)
from app.api.baselines import BaselineBody
from app.api.bodies import JobBody, JobChanges
from app.api.gate import PROBES, Compression, Gate
from app.api.hosts import AllowedHosts
from app.api.metrics import Counted, Requests
from app.api.parameters import no_repeats
from app.api.queue import PausedBody
from app.api.services import running
from app.api.sweeps import SweepBody
from app.api.tokens import TokenBody
from app.settings import Settings
from app.specs import KINDS
from app.web import docs, pages, pictures
from app.web.live import Refreshes
from flopwatch.version import own_version

ROUTERS = (
    *(jobs, bulk, events, results, files, sweeps, queue, tables, compare, baselines, history, pictures, specs),
    *(workers, tokens, health),
    *(pages, docs),
)
ROUTES = APIRouter(
    generate_unique_id_function=lambda route: route.name,
    responses={"default": problems.DOCUMENTED},
    dependencies=[Depends(no_repeats)],
)
"""Applications share these, since FastAPI builds anew what each one includes."""
for _module in ROUTERS:
    ROUTES.include_router(_module.router)

SECURITY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "An access token; none if the server has none."},
}


def create_app(settings: Settings | None = None) -> FastAPI:
    """Make the application with these settings (by default the environment's); its lifespan opens the database."""
    settings = settings or Settings()

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with running(settings, app.state.requests.note_error) as services:
            app.state.services = services
            yield

    app = FastAPI(
        title="Flopwatch",
        version=own_version(),
        summary="A self-hosted profiling job queue for transformer training",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    problems.install(app, pages.error_page)
    app.add_middleware(Compression)
    app.add_middleware(Gate, hosts=AllowedHosts(settings.host, settings.allowed_hosts), error_page=pages.error_page)
    app.state.requests, app.state.refreshes = Requests(), Refreshes()
    app.add_middleware(Counted, requests=app.state.requests)
    app.routes.extend(ROUTES.routes)
    app.mount("/static", docs.static_files(), name="static")
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


@ROUTES.get("/", include_in_schema=False)
async def _to_pages() -> RedirectResponse:
    return RedirectResponse("/ui")


def _openapi(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
        _, bodies = models_json_schema(
            [(body, "validation") for body in (JobBody, JobChanges, SweepBody, PausedBody, BaselineBody, TokenBody)],
            ref_template="#/components/schemas/{model}",
        )
        components = schema.setdefault("components", {})
        components.setdefault("schemas", {}).update(bodies["$defs"], Problem=problems.PROBLEM_SCHEMA)
        for spec in KINDS.values():  # `kind` has a default in Python, and none in a request
            components["schemas"][spec.__name__].setdefault("required", []).insert(0, "kind")
        components["securitySchemes"] = SECURITY_SCHEMES
        schema["security"] = [*({name: []} for name in SECURITY_SCHEMES), {}]  # a server without tokens asks for none
        for path in PROBES:
            schema["paths"][path]["get"]["security"] = []
        app.openapi_schema = _with_named_pages(schema)
    return app.openapi_schema


def _with_named_pages(schema: dict[str, Any]) -> dict[str, Any]:
    """Name the page of each kind of thing ("JobPage"); FastAPI titles all of them Page."""
    schemas = schema["components"]["schemas"]
    pages = {name: f"{match[1]}Page" for name in schemas if (match := re.fullmatch(r"Page_(\w+)_", name))}
    text = json.dumps(schema)
    for name, better in pages.items():
        text = text.replace(f'"#/components/schemas/{name}"', f'"#/components/schemas/{better}"')
    named: dict[str, Any] = json.loads(text)
    of_all = named["components"]["schemas"]
    named["components"]["schemas"] = {
        pages.get(name, name): {**component, "title": pages[name]} if name in pages else component
        for name, component in of_all.items()
    }
    return named
