"""Checks that a reported measurement agrees with its samples, and adds up the sizes of a job's measurements."""

from __future__ import annotations

import base64
import binascii
import math
import sys
import zlib
from array import array
from typing import Any

from app.store.records import MeasurementRecord
from flopwatch.intervals import median_interval
from workers.measure.measurement import STATISTICS
from workers.measure.table import TooLarge
from workers.messages import Measured, case_bytes

MAX_MEASUREMENTS = 2_000_000
MAX_MEASUREMENT_BYTES = 2 << 30
"""Largest size in bytes of all measurements of one job: their texts, and eight bytes for each sample."""
MAX_SAMPLES = 1_000_000
"""Most samples of one measurement."""


class MeasurementSizes:
    """The number and size of a job's measurements so far."""

    def __init__(self) -> None:
        self._count = self._bytes = 0
        self._case: dict[str, Any] = {}
        self._case_bytes = 0

    def add(self, record: MeasurementRecord) -> None:
        """Add a measurement. Raises TooLarge if the job's measurements together exceed a limit."""
        texts = (record.case_key, record.device_key, record.metric, record.unit, record.outcome, record.phase)
        if record.case != self._case:  # measurements of one case follow each other
            self._case, self._case_bytes = record.case, case_bytes(record.case)
        self._count += 1
        self._bytes += self._case_bytes + 8 * (record.n or 0) + len("".join(filter(None, (*texts, record.reason))))
        if self._count > MAX_MEASUREMENTS or self._bytes > MAX_MEASUREMENT_BYTES:
            raise TooLarge(
                f"this job has {self._count} measurements of {self._bytes} bytes; {MAX_MEASUREMENTS} measurements and"
                f" {MAX_MEASUREMENT_BYTES} bytes of them are kept: split the job"
            )


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
