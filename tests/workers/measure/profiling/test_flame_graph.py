import re
from xml.etree import ElementTree as ET

import pytest

from workers.measure.profiling.flame_graph import MARGIN, WIDTH, draw

SVG = "{http://www.w3.org/2000/svg}"
STACKS = {
    ("forward", "void k<float, 4>(a & b)", 'say "hi"'): 600_000,
    ("forward", "<lambda>\x00\x1b"): 300_000,
    ("backward",): 100_000,
    ("forward", "too small to see"): 1,
}


def test_it_is_well_formed_and_as_wide_as_the_time() -> None:
    svg = ET.fromstring(draw(STACKS, "tiny <model>", "a & b"))
    frames = {group.findtext(f"{SVG}title"): group.find(f"{SVG}rect") for group in svg.iter(f"{SVG}g")}
    assert len(frames) == 6, "all but the one that is too small to see"
    widths = {title.partition(":")[0]: float(box.attrib["width"]) for title, box in frames.items()}
    whole = WIDTH - 2 * MARGIN
    assert widths["all"] == pytest.approx(whole, abs=0.5)
    assert widths["forward"] == pytest.approx(0.9 * whole, abs=0.5)
    assert widths["backward"] == pytest.approx(0.1 * whole, abs=0.5)
    assert svg.findtext(f"{SVG}title") == "tiny <model>"
    assert any(title.startswith("void k<float, 4>(a & b): 0.600 ms, 60.00 %") for title in frames)


def test_it_needs_nothing_else_and_runs_nothing() -> None:
    text = draw(STACKS, "t", "s")
    assert not re.search(r"<script|href|url\(|@import|on\w+=", text)


def test_no_stacks_are_an_empty_picture() -> None:
    assert list(ET.fromstring(draw({}, "t", "s")).iter(f"{SVG}g")) == []
