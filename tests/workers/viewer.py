"""Checks that snapshots can be read by torch's own tools and by pytorch.org/memory_viz."""

import pickle
import pickletools
from pathlib import Path
from typing import Any

import torch.cuda._memory_viz as viz

from workers.measure.allocations.categories import CATEGORIES
from workers.measure.allocations.snapshot import blocks_of

VIEWER_OPCODES = {
    *("APPEND", "APPENDS", "BINFLOAT", "BINGET", "BININT", "BININT1", "BININT2", "BINPUT", "BINUNICODE", "DICT"),
    *("EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "FRAME", "LIST", "LONG1", "LONG_BINGET", "LONG_BINPUT", "MARK"),
    *("MEMOIZE", "NEWFALSE", "NEWTRUE", "NONE", "PROTO", "SETITEM", "SETITEMS", "SHORT_BINUNICODE", "STOP", "TUPLE"),
    *("TUPLE1", "TUPLE2", "TUPLE3"),
}
"""The pickle opcodes that the viewer's own unpickler knows (torch/utils/viz/MemoryViz.js)."""


def read(path: Path) -> dict[str, Any]:
    return pickle.loads(path.read_bytes())


def check_that_the_viewer_reads(path: Path) -> dict[str, Any]:
    """Check what pytorch.org/memory_viz and torch.cuda._memory_viz demand of a file; return what is in it."""
    data = path.read_bytes()
    assert data[:2] == b"\x80\x04", "pickle, protocol 4"
    assert {opcode.name for opcode, _, _ in pickletools.genops(data)} <= VIEWER_OPCODES
    found = read(path)
    for index, trace in enumerate(found["device_traces"]):
        if not trace:
            continue
        segments = [one for one in found["segments"] if one["device"] == index]
        categories = {one["category"] for one in trace if "category" in one}
        assert "unknown" in categories, "else the viewer fails"
        assert categories <= set(CATEGORIES)
        for one in trace:
            assert {"action", "size", "stream", "device_free" if one["action"] == "oom" else "addr"} <= set(one)
        inside = [(one["address"], one["address"] + one["total_size"]) for one in segments]
        for segment in segments:
            assert sum(one["size"] for one in segment["blocks"]) == segment["total_size"]
            for one in segment["blocks"]:
                assert one["state"] in {"active_allocated", "active_awaiting_free", "inactive"}
                assert {"size", "requested_size"} <= set(one)
        blocks = set(blocks_of(found, index))
        for address in blocks:
            assert any(begin <= address < end for begin, end in inside)
        # The viewer draws what the history says, so it must end with the blocks that are alive.
        living = set()
        for one in trace:
            if one["action"] == "alloc":
                living.add(one["addr"])
            elif one["action"] == "free_requested":
                assert one["addr"] in living, "no release without its allocation"
                living.remove(one["addr"])
        assert living == blocks
    assert "total_reserved" in viz.segsum(found)  # type: ignore[no-untyped-call]
    assert "entries" in viz.trace(found)  # type: ignore[no-untyped-call]
    assert "add_local_files" in viz.trace_plot(found)  # type: ignore[no-untyped-call]
    assert "add_local_files" in viz.segment_plot(found)
    viz.memory(found, format_flamegraph=str)  # type: ignore[no-untyped-call]
    return found
