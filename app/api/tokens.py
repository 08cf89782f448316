"""/tokens: make, list and revoke access tokens."""

from datetime import timedelta
from typing import Annotated

from fastapi import APIRouter, Depends
from fastapi.responses import Response
from pydantic import Field

from app.api.access import ADMIN
from app.api.bodies import Body, Line, json_body, request_body
from app.api.parameters import NO_QUERY, Json
from app.api.schemas import NewToken, Page, Token
from app.api.services import CurrentServices
from app.errors import InvalidRequest
from app.specs._base import StrictModel
from app.store.tables import utc_now
from app.tokens import Scope

router = APIRouter(prefix="/tokens", tags=["tokens"])

MAX_DAYS = 3660


class TokenBody(StrictModel):
    """The body of `POST /tokens`."""

    name: Line
    """Whose token it is: `submitted_by` of the jobs that it submits. Several tokens may have one name."""
    scope: Scope
    """The scope that it allows; each includes those before it."""
    expires_days: Annotated[float, Field(gt=0, le=MAX_DAYS)] | None
    """Days after which it ends; null: never."""


read_token_body = json_body(TokenBody)


@router.post(
    "",
    status_code=201,
    responses={201: {"model": NewToken}},
    openapi_extra=request_body(TokenBody),
    dependencies=[NO_QUERY, ADMIN],
    summary="Make a token",
)
async def create_token(
    services: CurrentServices, body: Annotated[Body[TokenBody], Depends(read_token_body)]
) -> Response:
    """Returns the token, which nobody can read again. From the first one on the server asks for a token, so that one
    must have the scope `admin` unless FLOPWATCH_API_TOKEN is set."""
    wanted = body.model
    if services.guard.is_open and wanted.scope != "admin":
        detail = (
            "The first token must have the scope admin: from then on the server asks for a token, and only an admin's "
            "could make others"
        )
        raise InvalidRequest.at("/scope", detail)
    expires_at = None if wanted.expires_days is None else utc_now() + timedelta(days=wanted.expires_days)
    made, text = await services.writes.run(lambda: services.access_tokens.create(wanted.name, wanted.scope, expires_at))
    await services.guard.refresh(at_once=True)
    headers = {"Cache-Control": "no-store"}
    return Json({**made, "token": text}, status_code=201, headers=headers)


@router.get(
    "", responses={200: {"model": Page[Token]}}, dependencies=[NO_QUERY, ADMIN], summary="List tokens, oldest first"
)
def list_tokens(services: CurrentServices) -> Response:
    """Returns the tokens without their secrets. `last_used_at` may be a minute late."""
    return Json({"data": services.access_tokens.all(), "next": None})


@router.delete("/{token_id}", status_code=204, dependencies=[NO_QUERY, ADMIN], summary="Revoke a token")
async def revoke_token(services: CurrentServices, token_id: str) -> Response:
    """Revokes a token at once, and ends its event streams; other servers of the same database notice within a second.

    409 for the last token, without which the server would be open, unless FLOPWATCH_API_TOKEN is set.
    """
    keep_one = services.settings.api_token is None
    await services.writes.run(lambda: services.access_tokens.revoke(token_id, keep_one=keep_one))
    await services.guard.refresh(at_once=True)
    services.changes.wake_all()
    return Response(status_code=204)
