"""Commands that fetch results: table, plot, history, download, specs."""

from __future__ import annotations

import enum
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.cli import completing
from app.cli.arguments import parse_pairs, split_pair
from app.cli.brief import answer, of_table
from app.cli.common import AsJson, JobId, Label, TableStatistic, check_kind, command
from app.cli.terminal import echo, echo_bytes, echo_json, echo_table, fail
from flopwatch.spelling import argument, arguments, fields
from flopwatch.table_options import FORMATS, Format

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flopwatch import Flopwatch
    from flopwatch.queries import PlotOptions


# Typer turns enumerations into choices.
BRIEF = "brief"
TableFormat = enum.StrEnum("TableFormat", {name: name for name in (*FORMATS, BRIEF)})  # type: ignore[misc]
MARKDOWN = TableFormat("markdown")


Jobs = Annotated[
    list[int] | None,
    typer.Option(
        metavar="ID", help="This job, beside those of --sweep; may be repeated.", autocompletion=completing.job_ids
    ),
]
Sort = Annotated[str | None, typer.Option(metavar="COLUMN", help="Sort by this column; -COLUMN: descending.")]


@dataclass(frozen=True)
class TableChoice:
    """Options that choose the rows of a table, and lay it out."""

    sweep: Annotated[
        list[int] | None,
        typer.Option(metavar="ID", help="Jobs of this sweep; may be repeated.", autocompletion=completing.sweep_ids),
    ] = None
    job: Jobs = None
    kind: Annotated[
        list[str] | None,
        typer.Option(help="Only jobs of this kind; repeat it for several.", autocompletion=completing.kinds),
    ] = None
    label: Label = None
    since: Annotated[
        str | None, typer.Option(metavar="WHEN", help="Finished since: 7d, 12h, 90min, 2026-03-01, or a time.")
    ] = None
    until: Annotated[str | None, typer.Option(metavar="WHEN", help="Finished before.")] = None
    rows: Annotated[str | None, typer.Option(metavar="NAMES", help="Coordinates that make the rows.")] = None
    columns: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Metrics that make the columns; `all` for every one.")
    ] = None
    statistic: Annotated[TableStatistic | None, typer.Option(help="Of the samples; by default the median.")] = None
    pivot: Annotated[str | None, typer.Option(metavar="COORDINATE", help="Make this coordinate's values columns.")] = (
        None
    )
    relative_to: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COORDINATE=VALUE", help="Say how many times faster each row is than the one with this coordinate."
        ),
    ] = None
    where: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN=VALUE",
            help="Only rows with this value of a coordinate, or of a column of --name; again for another column, or "
            "value.",
        ),
    ] = None
    in_range: Annotated[
        list[str] | None,
        typer.Option(
            "--range",
            metavar="PART",
            help="Only rows whose range contains this, or is like this pattern (*, ?): --name kernels --range softmax.",
        ),
    ] = None
    rename: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN=NAME", help="Call this column otherwise; may be repeated.")
    ] = None
    separate: Annotated[
        bool,
        typer.Option(
            "--separate",
            help="Put the standard deviation of a mean, or the interval of a median, into columns of its own.",
        ),
    ] = False
    best: Annotated[
        bool,
        typer.Option(
            "--best",
            help="Set the best cell of each column in bold; with --pivot implementation or another choice, of each "
            "row.",
        ),
    ] = False
    links: Annotated[bool, typer.Option("--links", help="Show the job of each row, with its address.")] = False
    name: Annotated[
        str | None,
        typer.Option(
            help="Instead of measurements, this table of a job or of a sweep's jobs; `flopwatch show` lists them."
        ),
    ] = None
    sort: Sort = None
    limit: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of rows; with --name and --sweep, of each job.")
    ] = None
    unit: Annotated[int | None, typer.Option(min=0, metavar="INDEX", help="With --name: rows of this unit.")] = None
    caption: Annotated[str | None, typer.Option(help="The table's title.")] = None
    latex_label: Annotated[
        str | None, typer.Option(metavar="NAME", help="The name by which LaTeX's \\ref finds the table.")
    ] = None
    output_format: Annotated[TableFormat, typer.Option("--format", help="How to write it.")] = MARKDOWN


@command
def table(server: Flopwatch, *, chosen: TableChoice) -> None:
    """Print a table of measurements, one row per case and one column per metric; or a table that a job's units made.

    The format brief is for programs: at most 60 lines, a row each as JSON.
    """
    of_measurements: dict[str, Any] = {
        "kind": chosen.kind,
        "labels": parse_pairs(chosen.label or []) or None,
        "since": chosen.since,
        "until": chosen.until,
        "rows": chosen.rows and [chosen.rows],
        "statistic": chosen.statistic and chosen.statistic.value,
        "pivot": chosen.pivot,
        "relative_to": parse_pairs(chosen.relative_to or []) or None,
        **{flag: True for flag in ("best", "separate", "links") if getattr(chosen, flag)},
    }
    ranges = (one if {"*", "?"} & {*one} else f"*{one}*" for one in chosen.in_range or [])
    both: dict[str, Any] = {
        "columns": chosen.columns and [chosen.columns],  # the server parts names at commas
        "where": values_of([*(chosen.where or []), *(f"range={one}" for one in ranges)]),
        "rename": parse_pairs(chosen.rename or []) or None,
    }
    both |= {"sort": chosen.sort, "limit": chosen.limit, "caption": chosen.caption, "latex_label": chosen.latex_label}
    written = format_of(chosen.output_format)
    if chosen.name is not None:
        _refuse(of_measurements, "chooses measurements; with --name leave it out")
        own = {**both, "unit": chosen.unit}
        print_table(_own_table(server, chosen.name, chosen.sweep, chosen.job, written, own), chosen.output_format)
        return
    _refuse({"unit": chosen.unit}, "goes with --name, which prints a table that a job's units made")
    for kind in chosen.kind or ():
        check_kind(server, kind)
    text = server.table_text(written, sweep=chosen.sweep, job=chosen.job, **of_measurements, **both)
    print_table(text, chosen.output_format)
    if chosen.output_format.value == "csv":  # the only format that cannot say it
        for sweep in chosen.sweep or []:
            counts = server.get(f"/sweeps/{sweep}")["counts"]
            if unfinished := [f"{counts[state]} {state}" for state in ("queued", "running") if counts[state]]:
                echo(f"jobs of sweep {sweep} that the table lacks: {', '.join(unfinished)}", err=True)


def _own_table(
    server: Flopwatch, name: str, sweep: list[int] | None, job: list[int] | None, format_: Format, own: dict[str, Any]
) -> str:
    """Return a table that the units of a job, or of a sweep's jobs, made; of a sweep `limit` is that of each job."""
    if len([*(job or []), *(sweep or [])]) != 1:
        raise typer.BadParameter("give one --job or --sweep, whose table it is", param_hint="--name")
    if not sweep:
        return server.job_table_text((job or [0])[0], name, format_, **own)
    own["limit_per_job"] = own.pop("limit")
    return server.sweep_table_text(sweep[0], name, format_, **own)


def values_of(words: Sequence[str] | None) -> dict[str, list[str]] | None:
    """Read "coordinate=value", of which several may name one coordinate; None if there are none."""
    values: dict[str, list[str]] = {}
    for name, value in map(split_pair, words or []):
        values.setdefault(name, []).append(value)
    return values or None


def format_of(chosen: TableFormat) -> Format:
    """Return the format that an option has chosen; the short document is made of JSON."""
    return next((name for name in FORMATS if name == chosen.value), "json")


def print_table(text: str, output_format: TableFormat) -> None:
    """Print a table as the server wrote it; with `--format brief` the document made of it."""
    if output_format == BRIEF:
        answer(of_table(json.loads(text)))
    if output_format.value == "json":
        echo_json(text)
    elif output_format.value == "markdown":
        echo_table(text)
    else:
        echo(text, nl=not text.endswith("\n"))


def _refuse(options: Mapping[str, Any], why: str) -> None:
    for option, value in options.items():
        if value is not None:
            written = "label" if option == "labels" else option.replace("_", "-")
            raise typer.BadParameter(why, param_hint=f"--{written}")


@command
def history(
    server: Flopwatch,
    case: Annotated[
        str | None, typer.Argument(metavar="[CASE]", help="The case's key, or its beginning: case_key in JSON.")
    ] = None,
    *,
    job_id: Annotated[
        int | None,
        typer.Option(
            "--job", metavar="ID", help="A job that has measured the case.", autocompletion=completing.job_ids
        ),
    ] = None,
    coordinate: Annotated[
        list[str] | None,
        typer.Option("--case", metavar="NAME=VALUE", help="Select the job's case with this value; may be repeated."),
    ] = None,
    metric: Annotated[str | None, typer.Option(metavar="NAME", help="By default the main one.")] = None,
    device: Annotated[str | None, typer.Option(metavar="NAME", help="Only on this device.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=2000, help="Maximum number of points, newest first.")] = 50,
    as_json: AsJson = False,
) -> None:
    """Show one metric of one case over time: in every job that measured it, with the version of the code."""
    from app.cli.output import print_columns, print_json
    from app.metrics import readable
    from flopwatch.text.times import moment

    if case is None and job_id is None:
        raise typer.BadParameter("give a case's key, or --job")
    if case is not None and not re.fullmatch("[0-9a-f]{4,}", case):
        raise typer.BadParameter(f"{case!r} is no case's key, hexadecimal digits: `--job ID` takes a job")
    chosen = [f"{name}={value}" for name, value in parse_pairs(coordinate or []).items()]
    shown = server.get(
        "/history", case=case, job=job_id, coordinate=chosen or None, metric=metric, device=device, limit=limit
    )
    if as_json:
        print_json(shown)
        return
    echo(f"{shown['kind']}: {shown['case']} (case {shown['case_key']})")
    several = len(shown["devices"]) > 1
    several_hosts = len(shown["hosts"]) > 1
    echo(readable(shown["metric"], shown["unit"]) + ("" if several else f" on {shown['devices'][0]}"))
    places = [*(["device"] if several else []), *(["host"] if several_hosts else [])]
    head = ("finished", "job", *places, "median", "low", "high", "n", "verdict", "version")
    rows = [
        (
            moment(point["finished_at"]),
            f"{point['job']} {point['side']}" if point["side"] else point["job"],
            *([point["device_key"]] if several else []),
            *([point["host"]] if several_hosts else []),
            point["outcome"] if point["value"] is None else point["value"],
            *(point[name] for name in ("low", "high", "n", "validity")),
            " ".join(filter(None, (point["short_version"], point.get("revision")))) or None,
            ", ".join(point["baselines"]) or None,
        )
        for point in reversed(shown["points"])
    ]
    print_columns((*head, "baselines"), rows)
    if shown["is_cut"]:
        echo(f"showing the newest {len(rows)}; use --limit for more", err=True)
    echo(f"{server.url}/ui/history?case={shown['case_key']}&metric={shown['metric']}")


def write_new(target: Path, content: bytes) -> None:
    """Write a file that is not there yet; else print why not, and exit."""
    opened = None
    try:
        with target.open("xb") as opened:
            opened.write(content)
    except FileExistsError:
        fail(f"{target} is there already, and is not overwritten: choose another file with --output.", 2)
    except OSError as error:
        fail(f"{target}: {error.strerror}: choose another file with --output.", 2 if opened is None else 1)


@command
def download(
    server: Flopwatch,
    job_id: JobId,
    name: Annotated[
        str | None, typer.Argument(help="One file; by default all of them.", autocompletion=completing.file_names)
    ] = None,
    *,
    to: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder to write into; by default job-ID, below this one.")
    ] = None,
) -> None:
    """Download a job's files, checked against their SHA-256. No file is overwritten."""
    from flopwatch.client import FINISHED

    paths = server.download(job_id, name, to=to)
    for path in paths:
        echo(f"{path}: {path.stat().st_size} bytes")
    if not paths:
        state = server.job(job_id).state
        echo(f"job {job_id} has no files{'' if state in FINISHED else f' so far: it is {state}'}", err=True)


@command
def specs(
    server: Flopwatch,
    kind: Annotated[
        str | None, typer.Argument(help="One kind, with its fields.", autocompletion=completing.kinds)
    ] = None,
    *,
    as_json: AsJson = False,
) -> None:
    """List the kinds of job, or the fields and presets of one."""
    from app.cli.output import print_columns, print_json, print_list
    from flopwatch import ClientError

    listed = server.specs()
    usual = {spec["kind"]: dict(fields(spec["example"])) for spec in listed}
    if kind is not None:
        listed = [spec for spec in listed if spec["kind"] == kind]
        if not listed:
            raise ClientError(f"There is no kind {kind!r}; `flopwatch specs` lists them.")
    if as_json:
        print_json(listed)
    elif kind is None:
        print_list(listed, {"kind": "kind", "description": lambda spec: spec["description"].partition("\n")[0]})
    else:
        print_columns(
            ("field", "default", "description"), list(_fields(listed[0]["schema"], listed[0]["example"], usual))
        )
        if listed[0]["presets"]:
            echo()
            named = listed[0]["presets"].items()
            presets = [(name, " ".join(arguments(values)), _shape(values)) for name, values in named]
            head = ("--preset", "fields", "which is")
            shown = len(head) if any(shape for *_, shape in presets) else 2
            print_columns(head[:shown], [preset[:shown] for preset in presets])


def _shape(preset: dict[str, Any]) -> str:
    from app.presets import MODEL_SIZES, VOCABULARY_SIZES

    size = preset.get("model", {}).get("size")
    shape = {**MODEL_SIZES.get(size, {}), "vocab_size": VOCABULARY_SIZES.get(size)}
    return ", ".join(f"{name} {number}" for name, number in shape.items() if number is not None)


def _fields(
    schema: dict[str, Any], example: dict[str, Any], usual: dict[str, dict[str, Any]], prefix: str = ""
) -> list[tuple[str, str, str]]:
    """Return (dotted path, default, description) of every field; nested models are flattened. A default is written as
    `flopwatch submit` takes it. Of a spec inside another one the fields are shown whose values differ from those that
    are `usual` for its kind."""
    definitions = schema.get("$defs", {})
    rows = []
    for name, field in schema["properties"].items():
        path, default = prefix + name, example.get(name)
        inner = definitions.get(field.get("$ref", "").rpartition("/")[2])
        if inner is not None and isinstance(default, dict):
            rows += _fields({**inner, "$defs": definitions}, default, usual, path + ".")
            continue
        text = field.get("description", "").replace("\n", " ")
        if isinstance(default, dict) and default.get("kind") in usual:
            kind = default["kind"]
            rows.append(
                (f"{path}.kind", kind, f"{text} `flopwatch specs {kind}` lists its fields: {path}.FIELD=VALUE.")
            )
            own = {at: value for at, value in fields(default) if usual[kind].get(at) != value}
            rows += [(f"{path}.{at}", argument(value), "") for at, value in own.items()]
        elif path != "kind":
            choices = " | ".join(map(argument, field.get("enum", ())))
            rows.append((path, argument(default), f"{choices}: {text}" if choices else text))
    return rows


PlotFormat = enum.StrEnum("PlotFormat", {name: name for name in ("svg", "png", "pdf", "html", "json")})  # type: ignore[misc]
Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[JOB] [NAME]",
        help="The job, and the plot's name; without a name, the names of all. With --sweep the name alone.",
        autocompletion=completing.job_ids,
    ),
]


@command
def plot(
    server: Flopwatch,
    words: Words = None,
    *,
    sweep: Annotated[
        int | None, typer.Option(metavar="ID", help="Instead of JOB.", autocompletion=completing.sweep_ids)
    ] = None,
    against: Annotated[
        int | None, typer.Option(metavar="ID", help="For ratios and distributions: the job to compare JOB with.")
    ] = None,
    metric: Annotated[str | None, typer.Option(help="Of a chart, heat map or history: what is drawn.")] = None,
    x: Annotated[str | None, typer.Option(metavar="COORDINATE", help="Along x.")] = None,
    y: Annotated[str | None, typer.Option(metavar="COORDINATE", help="Of a heat map: its rows.")] = None,
    group: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Coordinates that make the series; by default all that vary.")
    ] = None,
    where: Annotated[
        list[str] | None, typer.Option(metavar="COORDINATE=VALUE", help="Only these cases; may be repeated.")
    ] = None,
    relative_to: Annotated[
        list[str] | None,
        typer.Option(metavar="COORDINATE=VALUE", help="Draw how many times faster each case is than this one."),
    ] = None,
    output_format: Annotated[
        PlotFormat | None, typer.Option("--format", help="By default what the file's name says, or svg.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", dir_okay=False, help="The file; `-`: standard output. By default named by job and plot."
        ),
    ] = None,
) -> None:
    """Write a plot of a job's or a sweep's page as a picture for a report; without NAME, list the plots of the job."""
    job, name = _job_and_name(words or [], sweep)
    if name is None and sweep is None:
        if output is not None or output_format is not None:
            raise typer.BadParameter("give a NAME; without one, the plots are only listed", param_hint="[JOB] [NAME]")
        _list(server, job)
        return
    name = name or "chart"
    written = output_format or _format_of(output)
    options: PlotOptions = {
        "metric": metric,
        "x": x,
        "y": y,
        "group": group and [group],
        "where": values_of(where),
        "relative_to": parse_pairs(relative_to or []) or None,
    }
    content = server.plot(job, name, sweep=sweep, against=against, format=written.value, **options)  # type: ignore[arg-type]
    if str(output) == "-":
        echo_bytes(content)
        return
    of = f"job-{job}" if sweep is None else f"sweep-{sweep}"
    target = output or Path(f"{of}-{name}.{written}")
    write_new(target, content)
    echo(f"{target}: {len(content)} bytes")


def _job_and_name(words: list[str], sweep: int | None) -> tuple[int | None, str | None]:
    """Return the job and the plot's name; of a sweep there is only a name."""
    rest = list(words)
    job = None
    if sweep is None:
        if not rest or not rest[0].isdecimal():
            raise typer.BadParameter("give the number of a JOB, or --sweep", param_hint="[JOB] [NAME]")
        job = int(rest.pop(0))
    if len(rest) > 1:
        raise typer.BadParameter("give one NAME", param_hint="[JOB] [NAME]")
    return job, rest[0] if rest else None


def _format_of(output: Path | None) -> PlotFormat:
    suffix = "" if output is None else output.suffix.removeprefix(".").lower()
    if suffix and suffix not in list(PlotFormat):
        formats = ", ".join(PlotFormat)
        raise typer.BadParameter(
            f"{suffix} is no format of plots: name it by --format ({formats})", param_hint="--output"
        )
    return PlotFormat(suffix or "svg")


def _list(server: Flopwatch, job: int | None) -> None:
    from app.cli.output import print_list

    plots = server.list_plots(job)
    if not plots:
        echo(f"job {job} has no plots", err=True)
        return
    print_list(plots, {"plot": "name", "title": "title"})
