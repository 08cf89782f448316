"""`diagnosis`: the step less what it is lost to, the changes with their intervals, and the gaps in a GPU's work."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from app.specs.diagnosis import REMOVABLE, WORK
from app.web.panels._bars import label
from app.web.panels._panel import Panel
from app.web.panels._results import JobResults, Row
from app.web.plots.drawing import LEGEND, Figure, escaped
from app.web.plots.ratios import Ratio, draw_ratios
from flopwatch.text.numbers import number

MOST_BARS = 15
STEP, FLOOR, REST = "step", "floor", "the rest"
LOOK = {
    "measured without it": {"color": "var(--plot-1)"},
    "at most": {"color": "var(--plot-1)", "pattern": {"shape": "/"}, "line": {"color": "var(--plot-1)", "width": 1}},
    "not known": {"color": "var(--quiet)", "pattern": {"shape": "/"}},
    "the model's own work": {"color": "var(--plot-3)"},
    "unexplained": {"color": "var(--quiet)", "pattern": {"shape": "x"}},
    "time of a step": {"color": "var(--quiet)"},
}
"""The parts of the waterfall, in the order of the legend."""
FITS = 0.99
"""By a larger factor bars are not told to be drawn shorter."""
PLACE = re.compile(r"(?:\S+: )?garbage collection$|\S*$")
"""What a bar's label has of a place."""
HATCHED = ("at most", "not known", "unexplained")
ROUGH = "Bars of what was not measured are rough, and so is the floor: profiled and measured steps disagree"
LONGER = "What only the profile saw is drawn at {:.0f} % of its time: longer than what steps without other causes leave"


def panels(results: JobResults) -> Iterator[Panel]:
    causes, changes = results.rows("causes"), results.rows("changes")
    if causes:
        text = (
            "Each bar is what the step would lose with that cause alone removed. Full bars were measured by steps "
            "without it; hatched ones are ceilings: all of the time that was seen there, such as that of a loop over "
            "small operators, most of which one operator over all rows saves. The floor is what is left if all of it "
            "goes: the model's own work, which a change may shorten, but not remove."
        )
        yield Panel("waterfall", "From the step to its floor (ms)", text, lambda: draw_waterfall(causes, changes))
    if changes:
        yield changes_panel(results, causes, changes)
    if gaps := results.rows("gaps", last=True):
        text = "The longest times without a kernel in one traced step: why, which kernel ended them, and your line."
        yield Panel("gaps", "Largest gaps in the GPU's work", text, template="gaps.html", values={"gaps": gaps})


def draw_waterfall(causes: Sequence[Row], changes: Sequence[Row] = ()) -> Figure:
    """Draw the step, a bar for each cause where the bars before it have left the step, and the floor. The last row of
    the table `changes` is of all changes that help."""
    step = 100 * _number(causes[0], "lost_ms") / (_number(causes[0], "lost_percent") or 100)
    shown = sorted(causes[:MOST_BARS], key=_is_work)
    bars: list[tuple[str, str, float, float, str]] = [(STEP, "time of a step", 0.0, step, "")]
    scale = _scale(shown, step)
    rough = {row["bound_ms"] for row in shown if row["bound_is"] == "ceiling"} == {None}
    floor = f"{FLOOR}, rough" if rough else FLOOR
    left, at_floor, known = step, False, set()
    for row in shown:
        if _is_work(row) and not at_floor and left:
            bars.append((floor, "time of a step", 0.0, left, ""))
            at_floor = True
        if row["cause"] in known:  # the bound was one of all that is lost to it
            continue
        measured = _is_measured(row)
        known |= {row["cause"]} if measured else set()
        lost = min(left, step - _number(row, "bound_ms") if measured else scale * _number(row, "lost_ms"))
        lost = max(lost, 0.0)
        ceiling = "not known" if row["bound_ms"] is None else "at most"
        part = "the model's own work" if at_floor else "measured without it" if measured else ceiling
        part = "unexplained" if row["cause"] == "unexplained" else part
        left -= lost
        if lost == 0:
            continue
        where = str(row["where"] or "")
        # "train.py:51-55 Adam.step (line 52: 99 times a step)" is Adam.step.
        function = PLACE.findall(where.partition(" (")[0])[0]
        bars.append(
            (f"{row['rank']} {row['cause']}{',' if function else ''} {function}".strip(), part, left, lost, where)
        )
    if left > 0:
        bars.append((REST if at_floor else floor, "time of a step", 0.0, left, ""))
    if changes and (together := changes[-1])["verdict"] == "better":
        bars.append(("all together", "time of a step", 0.0, _number(together, "step_ms"), str(together["how"])))
    notes = [*([ROUGH] if rough else []), *([LONGER.format(100 * scale)] if scale <= FITS else [])]
    return {
        "data": [
            _trace(part, [bar for bar in bars if bar[1] == part]) for part in LOOK if part in {one[1] for one in bars}
        ],
        "layout": {
            "barmode": "overlay",
            "height": 130 + 34 * len(bars),
            "xaxis": {"title": {"text": "Time (ms)"}, "range": [0, 1.15 * step]},
            "yaxis": {
                "type": "category",
                "categoryorder": "array",
                "categoryarray": [label(bar[0]) for bar in reversed(bars)],
                "showgrid": False,
            },
            "showlegend": True,
            **LEGEND,
        },
        "note": "; ".join(notes),
        "table": {"columns": ["bar", "what", "from (ms)", "length (ms)", "where"], "rows": [list(bar) for bar in bars]},
    }


def _scale(shown: Sequence[Row], step: float) -> float:
    """Return the factor by which the bars that only the profile saw fit beside those that were measured: after a sleep
    or a read, it saw operators take longer than they do without it."""
    measured = {row["cause"]: step - _number(row, "bound_ms") for row in reversed(shown) if _is_measured(row)}
    seen = sum(_number(row, "lost_ms") for row in shown if row["cause"] not in measured)
    left = max(0.0, step - sum(max(0.0, gain) for gain in measured.values()))
    return min(1.0, left / (seen or 1.0))


def _is_measured(row: Row) -> bool:
    return row["bound_is"] == "measured" and not _is_work(row)


def _is_work(row: Row) -> bool:
    return row["cause"] in WORK and not any(note in str(row["where"]) for note in REMOVABLE)


def _trace(part: str, bars: Sequence[tuple[str, str, float, float, str]]) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": part,
        "y": [label(name) for name, *_ in bars],
        "x": [length for *_, length, _ in bars],
        "base": [base for _, _, base, *_ in bars],
        "text": [number(length) for *_, length, _ in bars],
        "textposition": "outside" if part in HATCHED else "auto",  # on hatching nobody can read it
        "cliponaxis": False,  # beside the longest bar of a phone a number needs the margin
        "marker": LOOK[part],
        "customdata": [f"{number(length)} ms {escaped(where)}" for *_, length, where in bars],
        "hovertemplate": "%{y}: %{customdata}<extra></extra>",
    }


def changes_panel(results: JobResults, causes: Sequence[Row], changes: Sequence[Row]) -> Panel:
    """Return the changes with their intervals and, of each, the command that measures it again and what to write."""
    looks = [*results.rows("candidates"), *results.rows("candidates", last=True)]
    known = {row["change"]: row for row in looks}
    removing = {name for name, row in known.items() if row["removes"]}
    where: Mapping[Any, Any] = {row["cause"]: row["where"] for row in reversed(causes)}
    told = [
        {**row, "where": where.get(row["cause"]), "command": again(results.id, row)}
        for row in changes
        if row["change"] not in removing and (row["change"] in known or " + " in str(row["how"]))
    ]
    text = (
        "The changed step's time divided by that of the step as it is, with the 95 % interval where both took turns; "
        "without one, a single process has tried it. Those named “bound” take work away: no cure, but the most that "
        "one can bring."
    )
    return Panel(
        "changes",
        "What each change brings",
        text,
        (lambda: draw_ratios(ratios(changes, removing))) if any(row["ratio"] for row in changes) else None,
        template="changes.html",
        values={
            "better": [row for row in told if row["verdict"] == "better"],
            "others": [row for row in told if row["verdict"] != "better" and row["ratio"] and row["change"] in known],
            "untried": [row for row in told if not row["ratio"] and row["change"] in known],
        },
    )


def ratios(changes: Sequence[Row], removing: set[Any]) -> list[Ratio]:
    """Return the changes that were measured, the fastest first."""
    found = []
    for row in changes:
        if row["ratio"] and (row["change"] != "together" or " + " in str(row["how"])):
            is_bound = row["change"] in removing
            low, high = (None if row[end] is None else _number(row, end) for end in ("ratio_low", "ratio_high"))
            name, finding = f"{row['change']}{' (bound)' * is_bound}", "bound" if is_bound else str(row["verdict"])
            found.append(Ratio(name, _number(row, "ratio"), low, high, finding, "less"))
    return sorted(found, key=lambda one: one.ratio)


def again(job_id: int, row: Row) -> str:
    """Return the command that measures a change again, or those that help together."""
    names = str(row["how"]).split(" + ") if row["change"] == "together" else [str(row["change"])]
    return f"flopwatch why {job_id} {' '.join(f'--change {name}' for name in names)}"


def _number(row: Row, name: str) -> float:
    return float(row[name] or 0.0)
