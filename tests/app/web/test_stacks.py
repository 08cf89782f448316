"""Folded stacks as a tree."""

import json
from pathlib import Path

import pytest

from app.web import stacks
from app.web.stacks import draw_changed_flames, tree


def test_frames_hold_their_callees(tmp_path: Path) -> None:
    file = tmp_path / "stacks.txt"
    file.write_text("forward;a;b 30\nforward;a 10\nforward;c 50\nbackward 10\nno stack\n\n")
    assert tree(file.read_bytes()) == [
        "all",
        100,
        [["forward", 90, [["c", 50, []], ["a", 40, [["b", 30, []]]]]], ["backward", 10, []]],
    ]


def test_frames_too_narrow_to_be_seen_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "stacks.txt"
    file.write_text("wide 100000\n" + "".join(f"narrow;{number} 1\n" for number in range(40)))
    assert tree(file.read_bytes()) == ["all", 100_040, [["wide", 100_000, []]]]


def test_a_browser_gets_a_bounded_number_of_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "MAX_FRAMES", 100)
    file = tmp_path / "stacks.txt"
    file.write_text("".join(";".join([f"{number}", *"abcdefgh"]) + " 1\n" for number in range(50)))
    found = json.dumps(tree(file.read_bytes()))
    assert found.count("[") == 2 * 100
    assert all(f'"{number}"' in found for number in range(50)), "the frames that hold the most come first"


def test_stacks_that_are_too_deep_are_cut(tmp_path: Path) -> None:
    file = tmp_path / "stacks.txt"
    file.write_text(";".join("f" * 5000) + " 7\n")
    frame, depth = tree(file.read_bytes()), 0
    while frame[2]:
        (frame,), depth = frame[2], depth + 1
        assert frame[1] == 7
    assert depth == stacks.MAX_DEPTH


def test_changed_work_is_as_wide_as_on_its_slower_side_and_coloured_by_its_change() -> None:
    figure = draw_changed_flames([(["forward", "mm"], 6.0, 4.0), (["forward", "copy"], 0.0, 4.0)], "ms")
    (trace,) = figure["data"]
    widths = dict(zip(trace["text"], trace["x"], strict=True))
    assert widths == {"all": 100, "forward": 100, "mm": 60, "copy": 40}
    changes = dict(zip(trace["text"], trace["marker"]["color"], strict=True))
    assert changes == {
        "all": pytest.approx(0.25),
        "forward": pytest.approx(0.25),
        "mm": pytest.approx(-1 / 3),
        "copy": 1,
    }
    assert "copy: 0 → 4 ms (+4 ms)" in trace["customdata"]
