"""Makes the stored measurement of a reported one: its samples, and their statistics."""

from __future__ import annotations

import base64
import binascii
import sys
import zlib
from array import array
from dataclasses import fields as fields_of
from typing import Any

from app.store.records import MeasurementRecord
from flopwatch.intervals import median_interval
from workers.measure.statistics import Summary, summarize
from workers.measure.table import TooLarge
from workers.messages import Measured

STATISTICS = tuple(field.name for field in fields_of(Summary))
MAX_SAMPLES = 1_000_000
"""Most samples of one measurement."""


def record_of(message: Measured, unit_index: int) -> MeasurementRecord:
    """Return the measurement of a message, as it is stored, with the statistics of its samples. Raises ValueError:
    samples and outcome do not agree, or they are none; the error says why; TooLarge: it has too many samples."""
    fields = dict(vars(message))
    del fields["type"]
    what = f"{message.metric} ({message.phase}) with outcome {message.outcome!r}"
    if (message.outcome == "ok") != (message.samples is not None):
        raise ValueError(f"{what} has {'no ' if message.samples is None else ''}samples")
    known: dict[str, Any] = dict.fromkeys(STATISTICS)
    if message.samples is not None:
        samples, fields["samples"] = _unpack(message.samples, what)
        low, high = median_interval(samples) or (None, None)
        known = {**vars(summarize(samples)), "median_low": low, "median_high": high}
    elif not message.reason:
        raise ValueError(f"{what} has no reason")
    return MeasurementRecord(**fields, **known, unit_index=unit_index, validity=None)


def _unpack(text: str, what: str) -> tuple[array[float], bytes]:
    """Return the samples, plain and as stored (zlib of little-endian float64). A small text may decompress to
    gigabytes."""
    most = 8 * MAX_SAMPLES
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
    return values, packed
