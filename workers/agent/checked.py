"""Checks the messages of a unit's process, and returns values of bounded size. It does not trust any length in a
message.

It refuses names and keys that are too long, and cuts texts for people (reasons, titles, details): a job that has
measured for hours does not fail because an error message is long.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import sys
import zlib
from array import array
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from app.store.records import MeasurementRecord
from workers.measure.measurement import STATISTICS
from workers.measure.table import TooLarge

MAX_MEASUREMENTS = 2_000_000
MAX_MEASUREMENT_BYTES = 2 << 30
"""Largest size in bytes of all measurements of one job: their texts, and eight bytes for each sample."""
MAX_SAMPLES = 1_000_000
"""Most samples of one measurement."""
MAX_COORDINATES = 200
MAX_CASE_BYTES = 16 << 10
MAX_NAME = 500
"""Most characters of a name, a key or a unit."""
MAX_TEXT = 4000
"""Most characters of a text for people. Longer texts are cut."""
MAX_ENVIRONMENT_BYTES = 1 << 20
MAX_CHECKS = 1000
"""Most checks of one verdict."""
MAX_VERDICT_BYTES = 64 << 20
"""Most bytes of all verdicts of one job."""
MAX_ARTIFACTS = 10_000
MAX_COUNT = 2**53 - 1
"""The greatest count. Programs that read JSON numbers as floating point change greater ones."""

_NAMES = ("case_key", "device_key", "metric", "unit", "outcome", "phase")
_record = TypeAdapter(MeasurementRecord)


class Measurements:
    """Checks the measurements of one job, and adds up their sizes."""

    def __init__(self) -> None:
        self._count = self._bytes = 0
        self._case: dict[str, Any] = {}
        self._case_bytes = 0

    def checked(self, wire: Mapping[str, Any], unit_index: int) -> MeasurementRecord:
        """Return the checked measurement from the form that `Measurement.to_wire` made.

        Raises:
            ValueError, TypeError: it is not a valid measurement; the error says why.
            TooLarge: it, or this job's measurements together, exceed the limit of samples or coordinates.
        """
        fields = {**wire, "unit_index": unit_index, "validity": None}
        for name in _NAMES:
            _check_name(f"a measurement's {name}", fields[name])
        if isinstance(fields["reason"], str):
            fields["reason"] = cut(fields["reason"])
        if fields["case"] != self._case:  # measurements of one case follow each other
            self._case_bytes = _case_bytes(fields["case"])
            self._case = fields["case"]
        what = f"{fields['metric']} ({fields['phase']})"
        samples = None
        if fields["samples"] is not None:
            samples, fields["samples"] = _samples(fields["samples"], what)
        record = _record.validate_python(fields)
        _check_statistics(record, samples, what)
        self._count += 1
        self._bytes += self._case_bytes + sum(len(fields[name] or "") for name in (*_NAMES, "reason"))
        self._bytes += 8 * len(samples or ())
        if self._count > MAX_MEASUREMENTS or self._bytes > MAX_MEASUREMENT_BYTES:
            raise TooLarge(
                f"this job has {self._count} measurements of {self._bytes} bytes; {MAX_MEASUREMENTS} measurements and"
                f" {MAX_MEASUREMENT_BYTES} bytes of them are kept: split the job"
            )
        return record


def _samples(text: Any, what: str) -> tuple[array[float], bytes]:
    """Return the samples, plain and as stored (zlib of little-endian float64). A small text may decompress to
    gigabytes."""
    most = 8 * MAX_SAMPLES
    if not isinstance(text, str):
        raise TypeError(f"samples of {what} are no text")
    # Base64 has four characters for three bytes, and data that zlib cannot shrink grows by less than a fifth.
    if len(text) > 2 * most:
        raise TooLarge(f"samples of {what} have {len(text)} characters; {MAX_SAMPLES} samples are kept")
    inflate = zlib.decompressobj()
    try:
        packed = base64.b64decode(text, validate=True)
        plain = inflate.decompress(packed, most + 1)
    except (binascii.Error, zlib.error) as error:
        raise ValueError(f"samples of {what} are no base64 of zlib: {error}") from error
    if len(plain) > most:
        raise TooLarge(f"{what} has more than {MAX_SAMPLES} samples, which are kept: report fewer")
    if not inflate.eof or inflate.unused_data or not plain or len(plain) % 8:
        raise ValueError(f"samples of {what} are no whole zlib of at least one float64")
    values = array("d", plain)
    if sys.byteorder == "big":
        values.byteswap()
    if not all(map(math.isfinite, values)):
        raise ValueError(f"a sample of {what} is not finite")
    return values, packed


def _check_statistics(record: MeasurementRecord, samples: array[float] | None, what: str) -> None:
    told = [value for name in STATISTICS if (value := getattr(record, name)) is not None]
    if samples is None:
        if record.outcome == "ok" or told or not record.reason:
            raise ValueError(f"{what} with outcome {record.outcome!r} has no samples: so no statistics, but a reason")
        return
    if record.outcome != "ok":
        raise ValueError(f"{what} with outcome {record.outcome!r} has samples")
    if record.n != len(samples):
        raise ValueError(f"{what} has {len(samples)} samples and says {record.n}")
    # One sample has no standard deviation.
    if len(told) < len(STATISTICS) - (record.std is None) or not all(map(math.isfinite, told)):
        raise ValueError(f"a statistic of {what} is missing or not finite")
    if (record.min, record.max) != (min(samples), max(samples)):
        raise ValueError(f"{what} says samples from {record.min} to {record.max}, which they are not")


def _case_bytes(case: Any) -> int:
    """Return the size of a case, whose coordinates must be few, and scalars."""
    if not isinstance(case, dict):
        raise TypeError(f"a case is an object of coordinates, not a {type(case).__name__}")
    if len(case) > MAX_COORDINATES:
        raise TooLarge(f"a case has {len(case)} coordinates; {MAX_COORDINATES} are kept")
    size = 0
    for name, value in case.items():
        _check_name("a coordinate's name", name)
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, int | float):  # bool is an int
            if not -MAX_COUNT <= value <= MAX_COUNT and not (isinstance(value, float) and math.isfinite(value)):
                raise ValueError(f"coordinate {name!r} is no number that JSON can carry")
        elif value is not None:
            raise ValueError(f"coordinate {name!r} is a {type(value).__name__}, no text, number, boolean or null")
        size += len(name) + 8
    if size > MAX_CASE_BYTES:
        raise TooLarge(f"a case has coordinates of {size} bytes; {MAX_CASE_BYTES} are kept")
    return size


def environment(fingerprint: Any) -> dict[str, Any]:
    """Return a unit's environment, checked. Raises TypeError, ValueError, TooLarge."""
    if not isinstance(fingerprint, Mapping):
        raise TypeError("an environment is an object")
    size = len(json.dumps(fingerprint, allow_nan=False))
    if size > MAX_ENVIRONMENT_BYTES:
        raise TooLarge(f"the environment has {size} bytes; {MAX_ENVIRONMENT_BYTES} are kept")
    return dict(fingerprint)


def verdict(wire: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """Return a verdict with few checks and short details, and its size in bytes. Raises ValueError, TooLarge."""
    checks = wire["checks"]
    if not isinstance(checks, list) or not all(isinstance(check, dict) for check in checks):
        raise ValueError("a verdict's checks are a list of objects")
    if len(checks) > MAX_CHECKS:
        raise TooLarge(f"a verdict has {len(checks)} checks; {MAX_CHECKS} are kept")
    shown = []
    for check in checks:
        _check_name("a check's name", check.get("name"))
        detail = check.get("detail")
        shown.append({**check, "detail": cut(detail) if isinstance(detail, str) else detail})
    size = 8 * len(checks) + sum(len(str(check["name"])) + len(str(check["detail"])) for check in shown)
    return {**wire, "checks": shown}, size


def count(number: Any, what: str) -> int:
    """Return `number` if it is a natural number; else raise ValueError."""
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= MAX_COUNT:
        raise ValueError(f"{what} is no number from 0 to {MAX_COUNT}")
    return number


def duration_s(number: Any, what: str) -> float:
    """Return `number` if it is one of seconds; else raise ValueError. JSON has numbers that are no finite ones here."""
    if not isinstance(number, int | float) or isinstance(number, bool) or not 0 <= number <= MAX_COUNT:
        raise ValueError(f"{what} is no number from 0 to {MAX_COUNT}")
    return float(number)


def short(text: Any, what: str) -> str:
    """Return `text` if it is fit for a name. Raises TypeError, ValueError."""
    if not isinstance(text, str):
        raise TypeError(f"{what} is no text")
    _check_name(what, text)
    return text


def cut(text: str) -> str:
    """Return a text for people, cut at its end if it is long."""
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 1]}…"


def _check_name(what: str, name: Any) -> None:
    # The callers' validation of the whole message refuses other types.
    if isinstance(name, str) and len(name) > MAX_NAME:
        raise ValueError(f"{what} has {len(name)} characters, more than {MAX_NAME}: {name[:50]!r}…")
