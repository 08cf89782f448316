"""What the panel of an estimate draws."""

from types import SimpleNamespace
from typing import Any

from app.web.panels.estimate import draw, panels


def row(strategy: str, parameters: float | None) -> dict[str, Any]:
    parts = {"parameters_gib": parameters, "weight_copies_gib": 0.0 if parameters else None}
    return {"strategy": strategy, "devices": 8, **parts, "total_gib": parameters}


def test_each_strategy_has_a_bar_of_its_parts() -> None:
    rows = [row("data", 4.0), row("fully_sharded", 0.5), row("tensor", None)]
    results: Any = SimpleNamespace(has=lambda _table: bool(rows), rows=lambda _table: rows)
    (parameters,) = draw(results)["data"]
    assert (parameters["name"], parameters["x"]) == ("parameters", [4.0, 0.5])
    assert parameters["y"] == ["data, 8 devices", "fully sharded, 8 devices"]
    assert panels(results)[0].name == "per-device"
    rows.clear()
    assert panels(results) == []
