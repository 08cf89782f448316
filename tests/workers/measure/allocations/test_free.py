import gzip
import json
from pathlib import Path
from typing import Any

from workers.measure.allocations.free import free_at
from workers.measure.allocations.ledger import Allocation, Ledger
from workers.measure.allocations.snapshot import blocks_of, reserved_in, rewind


def snapshot(*segments: tuple[int, int]) -> dict[str, object]:
    return {"segments": [{"device": 0, "address": at, "total_size": size, "blocks": []} for at, size in segments]}


def used(*blocks: tuple[int, int]) -> list[Allocation]:
    return [Allocation(at, size, None) for at, size in blocks]


def largest_free(*arguments: Any) -> int:
    return free_at(*arguments).largest


def test_segments_are_those_of_the_moment() -> None:
    since = [
        {"action": "segment_free", "addr": 0, "size": 9000},
        {"action": "segment_alloc", "addr": 100_000, "size": 90_000},
    ]
    assert largest_free(snapshot((100_000, 90_000)), 0, since, []) == 9000


def test_expandable_segments_grow_and_shrink() -> None:
    mapped = [{"action": "segment_map", "addr": 2048, "size": 2048}]
    assert largest_free(snapshot((0, 4096)), 0, mapped, used((0, 512))) == 2048 - 512
    assert largest_free(snapshot((0, 4096)), 0, mapped[:0], used((0, 512))) == 4096 - 512
    unmapped = [{"action": "segment_unmap", "addr": 2048, "size": 2048}]
    assert largest_free(snapshot((0, 2048)), 0, unmapped, []) == 4096
    assert largest_free(snapshot((4096, 2048)), 0, unmapped, []) == 4096
    assert largest_free(snapshot((0, 2048), (4096, 2048)), 0, unmapped, []) == 6144
    whole = [{"action": "segment_map", "addr": 0, "size": 4096}]
    assert largest_free(snapshot((0, 4096)), 0, whole, []) == 0


def test_of_an_h200_it_is_the_largest_block_that_the_allocator_lists() -> None:
    with gzip.open(Path(__file__).with_name("h200_snapshot.json.gz"), "rt") as file:
        recorded = json.load(file)
    blocks = blocks_of(recorded, 0)
    listed = [block["size"] for one in recorded["segments"] for block in one["blocks"] if block["state"] == "inactive"]
    assert largest_free(recorded, 0, [], blocks.values()) == max(listed)
    ledger = Ledger(rewind(blocks, recorded["device_traces"][0]).values())
    trace = recorded["device_traces"][0]
    stretch = ledger.follow("forward", trace, {}, reserved=reserved_in(recorded, 0))
    at_peak, _ = free_at(recorded, 0, trace[stretch.peak.entry + 1 :], stretch.at_peak)
    assert stretch.reserved_at_peak is not None
    assert 0 < at_peak <= stretch.reserved_at_peak - stretch.peak.total
