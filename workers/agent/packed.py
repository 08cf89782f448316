"""Keeps a long list of measurements in little memory: in compressed parts, of which one at a time is unpacked.

A million records take 2 GB as objects, since each has a dictionary of coordinates and its own copies of the same names.
"""

import pickle
import zlib
from collections.abc import Callable, Collection, Iterator

from app.store.records import MeasurementRecord

PART_RECORDS = 1000
PART_BYTES = 1 << 20
"""A part ends with the record whose samples reach this size."""
FAST = 1
"""zlib's lowest level: it finds what repeats, and samples are compressed already."""


class PackedMeasurements(Collection[MeasurementRecord]):
    """Measurements in the order in which they were added. They may be read again and again."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._last: list[MeasurementRecord] = []
        self._last_bytes = 0
        self._count = 0

    def append(self, record: MeasurementRecord) -> None:
        self._last.append(record)
        self._last_bytes += len(record.samples or b"")
        self._count += 1
        if len(self._last) >= PART_RECORDS or self._last_bytes >= PART_BYTES:
            self._parts.append(zlib.compress(pickle.dumps(self._last, pickle.HIGHEST_PROTOCOL), FAST))
            self._last, self._last_bytes = [], 0

    def __iter__(self) -> Iterator[MeasurementRecord]:
        for part in self._parts:
            yield from pickle.loads(zlib.decompress(part))  # noqa: S301  # this process has packed it
        yield from self._last

    def __len__(self) -> int:
        return self._count

    def __contains__(self, record: object) -> bool:
        return any(record == known for known in self)


class Changed(Collection[MeasurementRecord]):
    """Measurements as `change` returns them, one at a time."""

    def __init__(
        self, records: Collection[MeasurementRecord], change: Callable[[MeasurementRecord], MeasurementRecord]
    ) -> None:
        self._records = records
        self._change = change

    def __iter__(self) -> Iterator[MeasurementRecord]:
        return map(self._change, self._records)

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, record: object) -> bool:
        return any(record == known for known in self)
