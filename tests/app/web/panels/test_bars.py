"""Bars of parts."""

from app.web.panels._bars import bars_of


def test_a_part_tells_its_share_of_its_bar() -> None:
    figure = bars_of(["a", "b"], {"x": {"a": 3.0}, "y": {"a": 1.0, "b": 1.0}}, "Memory (MiB)", "MiB")
    assert [trace["x"] for trace in figure["data"]] == [[3.0, 1.0], [None, 1.0]]
    assert figure["data"][0]["customdata"] == [", 100.0 %", ", 50.0 %"]
