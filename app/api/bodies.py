"""Reads request bodies up to the limit, parses them strictly and validates them; errors point into the body as sent."""

import json
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Generic, Literal, TypeVar
from urllib.parse import urlsplit

from fastapi import Request
from pydantic import AfterValidator, BaseModel, Discriminator, Field, StringConstraints, Tag, ValidationError
from pydantic_core import PydanticCustomError
from starlette.requests import ClientDisconnect

from app.api.pointers import field_errors, pointer, shown
from app.errors import BodyTooLarge, FieldError, InvalidRequest, UnsupportedMediaType
from app.settings import MAX_TIMEOUT_S, Settings
from app.specs import JobSpec, SpecBase
from app.specs._base import Location, StrictModel
from app.store.records import MAX_LABELS, NewJob

# The server reads and discards this much of an oversized body, so that a client that is still sending sees the answer.
DRAINED_BYTES = 16 << 20

JSON = "application/json"


def _one_line(text: str) -> str:
    if not text.isprintable():
        raise PydanticCustomError("line", "must be printable, on one line")
    return text


Line = Annotated[str, StringConstraints(min_length=1, max_length=200), AfterValidator(_one_line)]
LabelKey = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_./-]{0,62}$")]
LabelValue = Annotated[str, StringConstraints(max_length=200), AfterValidator(_one_line)]


def _lines(text: str) -> str:
    if not all(line.replace("\t", " ").isprintable() for line in text.split("\n")):
        raise PydanticCustomError("lines", "must be printable; it may have several lines")
    return text


Note = Annotated[str, StringConstraints(min_length=1, max_length=4000), AfterValidator(_lines)]


NO_TIMEOUT: Literal["none"] = "none"
"""The timeout of a job without a time limit. In requests null means the default, since clients send null for fields
that their users left out."""
Timeout = Annotated[
    Annotated[Literal["none"], Tag(NO_TIMEOUT)] | Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S), Tag("seconds")],
    Discriminator(lambda timeout: NO_TIMEOUT if timeout == NO_TIMEOUT else "seconds"),
]


HTTP_URL = r"^https?://[!-.0->A-~]+(/[!-~]*)?$"


def _is_an_address(url: str) -> str:
    try:
        parts = urlsplit(url)
        valid = bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid or parts.username is not None or parts.fragment:
        raise PydanticCustomError("address", "must be an address, such as https://example.org/hook, without user")
    return url


NotifyUrl = Annotated[str, StringConstraints(max_length=2000, pattern=HTTP_URL), AfterValidator(_is_an_address)]


class JobOptions(StrictModel):
    """The options that a client may give with a job, beside its spec."""

    name: Line | None = None
    """A name for people."""
    labels: dict[LabelKey, LabelValue] = Field(default={}, max_length=MAX_LABELS)
    """Labels for people and scripts to filter by."""
    priority: int = Field(default=0, ge=-1000, le=1000)
    """Higher runs first."""
    timeout_s: Timeout | None = None
    """After this many seconds the worker ends the job and every process that it started. Left out or null: the server's
    default, FLOPWATCH_DEFAULT_TIMEOUT_S. "none": no limit."""
    max_attempts: int = Field(default=2, ge=1, le=100)
    """Largest number of times that the job is started; it starts again only if its worker was lost."""
    notify_url: NotifyUrl | None = None
    """Address that the end of the job, or of all jobs of the sweep, is sent to, signed."""

    def new_job(self, spec: SpecBase, default_timeout_s: float | None, point: dict[str, int] | None = None) -> NewJob:
        """Return a job with these options; `point` is its place in a sweep's grid."""
        timeout_s = default_timeout_s if self.timeout_s is None else self.timeout_s
        return NewJob(
            spec=spec,
            name=self.name,
            labels=self.labels,
            priority=self.priority,
            timeout_s=None if timeout_s == NO_TIMEOUT else timeout_s,
            max_attempts=self.max_attempts,
            point=point,
        )


def timeout_without_one(settings: Settings, options: JobOptions) -> float | None:
    """Return the time limit of jobs that are submitted without one. Raises InvalidRequest if these options have one
    above FLOPWATCH_MAX_TIMEOUT_S."""
    default, most = settings.default_timeout_s, settings.max_timeout_s
    if most is None:
        return default
    asked = options.timeout_s
    if asked is not None and (asked == NO_TIMEOUT or asked > most):
        detail = f"It is {asked}; this server allows at most {most:g} seconds (FLOPWATCH_MAX_TIMEOUT_S)."
        raise InvalidRequest(f"timeout_s: {detail}", errors=(FieldError("/timeout_s", detail),))
    return most if default is None else min(default, most)


class JobBody(JobOptions):
    """The body of `POST /jobs`."""

    spec: JobSpec
    unique_key: Line | None = None
    """While a job with this key is queued or running, the server refuses other jobs with it."""

    def new_job(self, spec: SpecBase, default_timeout_s: float | None, point: dict[str, int] | None = None) -> NewJob:
        new = super().new_job(spec, default_timeout_s, point)
        return replace(new, unique_key=self.unique_key, notify_url=self.notify_url)


class JobChanges(StrictModel):
    """The body of `PATCH /jobs/{id}`: fields that are left out stay as they are, and null removes one."""

    name: Line | None = None
    """A name for people."""
    labels: dict[LabelKey, LabelValue | None] = Field(default={}, max_length=2 * MAX_LABELS)
    """Labels to set, or with null to remove; the others stay."""
    note: Note | None = None
    """A text for people: what was tried, what was learnt."""


Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True)
class Body(Generic[Model]):
    """A validated body, with the JSON it came from."""

    model: Model
    sent: Any


def json_body(model: type[Model], *, union_at: Location | None = None) -> Callable[[Request], Awaitable[Body[Model]]]:
    """Return a dependency that reads the request's body as `model`."""

    async def read(request: Request) -> Body[Model]:
        check_content_type(request)
        raw = await read_limited(request, request.app.state.services.settings.max_body_bytes)
        return parse(raw, model, union_at=union_at)

    return read


def check_content_type(request: Request) -> None:
    """Raise UnsupportedMediaType if the request says that its body is no JSON. Many programs say nothing."""
    said = request.headers.get("content-type")
    media_type = (said or JSON).partition(";")[0].strip().lower()
    if media_type != JSON and not media_type.endswith("+json"):
        raise UnsupportedMediaType(f"The body is {media_type[:100]!r}: send JSON, with `Content-Type: {JSON}`.")


def summary(errors: tuple[FieldError, ...]) -> str:
    """Return one sentence for `detail`; the list of errors has the rest."""
    first = errors[0]
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return f"{first.pointer or 'The body'}: {first.detail}{more}"


def request_body(model: type[BaseModel]) -> dict[str, Any]:
    """Return the /openapi.json entry of a body that `json_body` reads; app.main adds the schema itself."""
    reference = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": True, "content": {JSON: {"schema": reference}}}}


async def read_limited(request: Request, limit: int, limited_by: str = "FLOPWATCH_MAX_BODY_BYTES") -> bytes:
    """Return the body if it has at most `limit` bytes; `limited_by` is what sets that limit. The bytes are counted,
    since Content-Length may be missing."""
    chunks: list[bytes] = []
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size <= limit:
                chunks.append(chunk)
            elif size > limit + DRAINED_BYTES:
                break
    except ClientDisconnect:
        raise InvalidRequest("The connection closed before the whole body arrived.") from None
    if size > limit:
        raise BodyTooLarge(f"The body has more than {limit} bytes ({limited_by}).")
    return b"".join(chunks)


def parse(raw: bytes, model: type[Model], *, union_at: Location | None = None) -> Body[Model]:
    """Parse and validate the body as `model`. Raises InvalidRequest if it is not JSON (NaN, lone surrogates, endless
    numbers and deep nesting included), holds a NUL character or an object with one key twice, and, with pointers, if
    the model refuses it."""
    # Pydantic validates the text, since its strict mode accepts more of JSON than of Python values: an array may be a
    # tuple.
    try:
        valid, invalid = model.model_validate_json(raw), None
    except ValidationError as error:
        valid, invalid = None, error.errors(include_url=False)
        if invalid[0]["type"] == "json_invalid":
            raise _not_json(str(invalid[0]["ctx"]["error"])) from None
    sent = json.loads(raw, object_pairs_hook=_without_repeats, parse_constant=_no_constant)
    if rb"\u0000" in raw and (location := _find_nul(sent)) is not None:
        raise wrong_at(location, "Text must not contain NUL characters: no database keeps them all")
    if valid is None:
        errors = field_errors(invalid or [], sent, model, union_at=union_at)
        raise InvalidRequest(summary(errors), errors=errors)
    return Body(valid, sent)


def _without_repeats(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object; refuse one that has a key twice, since parsers differ in which of the two counts."""
    built = dict(items)
    if len(built) < len(items):
        key = Counter(key for key, _ in items).most_common(1)[0][0]
        raise wrong_at((), f"The key {shown(key)} stands in one object twice: leave one of them out")
    return built


def _no_constant(name: str) -> Any:
    raise _not_json(f"{name} is no number there")


def _not_json(why: str) -> InvalidRequest:
    return wrong_at((), f"This is not JSON: {why}")


def wrong_at(location: Location, detail: str) -> InvalidRequest:
    """Return the error of what the body has at a location."""
    field = FieldError(pointer(location), detail)
    return InvalidRequest(summary((field,)), errors=(field,))


def _find_nul(value: Any, location: Location = ()) -> Location | None:
    """Find the first text that holds a NUL character; for a key that holds one, return the location of its object."""
    if isinstance(value, str):
        return location if "\0" in value else None
    if isinstance(value, dict) and any("\0" in key for key in value):
        return location
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return next((nul for key, item in items if (nul := _find_nul(item, (*location, key))) is not None), None)
