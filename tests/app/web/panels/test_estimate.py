"""What the panel of an estimate draws."""

from typing import Any, cast

from app.web.panels._results import JobResults
from app.web.panels.estimate import draw, panels


class Results:
    """The results of one estimate; `rows` are those of the table per-device."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows

    def has(self, table: str) -> bool:
        return bool(self._rows)

    def rows(self, table: str) -> list[dict[str, Any]]:
        return self._rows


def row(strategy: str, parameters: float | None) -> dict[str, Any]:
    parts = {"parameters_gib": parameters, "weight_copies_gib": 0.0 if parameters else None}
    return {"strategy": strategy, "devices": 8, **parts, "total_gib": parameters}


def test_each_strategy_has_a_bar_of_its_parts() -> None:
    results = cast("JobResults", Results([row("data", 4.0), row("fully_sharded", 0.5), row("tensor", None)]))
    (parameters,) = draw(results)["data"]
    assert (parameters["name"], parameters["x"]) == ("parameters", [4.0, 0.5])
    assert parameters["y"] == ["data, 8 devices", "fully sharded, 8 devices"]
    assert panels(results)[0].name == "per-device"
    assert panels(cast("JobResults", Results([]))) == []
