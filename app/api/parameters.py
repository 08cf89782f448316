"""Reads ids, query parameters and headers of requests, and answers conditional requests."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, get_origin
from urllib.parse import unquote

from fastapi import Depends, Path, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError, to_json

from app.errors import FieldError, InvalidRequest, NotFound
from app.store.public import MAX_ID
from app.store.records import Idempotency
from flopwatch.defaults import USER
from flopwatch.text.times import moment_of

MAX_WAIT_S = 60
MAX_KEY_LENGTH = 255
MAX_USER_LENGTH = 200
A_KEY = f"^[ -~]{{1,{MAX_KEY_LENGTH}}}$"


class Json(Response):
    """JSON, written by pydantic's serializer: no NaN, and several times faster than the default."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content, inf_nan_mode="null")


def parse_id(text: str, what: str) -> int:
    """Parse the id in a path; a text that cannot be an id is answered as not found."""
    if re.fullmatch(r"[0-9]{1,19}", text, re.ASCII) and 0 < int(text) <= MAX_ID:
        return int(text)
    raise NotFound(f"There is no {what} {text!r}.")


AN_ID: Any = {"type": "string", "pattern": "^[1-9][0-9]{0,17}$"}
"""The schema of an id in a path: a text, so that a wrong one is answered 404, not 422."""


async def _job_id(job_id: Annotated[str, Path(description="The job's id."), WithJsonSchema(AN_ID)]) -> int:
    return parse_id(job_id, "job")


async def _sweep_id(sweep_id: Annotated[str, Path(description="The sweep's id."), WithJsonSchema(AN_ID)]) -> int:
    return parse_id(sweep_id, "sweep")


JobId = Annotated[int, Depends(_job_id)]
SweepId = Annotated[int, Depends(_sweep_id)]
"""An id in a path; a text that cannot be an id is answered 404."""
Id = Annotated[int, Field(ge=1, le=MAX_ID)]
"""An id in a query."""


class StrictQuery(BaseModel):
    """Base of query parameters: unknown ones are refused."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class SubmissionQuery(StrictQuery):
    dry_run: bool = False
    """Only check the request: nothing is stored, and the answer is 200 with the number of `jobs`."""


def _label(value: str) -> tuple[str, str]:
    parts = re.split("[:=]", value, maxsplit=1)  # no key has either of them
    if not parts[0] or len(parts) < 2:
        raise PydanticCustomError("label", "must be written key=value")
    return parts[0], parts[1]


def _moment(value: str) -> datetime:
    # An unescaped "+" before a time zone's offset arrives as a space.
    try:
        return moment_of(re.sub(r"(:\d{2}(?:\.\d+)?) (\d{2}:?\d{2})$", r"\1+\2", value))
    except (ValueError, OverflowError) as error:
        raise PydanticCustomError("moment", "{why}", {"why": str(error)}) from None


def _coordinate(value: str) -> tuple[str, str]:
    name, equals, wanted = value.partition("=")
    if not name.strip() or not equals:
        raise PydanticCustomError("coordinate", "must be written coordinate=value, such as precision=fp32")
    return name.strip(), wanted.strip()


def _each_once(pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    names = [name for name, _ in pairs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise PydanticCustomError("twice", "gives {name} twice", {"name": twice})
    return pairs


def documented(pattern: str) -> Any:
    """Return the field that shows a pattern in /openapi.json, where a validator with a clearer message holds it."""
    return Field(json_schema_extra={"pattern": pattern})


Text = Annotated[str, Field(max_length=200, pattern=r"^[^\u0000]*$")]
Cursor = Annotated[str, Field(pattern="^[0-9]{1,18}$")]
Label = Annotated[Text, documented(r"^[^:=\u0000]+[:=][^\u0000]*$"), AfterValidator(_label)]
Moment = Annotated[Text, AfterValidator(_moment)]
"""A time as people write it: 7d, 2026-03-01, 2026-03-01T14:00:00Z; the validator turns it into a datetime."""
Coordinate = Annotated[
    str,
    Field(max_length=2000, pattern=r"^[^\u0000]*$"),
    documented(r"^[^=\u0000]*[^=\s\u0000][^=\u0000]*=[^\u0000]*$"),
    AfterValidator(_coordinate),
]
"""coordinate=value, such as the whole name of a kernel; the validator turns it into a pair."""
EACH_ONCE = AfterValidator(_each_once)
"""For a list of such pairs, of which no two have one name."""
Limit = Annotated[int, Field(ge=1, le=500)]


async def no_query(request: Request) -> None:
    """Refuse any query parameter; for routes without parameters."""
    if request.query_params:
        names = ", ".join(sorted(request.query_params))
        raise InvalidRequest.at("", f"Unknown query parameter: {names}; this route takes none.")


NO_QUERY = Depends(no_query)


_HEADERS = {
    "Idempotency-Key": "Repeating the request with the same key and body gets the first answer and changes nothing.",
    USER: "The user who sends the request, percent-encoded UTF-8, if the token has no name; `submitted_by`.",
    "Prefer": "`wait=N` holds the answer for up to N seconds, at most 60, until the job is done.",
    "If-None-Match": "The `ETag` of an answer that the client has: 304 if it still holds.",
    "Range": "`bytes=0-1023`: a part of the file.",
}


def declared(*headers: str) -> dict[str, Any]:
    """Return the /openapi.json entry of request headers, which the routes read themselves."""
    return {
        "parameters": [
            {
                "name": name,
                "in": "header",
                "required": False,
                "description": _HEADERS[name],
                "schema": {"type": "string", **({"pattern": A_KEY} if name == "Idempotency-Key" else {})},
            }
            for name in headers
        ]
    }


def described(headers: Mapping[str, str]) -> dict[str, Any]:
    """Return the /openapi.json entries of an answer's headers, given with their descriptions."""
    return {name: {"description": text, "schema": {"type": "string"}} for name, text in headers.items()}


async def no_repeats(request: Request) -> None:
    """Refuse a single-valued query parameter that is given twice, since one of the values would be dropped silently."""
    route = request.scope["route"]
    # A route without parameters refuses all (NO_QUERY), or reads a form's, whose values may repeat.
    parameters = route.dependant.query_params if isinstance(route, APIRoute) else []
    models: list[Any] = [parameter.field_info.annotation for parameter in parameters]
    fields = [field for model in models for field in model.model_fields.items()]
    several = {name for name, field in fields if get_origin(field.annotation) is list}
    counts = Counter(name for name, _ in request.query_params.multi_items()) if models else {}
    errors = tuple(
        FieldError(f"/{name}", f"Query parameter {name!r} is there {count} times, and takes one value.")
        for name, count in counts.items()
        if count > 1 and name not in several
    )
    if errors:
        raise InvalidRequest(" ".join(error.detail for error in errors), errors=errors)


def user_of(headers: Mapping[str, str]) -> str | None:
    """Return the user who sends the request, as the client says; None if it does not. Raises InvalidRequest."""
    if not (sent := headers.get(USER)):
        return None
    user = unquote(sent, errors="replace")
    if len(user) > MAX_USER_LENGTH or not user.isprintable():
        detail = f"Header '{USER}' must have at most {MAX_USER_LENGTH} printable characters, percent-encoded."
        raise InvalidRequest.at("", detail)
    return user


def wait_seconds(headers: Mapping[str, str]) -> int | None:
    """Return N of `Prefer: wait=N` (RFC 7240), at most 60 s; a malformed preference is ignored, as the RFC asks."""
    for preference in headers.get("prefer", "").split(","):
        match = re.fullmatch(r"\s*wait\s*=\s*\"?([0-9]{1,9})\"?\s*(;.*)?", preference, re.ASCII | re.IGNORECASE)
        if match:
            return min(int(match[1]), MAX_WAIT_S)
    return None


def idempotency(headers: Mapping[str, str], route: str, body: Any, *, awaits: bool = False) -> Idempotency | None:
    """Return the request's Idempotency-Key with its route, a digest of its body, and whether it waits.

    The digest depends neither on the order of keys in the body nor on white space.
    """
    key = headers.get("idempotency-key")
    if key is None:
        return None
    if not 0 < len(key) <= MAX_KEY_LENGTH or not key.isascii() or not key.isprintable():
        detail = f"Header 'Idempotency-Key' must have 1 to {MAX_KEY_LENGTH} printable ASCII characters."
        raise InvalidRequest.at("", detail)
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return Idempotency(key, route, hashlib.sha256(canonical.encode()).hexdigest(), awaits)


@dataclass(frozen=True)
class ETag:
    """An entity tag (RFC 9110 section 8.8.3)."""

    value: str
    weak: bool = False

    def __str__(self) -> str:
        return f'{"W/" if self.weak else ""}"{self.value}"'

    def is_known_to(self, request: Request) -> bool:
        """Return True if the client already has this version (If-None-Match, weak comparison)."""
        sent = request.headers.get("if-none-match", "")
        return sent.strip() == "*" or self.value in re.findall(r'(?:W/)?"([^"]*)"', sent)


# RFC 9110 section 8.3.1: type/subtype, then parameters with tokens or quoted strings as values.
_WORD = r"[A-Za-z0-9!#$%&'*+.^_`|~-]+"
_MEDIA_TYPE = re.compile(rf'{_WORD}/{_WORD}(?:[ \t]*;[ \t]*{_WORD}=(?:{_WORD}|"[ !#-\[\]-~]*"))*')
ANY_BYTES = "application/octet-stream"


def sendable_media_type(stored: str) -> str:
    """Return a file's media type for `Content-Type`; application/octet-stream if the job gave a malformed one."""
    return stored if _MEDIA_TYPE.fullmatch(stored) else ANY_BYTES
