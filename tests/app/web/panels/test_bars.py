"""Bars of parts."""

from __future__ import annotations

from app.web.panels._bars import bars_of


def test_parts_beside_each_other_have_no_shares() -> None:
    figure = bars_of(["a", "b"], {"x": {"a": 3.0}, "y": {"a": 1.0, "b": 1.0}}, "Memory (MiB)", "MiB", mode="group")
    assert figure["layout"]["barmode"] == "group"
    assert [trace["x"] for trace in figure["data"]] == [[3.0, 1.0], [None, 1.0]]
    assert figure["data"][0]["customdata"] == ["", ""]
