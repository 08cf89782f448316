"""Folded stacks as a tree."""

import pytest

from app.web import stacks
from app.web.stacks import draw_changed_flames, draw_flames, tree


def test_frames_hold_their_callees() -> None:
    (trace,) = draw_flames(tree(b"forward;a;b 30\nforward;a 10\nforward;c 50\nbackward 10\nno stack\n\n"))["data"]
    assert list(zip(trace["y"], trace["base"], trace["x"], trace["text"], strict=True)) == [
        (0, 0, 100, "all"),
        (1, 0, 90, "forward"),
        (2, 0, 50, "c"),
        (2, 50, 40, "a"),
        (3, 50, 30, "b"),
        (1, 90, 10, "backward"),
    ]


def test_stacks_that_are_too_deep_are_cut() -> None:
    (trace,) = draw_flames(tree(f"{';'.join('f' * 5000)} 7\n".encode()))["data"]
    assert max(trace["y"]) == stacks.MAX_DEPTH


def test_changed_work_is_as_wide_as_on_its_slower_side_and_coloured_by_its_change() -> None:
    (trace,) = draw_changed_flames([(["forward", "mm"], 6.0, 4.0), (["forward", "copy"], 0.0, 4.0)], "ms")["data"]
    assert dict(zip(trace["text"], trace["x"], strict=True)) == {"all": 100, "forward": 100, "mm": 60, "copy": 40}
    changes = dict(zip(trace["text"], trace["marker"]["color"], strict=True))
    assert changes == pytest.approx({"all": 0.25, "forward": 0.25, "mm": -1 / 3, "copy": 1})
    assert "copy: 0 → 4 ms (+4 ms)" in trace["customdata"]
    (trace,) = draw_changed_flames([(["activation"], 12345.0, 12000.0)], "MiB")["data"]
    assert "activation: 12,345 → 12,000 MiB (−345 MiB)" in trace["customdata"]
