"""Snapshots have the format that torch's own tools and pytorch.org/memory_viz read."""

import copy
import gzip
import json
from pathlib import Path
from typing import Any

from tests.workers.viewer import check_that_the_viewer_reads
from workers.measure.allocations.categories import CATEGORIES, Owner
from workers.measure.allocations.ledger import Allocation, Ledger, rewind
from workers.measure.allocations.snapshot import annotated, blocks_of, from_history, reserved_in, write
from workers.measure.allocations.stacks import short_stack, site

MODEL, KEPT, BRIEF, WORKSPACE = 0x7F0000000000, 0x7F0000001000, 0x7F0000002000, 0x7F0000003000


def frame(name: str) -> dict[str, Any]:
    return {"filename": f"/home/me/{name}.py", "line": 3, "name": name}


def entry(action: str, address: int, size: int, time_us: int = 0, **more: Any) -> dict[str, Any]:
    frames = [frame("inner"), frame("outer")]
    return {"action": action, "addr": address, "size": size, "stream": 0, "time_us": time_us, "frames": frames, **more}


HISTORY = [
    entry("segment_alloc", KEPT, 0x2000, 1),
    entry("alloc", KEPT, 1024, 2),
    entry("alloc", BRIEF, 2048, 3),
    entry("free_requested", BRIEF, 2048, 4),
    entry("free_completed", BRIEF, 2048, 4),
    entry("snapshot", 0, 4096, 5),
]


def block(address: int, size: int, state: str = "active_allocated") -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": size, "state": state, "frames": [frame("block")]}


def as_cuda_gives_it() -> dict[str, Any]:
    """A snapshot of two segments, taken at the end of a forward pass."""

    def segment(address: int, *blocks: dict[str, Any]) -> dict[str, Any]:
        size = sum(one["size"] for one in blocks)
        return {
            "device": 0,
            "address": address,
            "total_size": size,
            "allocated_size": size,
            "active_size": size,
            "stream": 0,
            "segment_type": "small",
            "segment_pool_id": (0, 0),
            "frames": [],
            "blocks": list(blocks),
        }

    return {
        "segments": [
            segment(MODEL, block(MODEL, 0x1000)),
            segment(KEPT, block(KEPT, 1024), block(KEPT + 1024, 0x2000 - 1024, "inactive")),
            segment(WORKSPACE, block(WORKSPACE, 512)),
        ],
        "device_traces": [copy.deepcopy(HISTORY), []],
        "allocator_settings": {"expandable_segments": False},
    }


def as_we_write_it(original: dict[str, Any]) -> dict[str, Any]:
    ledger = Ledger([Allocation(MODEL, 0x1000, None), Allocation(WORKSPACE, 512, None)])
    owners = {MODEL: Owner(CATEGORIES.index("parameter"), "weight", 0x1000)}
    ledger.follow("forward", original["device_traces"][0], owners)
    return annotated(original, 0, ledger, phase="forward")


def test_a_snapshot_of_cuda_with_categories(tmp_path: Path) -> None:
    original = as_cuda_gives_it()
    before = copy.deepcopy(original)
    write(as_we_write_it(original), tmp_path / "snapshot.pickle")
    assert original == before, "the snapshot given is left as it is"
    snapshot = check_that_the_viewer_reads(tmp_path / "snapshot.pickle")
    assert snapshot["allocator_settings"] == original["allocator_settings"]
    assert {one["segment_pool_id"] for one in snapshot["segments"]} == {(0, 0)}
    colours = [(one["action"], one["category"]) for one in snapshot["device_traces"][0]]
    assert colours == [
        ("alloc", "parameter"),
        ("alloc", "unknown"),
        ("segment_alloc", "unknown"),
        ("alloc", "activation"),
        ("alloc", "temporary"),
        ("free_requested", "temporary"),
        ("free_completed", "temporary"),
        ("snapshot", "unknown"),
    ]
    head = snapshot["device_traces"][0][0]
    assert (head["size"], head["user_metadata"]) == (0x1000, "before the history")
    assert head["frames"] == [{**frame("block"), "filename": "block.py"}], "where its files are helps nobody"
    assert snapshot["device_traces"][1] == []
    coloured = {one.get("category") for segment in snapshot["segments"] for one in segment["blocks"]}
    assert coloured == {"parameter", "activation", "unknown", None}
    assert snapshot["flopwatch"]["entries_before_the_history"] == 2
    assert [(one["name"], one["stage"], one["time_us"]) for one in snapshot["external_annotations"]] == [
        ("forward", "START", 1),
        ("forward", "END", 5),
    ]


def test_a_known_snapshot_names_the_unknown_too(tmp_path: Path) -> None:
    """A snapshot that is taken when recording has stopped has no entry of its own."""
    ledger = Ledger([Allocation(KEPT, 1024, "forward", category=CATEGORIES.index("activation"))])
    ledger.categories, ledger.phases = [CATEGORIES.index("activation")], ["forward"]
    original = {**as_cuda_gives_it(), "device_traces": [HISTORY[1:2]]}
    original["segments"] = original["segments"][1:2]
    snapshot = annotated(original, 0, ledger)
    write(snapshot, tmp_path / "snapshot.pickle")
    trace = check_that_the_viewer_reads(tmp_path / "snapshot.pickle")["device_traces"][0]
    assert [(one["action"], one["category"]) for one in trace] == [("alloc", "activation"), ("snapshot", "unknown")]


def test_the_history_of_an_h200_is_followed_exactly(tmp_path: Path) -> None:
    """Of two training steps of a model of two layers, recorded with torch 2.11; stacks are left out."""
    with gzip.open(Path(__file__).with_name("h200_snapshot.json.gz"), "rt") as file:
        original: dict[str, Any] = json.load(file)
    trace, blocks = original["device_traces"][0], blocks_of(original, 0)
    older = rewind(blocks, trace)
    ledger = Ledger(older.values())
    stretch = ledger.follow("forward", trace, {}, reserved=reserved_in(original, 0))
    assert (len(trace), len(older), len(blocks)) == (2259, 110, 68)
    assert {at: one.size for at, one in ledger.alive.items()} == {at: one.size for at, one in blocks.items()}
    allocated = sum(one["allocated_size"] for one in original["segments"])
    rounding = allocated - stretch.end.total
    assert 0 <= rounding < 0.01 * allocated, "what was asked for, less what the allocator's blocks have"
    assert stretch.reserved_at_peak is not None
    assert stretch.peak.total <= stretch.reserved_at_peak <= reserved_in(original, 0)
    assert sum(one.size for one in stretch.at_peak) == stretch.peak.total
    snapshot = annotated(original, 0, ledger)
    write(snapshot, tmp_path / "snapshot.pickle")
    check_that_the_viewer_reads(tmp_path / "snapshot.pickle")


def test_an_overflowed_history_keeps_its_categories(tmp_path: Path) -> None:
    """The allocator has kept only the last two entries; the last categories belong to them."""
    original = as_cuda_gives_it()
    ledger_of_all = as_we_write_it(original)["device_traces"][0]
    cut = {**original, "device_traces": [original["device_traces"][0][-3:], []]}
    ledger = Ledger([Allocation(MODEL, 0x1000, None), Allocation(WORKSPACE, 512, None)])
    ledger.follow("forward", HISTORY, {})
    snapshot = annotated(cut, 0, ledger)
    write(snapshot, tmp_path / "snapshot.pickle")
    trace = check_that_the_viewer_reads(tmp_path / "snapshot.pickle")["device_traces"][0]
    assert [one["category"] for one in trace[-3:]] == [one["category"] for one in ledger_of_all[-3:]]
    # The blocks that were released later are at the beginning, with their categories.
    head = {one["addr"]: one["category"] for one in trace[:-3]}
    assert head == {MODEL: "unknown", KEPT: "activation", BRIEF: "temporary", WORKSPACE: "unknown"}


def test_a_snapshot_of_an_allocator_without_segments(tmp_path: Path) -> None:
    far = 0x100
    trace = [entry("alloc", far, 64), *HISTORY[1:]]
    alive = {MODEL: Allocation(MODEL, 0x1000, None), KEPT: Allocation(KEPT, 1024, None), far: Allocation(far, 64, None)}
    made = from_history(trace, alive)
    assert [one["address"] for one in made["segments"]] == [far, MODEL], "what is far away has a segment of its own"
    assert reserved_in(made, 0) == 64 + (BRIEF + 2048 - MODEL)
    assert {at: one.size for at, one in blocks_of(made, 0).items()} == {at: one.size for at, one in alive.items()}
    # The viewer also draws released blocks, and fails for one that lies in no segment.
    for one in trace:
        if one["action"] == "alloc":
            ends = [(segment["address"], segment["address"] + segment["total_size"]) for segment in made["segments"]]
            assert any(begin <= one["addr"] and one["addr"] + one["size"] <= end for begin, end in ends)
    ledger = Ledger(alive.values())
    ledger.categories, ledger.phases = [6] * len(trace), ["forward"] * len(trace)
    snapshot = annotated(made, 0, ledger)
    write(snapshot, tmp_path / "snapshot.pickle")
    check_that_the_viewer_reads(tmp_path / "snapshot.pickle")


def test_an_allocations_line_is_the_first_outside_torch() -> None:
    import torch

    inside = {"filename": torch.nn.functional.__file__, "line": 1, "name": "linear"}
    trimmed = {"filename": "torch/nn/modules/linear.py", "line": 2, "name": "forward"}
    compiled = {"filename": "", "line": 0, "name": "cpp_kernel"}
    library = {"filename": contextmanager_file(), "line": 3, "name": "inner"}
    ours = {"filename": "/a/site-packages/mine/model/transformer.py", "line": 59, "name": "forward"}
    caller = {"filename": "/a/b/model/steps.py", "line": 7, "name": "step"}
    frames = [compiled, inside, trimmed, library, ours, library, caller]
    assert site(frames) == "mine/model/transformer.py:59 forward"
    assert short_stack(frames) == "mine/model/transformer.py:59 forward < steps.py:7 step"
    assert site([inside]) is None
    assert short_stack([]) is None


def contextmanager_file() -> str:
    import contextlib

    return contextlib.__file__
