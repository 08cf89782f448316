"""Draws the pictures of docs/pictures from what `python -m benchmarks.gpu_tables --save FILE` has kept, as SVG.

    python -m benchmarks.pictures exposed-communication FILE > docs/pictures/exposed-communication.svg
    python -m benchmarks.pictures attention FILE > docs/pictures/attention.svg

`exposed-communication` takes jobs of kind `ddp` (`--tables ddp`), `attention` those of kind `attention` with several
head dimensions (`--tables lengths`). Where FILE has a job twice, the last one counts. Plotly draws them, in Debian's
chromium.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from playwright.sync_api import sync_playwright

Record = Mapping[str, Any]
"""A line of the file: a job's spec, and what it has reported."""

PLOTLY = Path(__file__).parents[1] / "app/web/static/vendor/plotly/plotly-cartesian.min.js"
TO_IMAGE = "([figure, options]) => Plotly.toImage(figure, options)"
SIZE = {"width": 860, "height": 420}
"""Size of a picture in pixels."""
TITLES = {"triton": "ours", "sdpa_flash": "FlashAttention-2", "sdpa_cudnn": "cuDNN", "flex": "FlexAttention"}
"""Implementations as the picture names them, in this order."""
COLOURS = ("#0b62a4", "#c2410c", "#0f7b5f", "#8e3a9d", "#8a6d00")


def exposed_communication(records: Iterable[Record]) -> dict[str, Any]:
    """Return bars of the communication that each strategy exposes in a step: ours and torch's in two colours."""
    bars = {}
    for record in records:
        found = {row["metric"]: row for row in record["measurements"]}
        exposed = found["exposed_communication_ms"]["median"]
        if exposed is not None:
            bars[strategy_name(record["spec"])] = exposed, found["exposed_communication_error_ms"]["median"]
    names = sorted(bars, key=lambda name: bars[name][0])
    bar = {
        "type": "bar",
        "x": names,
        "y": [bars[name][0] for name in names],
        "error_y": {"type": "data", "array": [bars[name][1] for name in names]},
        "marker": {"color": [COLOURS[name.startswith("torch")] for name in names]},
    }
    return {"data": [bar], "layout": {"yaxis": {"title": {"text": "exposed communication, ms"}}}}


def strategy_name(spec: Mapping[str, Any]) -> str:
    """Return how a strategy is called under its bar."""
    name = str(spec["strategy"]).replace("_", " ")
    if "bucket_size_mb" in spec:
        name += f" {spec['bucket_size_mb']}"
    if spec.get("gradients_as_views") is False:
        name += " in place"
    if spec.get("sharded_optimizer"):
        name += " + zero" if name.startswith("torch") else " + sharded"
    return name


def attention(records: Iterable[Record]) -> dict[str, Any]:
    """Return the speed of forward with backward over the sequence's length, a line per implementation and width."""
    lines: dict[tuple[str, int], dict[int, float]] = {}
    for record in records:
        if len(record["spec"].get("head_dims", ())) < 2:
            continue  # single shapes, with other numbers of positions
        for row in record["measurements"]:
            case = row["case"]
            if row["metric"] == "tflops" and row["phase"] is None and row["median"] is not None:
                line = lines.setdefault((case["implementation"], case["head_dim"]), {})
                line[case["sequence_length"]] = row["median"]
    implementations = sorted({name for name, _ in lines}, key=lambda name: [*TITLES, name].index(name))
    traces: list[dict[str, Any]] = []
    for name, head_dim in sorted(lines, key=lambda line: (-line[1], implementations.index(line[0]))):
        points = sorted(lines[name, head_dim].items())
        colour = COLOURS[implementations.index(name) % len(COLOURS)]
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": f"{TITLES.get(name, name)}, d = {head_dim}",
                "x": [length for length, _ in points],
                "y": [tflops for _, tflops in points],
                "line": {"color": colour, "dash": "solid" if head_dim == 128 else "dash"},
                "marker": {"color": colour},
            }
        )
    lengths = sorted({length for line in lines.values() for length in line})
    ticks = {"tickvals": lengths, "ticktext": [f"{length:,}" for length in lengths]}
    return {
        "data": traces,
        "layout": {
            "xaxis": {"type": "log", "title": {"text": "sequence length (d: head dimension)"}, **ticks},
            "yaxis": {"title": {"text": "forward + backward, TFLOP/s"}, "rangemode": "tozero"},
            "showlegend": True,
        },
    }


PICTURES = {
    "exposed-communication": (exposed_communication, "Communication that each strategy exposes in a training step"),
    "attention": (attention, "Speed of attention over the length of the sequence"),
}
"""The pictures by their names on the command line: how they are made, and what they show."""


def svg(name: str, records: Sequence[Record]) -> str:
    """Return a picture as the text of an SVG file."""
    make, title = PICTURES[name]
    figure = make(records)
    if not any(trace["x"] for trace in figure["data"]):
        raise SystemExit(f"{name}: the file has no such jobs")
    figure["layout"] |= {"title": {"text": title}, "font": {"family": "system-ui, sans-serif"}}
    with sync_playwright() as playwright:
        # The sandbox does not work as root, and the page is empty.
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page()
        page.add_script_tag(path=PLOTLY)
        address = page.evaluate(TO_IMAGE, [figure, {"format": "svg", **SIZE}])
        browser.close()
    return unquote(address.partition(",")[2]) + "\n"


def main() -> None:
    """Draw what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", choices=PICTURES)
    parser.add_argument("file", type=Path, help="what `benchmarks.gpu_tables --save` has kept")
    options = parser.parse_args()
    records = [json.loads(line) for line in options.file.read_text().splitlines()]
    print(svg(options.picture, records), end="")


if __name__ == "__main__":
    main()
