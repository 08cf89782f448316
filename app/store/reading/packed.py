"""Reads stored samples: little-endian float64, zlib."""

from __future__ import annotations

import array
import logging
import sys
import zlib

from app.numbers import finite

logger = logging.getLogger(__name__)


def unpack(samples: bytes | None) -> list[float | None] | None:
    """Return the samples; None if there are none, or if they are broken, so the statistics stay readable."""
    try:
        values = array.array("d", b"" if samples is None else zlib.decompress(samples))
    except (zlib.error, ValueError):
        logger.exception("stored samples cannot be read")
        return None
    if not values:
        return None
    if sys.byteorder == "big":
        values.byteswap()
    return [finite(value) for value in values]
