"""The messages that a unit's process sends to the agent: JSON, one message on each line.

A unit makes messages without checks, since its reports are right unless the unit is broken. The agent trusts none of
them: `parse` checks types and bounds every size. It refuses names that are too long, and cuts texts for people
(reasons, titles, details): a job that has measured for hours does not fail because an error message is long.

The first message is `Started`, the last one `Ended`. A process that ends without it has crashed.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, FailFast, Field, TypeAdapter, ValidationError
from pydantic_core import from_json

from app.states import Verdict
from workers.measure.check import Check
from workers.measure.table import Column, TooLarge
from workers.outcome import EXIT_CODES

MAX_NAME = 500
"""Most characters of a name, a key or a unit."""
MAX_TEXT = 4000
"""Most characters of a text for people. Longer texts are cut."""
MAX_COUNT = 2**53 - 1
"""The greatest count. Programs that read JSON numbers as floating point change greater ones."""
MAX_COORDINATES = 200
MAX_CASE_BYTES = 16 << 10
MAX_CHECKS = 1000
"""Most checks of one verdict."""
MAX_ENVIRONMENT_BYTES = 1 << 20


def cut(text: str) -> str:
    """Return a text for people, cut at its end if it is long."""
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 1]}…"


def _check_name(what: str, name: str) -> None:
    if len(name) > MAX_NAME:
        raise ValueError(f"{what} has {len(name)} characters, more than {MAX_NAME}: {name[:50]!r}…")


def _check_case(case: dict[str, Any]) -> dict[str, Any]:
    if len(case) > MAX_COORDINATES:
        raise TooLarge(f"a case has {len(case)} coordinates; {MAX_COORDINATES} are kept")
    for name, value in case.items():
        _check_name("a coordinate's name", name)
        if isinstance(value, int | float):  # bool is an int
            if not -MAX_COUNT <= value <= MAX_COUNT and not (isinstance(value, float) and math.isfinite(value)):
                raise ValueError(f"coordinate {name!r} is no number that JSON can carry")
        elif not (value is None or isinstance(value, str)):
            raise ValueError(f"coordinate {name!r} is a {type(value).__name__}, no text, number, boolean or null")
    if (size := case_bytes(case)) > MAX_CASE_BYTES:
        raise TooLarge(f"a case has coordinates of {size} bytes; {MAX_CASE_BYTES} are kept")
    return case


def case_bytes(case: Mapping[str, Any]) -> int:
    """Return the size of a case: the characters of its names and texts, and eight bytes for each coordinate."""
    return 8 * len(case) + sum(map(len, case)) + sum(len(value) for value in case.values() if isinstance(value, str))


def _check_environment(environment: dict[str, Any]) -> dict[str, Any]:
    size = len(json.dumps(environment, allow_nan=False))
    if size > MAX_ENVIRONMENT_BYTES:
        raise TooLarge(f"the environment has {size} bytes; {MAX_ENVIRONMENT_BYTES} are kept")
    return environment


def _check_number_of_checks(checks: Any) -> Any:
    if isinstance(checks, list) and len(checks) > MAX_CHECKS:
        raise TooLarge(f"a verdict has {len(checks)} checks; {MAX_CHECKS} are kept")
    return checks


def _check_checks(checks: list[Check]) -> list[Check]:
    for check in checks:
        _check_name("a check's name", check.name)
    return [replace(check, detail=cut(check.detail)) for check in checks]


def _check_columns(columns: list[Column]) -> list[Column]:
    for column in columns:
        _check_name("a column's name", column.name)
        _check_name("a column's unit", column.unit or "")
    return columns


def _check_code(code: str) -> str:
    if code not in EXIT_CODES:
        raise ValueError(f"{code[:50]!r} is none of {', '.join(EXIT_CODES)}")
    return code


Name = Annotated[str, Field(max_length=MAX_NAME)]
Text = Annotated[str, AfterValidator(cut)]
Count = Annotated[int, Field(strict=True, ge=0, le=MAX_COUNT)]
Seconds = Annotated[float, Field(strict=True, ge=0, le=MAX_COUNT, allow_inf_nan=False)]


@dataclass(frozen=True)
class Started:
    """The process runs."""

    type: Literal["started"] = "started"


@dataclass(frozen=True)
class Progress:
    """`done` of `total` steps of the unit are done."""

    done: Count
    total: Count
    message: Text
    type: Literal["progress"] = "progress"


@dataclass(frozen=True)
class CellFinished:
    """A cell is finished, as number `done` of `total`. The headline is its first number, or why it has none."""

    done: Count
    total: Count
    title: Text
    outcome: Text
    headline: Text
    seconds: Seconds
    type: Literal["cell"] = "cell"


@dataclass(frozen=True)
class Cursor:
    """The unit now works on this step, counted from 0."""

    position: Count
    type: Literal["cursor"] = "cursor"


@dataclass(frozen=True)
class Measured:
    """A measurement, as `workers.measure.measurement.Measurement.to_wire` returns it."""

    case: Annotated[dict[str, Any], AfterValidator(_check_case)]
    case_key: Name
    device_key: Name
    phase: Name | None
    metric: Name
    unit: Name
    outcome: Name
    reason: Text | None
    samples: str | None
    """Base64 of zlib of little-endian float64; the spool checks it."""
    type: Literal["measurement"] = "measurement"


@dataclass(frozen=True)
class TableMade:
    """A table. `workers.measure.table.Table` bounds its rows."""

    name: Name
    columns: Annotated[list[Column], AfterValidator(_check_columns)]
    rows: Annotated[list[list[Any]], FailFast()]
    type: Literal["table"] = "table"


@dataclass(frozen=True)
class ArtifactMade:
    """A finished file in the unit's scratch folder."""

    path: str
    name: str
    kind: Name
    media_type: Name
    type: Literal["artifact"] = "artifact"


@dataclass(frozen=True)
class Environment:
    """The environment in which the unit measures."""

    environment: Annotated[dict[str, Any], AfterValidator(_check_environment)]
    type: Literal["environment"] = "environment"


@dataclass(frozen=True)
class Validity:
    """The verdict on a case or, without a key, on all other cases of the unit."""

    verdict: Verdict
    checks: Annotated[Sequence[Check], BeforeValidator(_check_number_of_checks), AfterValidator(_check_checks)]
    case_key: Name | None
    title: Text
    type: Literal["validity"] = "validity"


@dataclass(frozen=True)
class Ended:
    """The unit has ended by itself: it succeeded (`code` None), or failed with this code."""

    code: Annotated[str, AfterValidator(_check_code)] | None
    detail: Text
    type: Literal["outcome"] = "outcome"


Message = (
    Started | Progress | CellFinished | Cursor | Measured | TableMade | ArtifactMade | Environment | Validity | Ended
)
_message: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="type")])


def parse(line: bytes) -> Message:
    """Return the message on a line. Raises ValueError: there is none, or a field is wrong; the error says which;
    TooLarge: the message holds more than is kept."""
    # json.loads would accept lone surrogates, which the server cannot answer.
    fields = from_json(line, allow_inf_nan=False)
    try:
        return _message.validate_python(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, TooLarge):
            raise cause from None
        where, why = ".".join(map(str, first["loc"])), first["msg"] if cause is None else cause
        raise ValueError(f"{where}: {why}" if where else why) from None


def to_line(message: Message) -> bytes:
    """Return a message as one line. Raises ValueError: a number is not finite; TypeError: a value has no form in
    JSON."""
    text = json.dumps(vars(message), allow_nan=False, ensure_ascii=False, default=asdict)
    # A file name that is not UTF-8 has surrogates in it, which become question marks.
    return text.encode(errors="replace") + b"\n"
