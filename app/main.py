"""The application: routes, pages, error handlers, lifespan. Nothing is built at import."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from importlib.metadata import version
from typing import Any

from fastapi import Depends, FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.responses import RedirectResponse
from pydantic.json_schema import models_json_schema

from app.api import bulk, compare, events, health, jobs, problems, queue, results, specs, sweeps, tables, workers
from app.api.bodies import JobBody
from app.api.gate import Gate
from app.api.hosts import AllowedHosts
from app.api.parameters import no_repeats
from app.api.queue import PausedBody
from app.api.services import running
from app.api.sweeps import SweepBody
from app.settings import Settings
from app.web import docs, pages

ROUTERS = (jobs, bulk, events, results, sweeps, queue, tables, compare, specs, workers, health, pages, docs)


def create_app(settings: Settings | None = None) -> FastAPI:
    """Make the application with these settings (by default the environment's); its lifespan opens the database."""
    settings = settings or Settings()

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with running(settings) as services:
            app.state.services = services
            yield

    app = FastAPI(
        title="Flopwatch",
        version=version("flopwatch"),
        summary="A self-hosted profiling job queue for transformer training",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses={"default": problems.DOCUMENTED},
        dependencies=[Depends(no_repeats)],
    )
    problems.install(app, pages.error_page)
    app.add_middleware(
        Gate,
        token=settings.api_token.get_secret_value() if settings.api_token else None,
        hosts=AllowedHosts(settings.host, settings.allowed_hosts),
    )
    for module in ROUTERS:
        app.include_router(module.router)
    app.mount("/static", docs.static_files(), name="static")
    app.get("/", include_in_schema=False)(_to_pages)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


async def _to_pages() -> RedirectResponse:
    return RedirectResponse("/ui")


def _openapi(app: FastAPI) -> dict[str, Any]:
    """Make the OpenAPI schema of all routes, with their bodies, which the routes read by themselves."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
        _, bodies = models_json_schema(
            [(body, "validation") for body in (JobBody, SweepBody, PausedBody)],
            ref_template="#/components/schemas/{model}",
        )
        schema.setdefault("components", {}).setdefault("schemas", {}).update(bodies["$defs"])
        app.openapi_schema = schema
    return app.openapi_schema
