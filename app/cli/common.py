"""Shared parts of the commands: the connection to a server, options, and the data folder."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import enum
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, ParamSpec, TypeVar, cast, get_args

import typer
from typer.core import TyperCommand, TyperGroup

from app.cli import completing
from app.cli.terminal import echo, fail
from app.presets import ATTENTION_PRESETS
from flopwatch.table_options import Statistic

if TYPE_CHECKING:
    from flopwatch import Flopwatch

P = ParamSpec("P")
R = TypeVar("R")


BRIEF = f"{__name__}.brief"
"""Key of a context's `meta`: True if the command line asks for `--format brief`."""
UsageError: Any = typer.BadParameter.__base__
"""Every mistake on a command line; typer gives it no name of its own in all versions."""
MEANT = {"list": "jobs", "ls": "jobs", "status": "show", "wait": "logs --follow", "script": "run-script"}
"""Commands under names that people try first."""


class Commands(TyperGroup):
    """The commands; for a word that is none it names the one that was meant."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if self.get_command(ctx, args[0]) is not None:
            return super().resolve_command(ctx, args)
        from app.specs import KINDS

        commands = {name: name for name in self.list_commands(ctx)}
        words = {kind: f"submit {kind}" for kind in KINDS} | commands | MEANT
        near = difflib.get_close_matches(args[0], words, n=1, cutoff=0.75)
        cure = f": write flopwatch {words[near[0]]}" if near else ""
        return ctx.fail(f"No such command {args[0]!r}{cure}")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        pairs = zip(["", *args], args, strict=False)
        ctx.meta[BRIEF] = any(f"{one}={other}".endswith("--format=brief") for one, other in pairs)
        with refusing(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with refusing(ctx):
            return super().invoke(ctx)


@contextlib.contextmanager
def refusing(ctx: Any) -> Iterator[None]:
    """Give mistakes on the command line the form of other errors, also with `--format brief`."""
    try:
        yield
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # a group without a command prints its help
            raise
        said = error.format_message().replace(": Value error, ", ": ")  # pydantic's words before those of typer
        metavar = getattr(getattr(error, "param", None), "metavar", None)
        if metavar == "SECONDS" and "a valid" in said:
            said = f"{said.rstrip('.')}: write the number of seconds alone."
        if metavar == "KIND|SPEC.json" and "Missing" in said:
            said = f"{said.rstrip('.')}: name the kind of job, such as benchmark."
        if ctx.meta[BRIEF]:
            from app.cli.brief import answer, of_error

            answer(of_error(said, 2))
        fail(f"{said}\n{(error.ctx or ctx).get_usage()}", 2)


class FieldsCommand(TyperCommand):
    """A command that, if it takes fields as key=value, names the field where one is written as an option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if all(parameter.name != "fields" for parameter in self.params):
            return super().parse_args(ctx, args)
        options = {name for parameter in self.get_params(ctx) for name in (*parameter.opts, *parameter.secondary_opts)}
        for place, word in enumerate(args):
            option, equals, value = word.partition("=")
            if word == "--":
                break
            if not option.startswith("--") or option in options:
                continue
            from app.cli.specs import paths_of

            if paths := paths_of(option[2:].replace("-", "_"), args):
                following = value if equals else next(iter(args[place + 1 :]), "VALUE")
                written = " or ".join(f"{path}={following}" for path in paths)
                raise typer.BadParameter(f"{option} is a field of the job, and no option: write {written}")
        return super().parse_args(ctx, args)


def of_jobs(metavar: str, text: str) -> Any:
    """Return an argument that takes ids of jobs; the shell completes them."""
    return typer.Argument(metavar=metavar, help=text, autocompletion=completing.job_ids)


def of_fields(text: str, metavar: str = "KEY=VALUE…") -> Any:
    """Return an argument that takes fields of a spec; the shell completes their names and values."""
    return typer.Argument(metavar=metavar, help=text, autocompletion=completing.fields)


def of_sweep(text: str) -> Any:
    """Return the option `--sweep` that names one sweep; the shell completes its id."""
    return typer.Option("--sweep", metavar="ID", help=text, autocompletion=completing.sweep_ids)


JobId = Annotated[int, of_jobs("ID", "The job's id.")]
Fields = Annotated[list[str] | None, of_fields("The spec's fields; model.size=tiny nests.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the server's answer.")]
Written = enum.StrEnum("Written", {"text": "text", "brief": "brief"})
"""How commands write that print no table."""
TEXT = Written("text")
AsText = Annotated[
    Written, typer.Option("--format", help="brief: at most 60 lines with stable keys, for programs; JSON with --json.")
]
BriefJson = Annotated[bool, typer.Option("--json", help="Print the document of --format brief as JSON.")]
MetricOption = Annotated[
    list[str] | None,
    typer.Option(
        "--metric",
        metavar="NAME",
        help="Judge this metric, such as step_ms; may be repeated. By default the first one.",
    ),
]
TimeLimit = Annotated[
    str | None, typer.Option(metavar="SECONDS|none", help="Time limit of the job (default: the server's).")
]
WaitAtMost = Annotated[
    float | None,
    typer.Option(
        "--wait-at-most",
        min=0,
        metavar="SECONDS",
        help="Wait, but no longer than this; exit code 75 if it keeps running.",
    ),
]
TableStatistic = enum.StrEnum("TableStatistic", {name: name for name in get_args(Statistic)})  # type: ignore[misc]
ExpectEqual = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=1,
        metavar="TOLERANCE",
        help="Exit with 8 if the numbers that the steps return (the loss) differ by more than this, such as 1e-4.",
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Submit nothing; print the number of jobs and an estimated duration.")
]
GOES_ON = 75
"""Exit code if a job was not done in time (EX_TEMPFAIL of sysexits)."""
Label = Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="A label; may be repeated.")]
Kind = Annotated[str | None, typer.Option(help="Only jobs of this kind.", autocompletion=completing.kinds)]
Preset = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Start from a preset, such as "
        f"{', '.join(ATTENTION_PRESETS)} of attention, or communication_accounting of estimate; "
        "`flopwatch specs KIND` lists them.",
        autocompletion=completing.presets,
    ),
]
Code = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER", help="Folder uploaded with the file so that its imports work (files tracked by git)."
    ),
]
Url = Annotated[str | None, typer.Option(metavar="URL", help="The server's address (FLOPWATCH_URL).")]
DataDir = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="The data folder, where the server stores its address (FLOPWATCH_DATA_DIR)."),
]


@dataclass(frozen=True)
class OwnCodeOptions:
    """Options that name code of the user's own; those of `flopwatch.queries.OwnCodeOptions`."""

    implementation: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:FUNCTION",
            help="Your attention function or kernel: measured next to the built-in ones, or used in the model.",
        ),
    ] = None
    model: Annotated[
        str | None, typer.Option(metavar="FILE.py:CLASS", help="A model of your own, for training kinds.")
    ] = None
    step: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:FUNCTION",
            help="A training step of your own: FUNCTION(device, **arguments) returns a function that does one step.",
        ),
    ] = None
    code: Code = None


@dataclass(frozen=True)
class Waiting:
    """Options of commands that may wait for what they submit, and print its result."""

    wait: Annotated[bool, typer.Option("--wait", help="Wait until it is done; exit code 0 only when it succeeded.")] = (
        False
    )
    wait_at_most: WaitAtMost = None
    statistic: Annotated[
        TableStatistic | None,
        typer.Option(help="Of the samples, in the table of --wait; by default the median."),
    ] = None
    as_json: AsJson = False

    def __post_init__(self) -> None:
        if self.statistic is not None and (self.as_json or not self.waits):
            why = "is of the table that --wait prints, without --json"
            raise typer.BadParameter(why, param_hint="--statistic")

    @property
    def waits(self) -> bool:
        return self.wait or self.wait_at_most is not None


WRONG = 8
"""Exit code of commands whose jobs succeeded, if a result is not that of the reference."""

before_command: ContextVar[Mapping[str, Any]] = ContextVar("before_command", default=MappingProxyType({}))
"""The options --url and --data-dir that were given before the command."""
cli = typer.Typer(
    cls=Commands,
    help="A profiling job queue for transformer training.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from flopwatch.version import own_version

        echo(f"flopwatch {own_version()}")
        raise typer.Exit


@cli.callback()
def options(
    *,
    url: Url = None,
    data_dir: DataDir = None,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version, and exit.")
    ] = False,
) -> None:
    """A profiling job queue for transformer training."""
    before_command.set({"url": url, "data_dir": data_dir})


def with_groups(command: Callable[P, R]) -> Callable[P, R]:
    """Let a parameter that is a dataclass stand for one option for each of its fields."""
    signature = inspect.signature(command, eval_str=True, locals={"Flopwatch": object})
    groups: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        if dataclasses.is_dataclass(parameter.annotation):
            groups[name] = group = cast("type[Any]", parameter.annotation)
            fields = inspect.signature(group, eval_str=True).parameters.values()
            parameters += [field.replace(kind=inspect.Parameter.KEYWORD_ONLY) for field in fields]
        else:
            parameters.append(parameter)

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> R:
        made = {
            name: group(**{field.name: kwargs.pop(field.name) for field in dataclasses.fields(group)})
            for name, group in groups.items()
        }
        return command(*args, **kwargs, **made)

    _show(wrapped, parameters)
    return wrapped


def _show(command: Callable[..., Any], parameters: Sequence[inspect.Parameter]) -> None:
    """Let typer, which reads the parameters off the function, see these."""
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}


def with_server(command: Callable[Concatenate[Flopwatch, P], R]) -> Callable[P, R]:
    """Give the command a connection to the server, and the options --url and --data-dir, which choose the server.

    A problem of the server becomes a message and exit code 1, a mistake that the client refuses by itself 2, and what
    was not done in time GOES_ON.
    """

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        from flopwatch import ClientError, Flopwatch, InvalidArgument, WaitTimeout

        url, data_dir = _given("url", kwargs.pop("url", None)), _given("data_dir", kwargs.pop("data_dir", None))
        warn_of_unknown_settings()
        try:
            with Flopwatch(url, data_dir=data_dir) as server:
                return command(server, *args, **kwargs)
        except ClientError as error:
            outcome = "running" if isinstance(error, WaitTimeout) else "error"
            exit_code = 2 if isinstance(error, InvalidArgument) else GOES_ON if outcome == "running" else 1
            if kwargs.get("output_format") == "brief":
                from app.cli.brief import answer, of_error

                answer(of_error(str(error), exit_code, outcome))
            fail(str(error), exit_code)

    command = with_groups(command)
    _, *parameters = inspect.signature(command).parameters.values()
    for name, annotation in (("url", Url), ("data_dir", DataDir)):
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
    _show(wrapped, parameters)
    return wrapped


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Make a command of a function; one whose first parameter is `server` gets a connection to it."""
    takes_server = next(iter(inspect.signature(function).parameters), None) == "server"
    return cli.command(cls=FieldsCommand)((with_server if takes_server else with_groups)(function))


def use_data_dir(data_dir: Path | None) -> None:
    """Let this process and its children use this data folder, if one is given to the command or before it."""
    if (folder := _given("data_dir", data_dir)) is not None:
        os.environ["FLOPWATCH_DATA_DIR"] = str(folder.absolute())


def warn_of_unknown_settings() -> None:
    """Print a warning for each variable that looks like a setting but is not one."""
    if not any(name.upper().startswith("FLOPWATCH_") for name in os.environ):
        return  # most commands need no settings, whose import takes longer than they do
    from app.settings import unknown_variables

    for warning in unknown_variables(os.environ).values():
        echo(f"warning: {warning}", err=True)


def _given(name: str, value: Any) -> Any:
    """Return an option's value as given after the command, or else before it: `flopwatch --url … jobs`."""
    return before_command.get().get(name) if value is None else value


def check_kind(server: Flopwatch, kind: str | None) -> None:
    """Raise ClientError if no job has this kind, and none can have it. Jobs of a kind that this server's version does
    not know may be stored, so the server takes any kind as a filter."""
    if kind is None:
        return
    from flopwatch import ClientError

    known = [spec["kind"] for spec in server.specs()]
    if kind not in known and not server.list_jobs(kind=kind, limit=1):
        raise ClientError(f"--kind {kind}: no job is of this kind; known kinds: {', '.join(known)}")
