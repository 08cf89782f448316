"""The options of the client's methods, and the query parameters that it makes of them."""

import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, SupportsIndex, TypeAlias, TypedDict

from flopwatch.connection import Answer, ClientError, InvalidArgument
from flopwatch.table_options import Statistic
from flopwatch.text.values import value_text

Thing: TypeAlias = SupportsIndex | Mapping[str, Any]
"""A job or a sweep: its id, which in frames is an integer of NumPy, or what the server answered."""


class OwnCodeOptions(TypedDict, total=False):
    """Code of one's own. The files go up first."""

    implementation: str | None
    """Attention or a kernel, "my_attention.py:attention"; in a comparison, the candidate's."""
    model: str | None
    """Likewise, a model class, for training kinds."""
    step: str | None
    """Likewise, a training step ("my_train.py:make_step"), for training kinds."""
    code: str | os.PathLike[str] | None
    """The folder of the project, which goes along, so that imports work."""


class SubmissionOptions(OwnCodeOptions, total=False):
    """The options of a job, or of a sweep's jobs."""

    preset: str | None
    """One of the kind's presets, which the spec then changes."""
    name: str | None
    labels: Mapping[str, str] | None
    priority: int
    """0 by default; higher runs first."""
    timeout_s: float | str | None
    """End the job after so many seconds; "none": never; None: the server's default."""
    max_attempts: int
    """2 by default: how often it may be started when workers are lost."""
    notify_url: str | None
    """The address that the server tells the end, signed as a webhook."""
    idempotency_key: str | None
    """Submitting again with this key gives the first answer and changes nothing."""
    dry_run: bool
    """Only let the server check it: no job is stored."""


class JobFilter(TypedDict, total=False):
    """A filter of jobs: a job matches if it has everything that is given."""

    state: str | None
    kind: str | None
    labels: Mapping[str, str] | None
    sweep: Thing | None
    submitted_by: str | None
    mine: bool
    """Only one's own: of the token's name or, without one, of this process's user."""


class Description(TypedDict, total=False):
    """Fields that people write about a job. A field that is left out stays, and None removes it."""

    name: str | None
    labels: Mapping[str, str | None]
    note: str | None


class TableOptions(TypedDict, total=False):
    """The jobs of a table of measurements, and its layout. Of several conditions, a job meets all."""

    job: Thing | Sequence[Thing] | None
    """This job, or these."""
    sweep: Thing | Sequence[Thing] | None
    """The jobs of this sweep, or of these."""
    kind: str | Sequence[str] | None
    """Jobs of this kind; of several only if all are named."""
    labels: Mapping[str, str] | None
    """Jobs with all of these labels."""
    since: str | None
    """Jobs that finished after this: "7d", "12h" or "90min" ago, a date, or a time."""
    until: str | None
    """Jobs that finished before this, written likewise."""
    rows: Sequence[str] | None
    """Coordinates that are always shown, and first; those that vary follow."""
    columns: Sequence[str] | None
    """Metrics that make the columns; by default the kind's own; ["all"]: every one."""
    statistic: Statistic | None
    """Of the samples; by default the median, with its 95 % interval in `<metric>_low` and `<metric>_high`. A mean has
    the standard deviation in `<metric>_std`."""
    pivot: str | None
    """The coordinate whose values become columns."""
    relative_to: Mapping[str, Any] | None
    """Coordinates of the rows with which all others are compared: {"precision": "fp32"}; a column `<metric>_speedup`
    has how many times faster each row is."""
    where: Mapping[str, Any] | None
    """Only the cases with these coordinates: {"precision": "bf16"}; a list of values names alternatives."""
    rename: Mapping[str, str] | None
    """Other names of columns: {"head_dim": "d_model"}."""
    sort: str | None
    """Sort by this column; "-column" sorts from its greatest value down."""
    limit: int | None
    """At most so many rows."""


class RowOptions(TypedDict, total=False):
    """The rows of a table that jobs' units reported."""

    where: Mapping[str, Any] | None
    """Only rows with these values: {"phase": "forward"}; a list of values names alternatives."""
    rename: Mapping[str, str] | None
    """Other names of columns: {"name": "kernel"}."""
    sort: str | None
    """Sort by this column; "-column" sorts from its greatest value down."""
    limit: int | None
    """At most so many rows."""
    limit_per_job: int | None
    """Of a sweep's table: at most so many rows of each job, the first in the order of `sort`."""
    unit: int | None
    """Rows of this unit only."""
    columns: Sequence[str] | None
    """As text: by default the most important ones in Markdown, LaTeX and HTML, all in JSON and CSV; ["all"]: all."""
    caption: str | None
    """As text: the table's title."""
    latex_label: str | None
    """As text: the name by which LaTeX's \\ref finds it."""


class Question(TypedDict, total=False):
    """What a comparison judges."""

    metrics: Sequence[str] | None
    """Compare and judge only these; by default all are compared, and the first is judged."""
    fail_above_percent: float | None
    """Judge also if the candidate is worse by more than this: `attrs["gate"]`."""
    expect_equal: float | None
    """Judge also if the numbers that the steps return differ by more than this, relatively."""


class PlotOptions(TypedDict, total=False):
    """What a plot shows; each is for some plots, and refused for the others."""

    metric: str | None
    """Of `chart`, `heat-map`, `distributions` and `history`: what is drawn; by default the kind's main metric."""
    x: str | None
    """Of `chart` and `heat-map`: the coordinate along x; by default the one with the most values."""
    y: str | None
    """Of `heat-map`: the coordinate of the rows."""
    group: Sequence[str] | None
    """Of `chart`: the coordinates whose values make the series; by default all others that vary."""
    where: Mapping[str, Any] | None
    """Of `chart` and `heat-map`: only the cases with these coordinates; a list of values names alternatives. Of
    `samples` and `history`, which are of one case: this one."""
    relative_to: Mapping[str, Any] | None
    """Of `chart` and `heat-map`: coordinates of the cases to which all others are related: {"precision": "fp32"}; how
    many times better they are is drawn."""


PAIRS = ("where", "relative_to", "rename")
"""Options that name values: a query has them as NAME=VALUE."""


def query_of(options: Mapping[str, Any], known: type) -> Answer:
    """Return options as query parameters. Raises TypeError for one that is not known."""
    refuse_unknown(options, known)
    return {name: pairs(value) if name in PAIRS else value for name, value in options.items()}


def preset_of(specs: Iterable[Mapping[str, Any]], kind: str, name: str) -> Answer:
    """Return the fields of a preset of these specs. Raises ClientError, which names the known ones."""
    kinds = {spec["kind"]: spec for spec in specs}
    if kind not in kinds:
        raise ClientError(f"There is no kind {kind!r}; known kinds: {', '.join(kinds)}.")
    presets = kinds[kind]["presets"]
    if name not in presets:
        known = f"its presets: {', '.join(presets)}" if presets else "it has none"
        raise ClientError(f"Kind {kind} has no preset {name!r}; {known}.")
    return dict(presets[name])


def id_of(thing: Thing) -> int:
    return int(thing["id"]) if isinstance(thing, Mapping) else operator.index(thing)


def ids_of(things: Thing | Sequence[Thing] | None) -> list[int]:
    return [] if things is None else [id_of(one) for one in listed(things)]


def listed(value: Any) -> list[Any]:
    """Return a value, or several, as a list."""
    # Not by SupportsIndex: an array of NumPy has __index__, too.
    return [value] if isinstance(value, str | Mapping) or not isinstance(value, Iterable) else list(value)


def some(value: Any) -> list[Any]:
    """Return the values of a condition. Raises InvalidArgument for an empty list: the server would take all."""
    if not (values := listed(value)):
        raise InvalidArgument("An empty list chooses nothing: leave the option out to choose all.")
    return values


def label_filter(labels: Mapping[str, str] | None) -> list[str] | None:
    return [f"{key}:{value}" for key, value in (labels or {}).items()] or None


def filter_query(filters: JobFilter) -> Answer:
    """Return the query parameters of a filter of jobs."""
    refuse_unknown(filters, JobFilter)
    sweep = filters.get("sweep")
    return {
        "state": filters.get("state"),
        "kind": filters.get("kind"),
        "label": label_filter(filters.get("labels")),
        "sweep": None if sweep is None else id_of(sweep),
        "submitted_by": filters.get("submitted_by"),
        "mine": filters.get("mine") or None,
    }


def table_query(options: TableOptions) -> Answer:
    """Return the query parameters that choose the jobs of a table, and lay it out."""
    query = query_of(options, TableOptions)
    labels = query.pop("labels", None)
    query |= {name: some(query[name]) for name in ("job", "sweep", "kind") if query.get(name) is not None}
    return {
        **query,
        "job": ids_of(query.get("job")),
        "sweep": ids_of(query.get("sweep")),
        "label": label_filter(labels),
    }


def pairs(values: Mapping[str, Any] | None) -> list[str] | None:
    """Write names with their values as queries have them, "precision=fp32"; None if there are none."""
    return [f"{name}={value_text(one)}" for name, value in (values or {}).items() for one in some(value)] or None


def refuse_unknown(arguments: Mapping[str, Any], options: type) -> None:
    """Raise TypeError for an option that there is not, as a call with an unknown argument does."""
    unknown = [name for name in arguments if name not in options.__annotations__]
    if unknown:
        raise TypeError(f"there is no option {unknown[0]!r}; there are {', '.join(options.__annotations__)}")


def comparison_query(
    baseline: Thing | Sequence[Thing] | str, candidate: Thing | Sequence[Thing] | None, question: Question | None = None
) -> Answer:
    asked: Question = question or {}
    refuse_unknown(asked, Question)

    sides: Answer
    if candidate is None:
        if isinstance(baseline, str):
            raise InvalidArgument(f"Say which job is compared with the baseline {baseline!r}.")
        jobs = ids_of(baseline)
        if len(jobs) != 1:
            raise InvalidArgument("Say which jobs are compared with these; or pass one job of kind compare.")
        sides = {"job": jobs[0]}
    elif isinstance(baseline, str):
        sides = {"baseline_name": baseline, "candidate": ids_of(candidate)}
    else:
        sides = {"baseline": ids_of(baseline), "candidate": ids_of(candidate)}
    judged: Answer = dict(asked)
    metrics = judged.pop("metrics", None)
    return {**sides, "metric": None if metrics is None else listed(metrics), **judged}
