"""Checks that a reported measurement agrees with its samples."""

from __future__ import annotations

import base64
import binascii
import math
import sys
import zlib
from array import array

from app.store.records import MeasurementRecord
from flopwatch.intervals import median_interval
from workers.measure.measurement import STATISTICS
from workers.measure.table import TooLarge
from workers.messages import Measured

MAX_SAMPLES = 1_000_000
"""Most samples of one measurement."""


def record_of(message: Measured, unit_index: int) -> MeasurementRecord:
    """Return the measurement of a message, as it is stored. Raises ValueError: samples, statistics and outcome do not
    agree; the error says why; TooLarge: it has too many samples."""
    fields = dict(vars(message))
    del fields["type"]
    what = f"{message.metric} ({message.phase})"
    samples = None
    if message.samples is not None:
        samples, fields["samples"] = _unpack(message.samples, what)
    _check_statistics(message, samples, what)
    low, high = median_interval(samples or ()) or (None, None)
    return MeasurementRecord(**fields, unit_index=unit_index, validity=None, median_low=low, median_high=high)


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
    if not all(map(math.isfinite, values)):
        raise ValueError(f"a sample of {what} is not finite")
    return values, packed


def _check_statistics(message: Measured, samples: array[float] | None, what: str) -> None:
    known = sum(getattr(message, name) is not None for name in STATISTICS)
    if samples is None:
        if message.outcome == "ok" or known or not message.reason:
            raise ValueError(f"{what} with outcome {message.outcome!r} has no samples: so no statistics, but a reason")
        return
    if message.outcome != "ok":
        raise ValueError(f"{what} with outcome {message.outcome!r} has samples")
    if message.n != len(samples):
        raise ValueError(f"{what} has {len(samples)} samples and says {message.n}")
    # One sample has no standard deviation.
    if known < len(STATISTICS) - (message.std is None):
        raise ValueError(f"a statistic of {what} is missing")
    if (message.min, message.max) != (min(samples), max(samples)):
        raise ValueError(f"{what} says samples from {message.min} to {message.max}, which they are not")
