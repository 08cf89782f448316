"""What the panel of a comparison draws, from rows as its table `losses` has them."""

from app.web.panels.compare import draw_losses


def test_each_side_has_a_line_of_its_losses() -> None:
    rows = [
        {"step": 1, "baseline_loss": 9.2, "candidate_loss": 9.3, "difference": 0.1, "low": 0.0, "high": 0.2},
        {"step": 2, "baseline_loss": 8.1, "candidate_loss": None, "difference": None, "low": None, "high": None},
    ]
    figure = draw_losses(rows)
    assert [(trace["name"], trace["x"], trace["y"]) for trace in figure["data"]] == [
        ("baseline", [1, 2], [9.2, 8.1]),
        ("candidate", [1, 2], [9.3, None]),
    ]
    assert figure["table"] == {"columns": list(rows[0]), "rows": [list(row.values()) for row in rows]}
    assert draw_losses([])["data"][0]["x"] == []
