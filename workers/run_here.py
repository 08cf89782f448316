"""`flopwatch run SPEC.json`: runs one job in this process, without a queue.

For profilers that start a program: `nsys profile flopwatch run spec.json` sees every CUDA call. All units run one after
the other in this process, so replicates are not independent samples here; standard error and the table say so. A unit
that would run under a command of its own (`Unit.wrap`) runs without it, and standard error says that too: the user may
have started this process under that very command.
"""

import argparse
import base64
import functools
import gc
import itertools
import json
import os
import posix
import shutil
import sys
import tempfile
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, contextmanager, suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from app.settings import Settings
from app.specs import KINDS, SpecBase
from flopwatch.text.markdown_tables import shortened
from flopwatch.text.times import duration
from flopwatch.text.validity import notes
from workers import messages, uploaded
from workers.agent.spool import Spool
from workers.agent.verdicts import TABLE
from workers.jobs import runner_for
from workers.jobs._base import Adaptive, Unit, parse_spec
from workers.measure.host_memory import trim_free_memory
from workers.outcome import (
    EXIT_CODES,
    WRONG,
    RunnerError,
    Succeeded,
    Unsupported,
    ending_forks,
    failure_code,
    leave_fork,
)
from workers.reporter import Reporter
from workers.torch_host import reset_process
from workers.working_directory import enter_empty

TABLE_ROWS = 10
"""Number of rows shown of a table that a unit reports."""
ENDS = ("_exit", "execv", "execve")
"""Functions of `os` that may end this process with exit code 0; `os` itself calls them for its others, such as
`execlp`."""


class LocalResults:
    """Keeps the results of a job as an agent does, moves artifacts to a folder, and prints progress."""

    def __init__(self, output: Path) -> None:
        self.spool = Spool()
        self.artifacts: list[dict[str, Any]] = []
        self._output = output
        self._process = os.getpid()

    def take(self, message: messages.Message) -> None:
        """Process one message of a unit, with the agent's checks."""
        leave_fork(self._process)
        match messages.parse(messages.to_line(message)):
            case messages.Progress() as progress:
                sys.stderr.write(f"{progress.done}/{progress.total} {progress.message}\n")
            case messages.CellFinished() as cell:
                place = f"{cell.done}/{cell.total}"
                sys.stderr.write(f"{place} {cell.title}: {cell.headline} ({duration(cell.seconds)})\n")
            case messages.ArtifactMade() as artifact:
                self._move(artifact)
            case messages.Measured() | messages.TableMade() | messages.Environment() | messages.Validity() as result:
                self.spool.add(result)
            case _:
                pass  # no agent can resume the unit if this process dies, so its position is of no use

    def _move(self, artifact: messages.ArtifactMade) -> None:
        """Move a file to its name; if there is something of that name already, with a number before the suffixes:
        "trace-2.json.gz"."""
        public_name = self.spool.name_artifact(artifact.name)
        self._output.mkdir(parents=True, exist_ok=True)
        stem, dot, suffixes = public_name.partition(".")
        names = (f"{stem}{f'-{number}' if number > 1 else ''}{dot}{suffixes}" for number in itertools.count(1))
        for target in (self._output / name for name in names):
            with suppress(FileExistsError):
                target.open("xb").close()  # takes the name, also from runs that write into the folder at the same time
                break
        shutil.move(artifact.path, target)
        file = {"name": public_name, "kind": artifact.kind, "media_type": artifact.media_type, "path": str(target)}
        self.artifacts.append(file)

    def result(self) -> dict[str, Any]:
        spool = self.spool
        sides = {unit.unit_index: unit.side for unit in spool.units}
        return {
            "measurements": [
                {
                    **vars(record),
                    "side": sides[record.unit_index],
                    "samples": None if record.samples is None else base64.b64encode(record.samples).decode(),
                }
                for record in spool.measurements
            ],
            "tables": [{**vars(table), "rows": json.loads(zlib.decompress(table.rows))} for table in spool.tables],
            "units": [vars(unit) for unit in spool.units],
            "environment": spool.environment,
            "validity": spool.validity,
            "artifacts": self.artifacts,
        }


@contextmanager
def _nobody_ends_it() -> Iterator[None]:
    """Make a failure of what would end this process before the job's work is done, maybe with exit code 0, or replace
    it by another program. Forks of it end as they like."""
    process, leave = os.getpid(), os._exit

    def guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def end(*arguments: Any, **options: Any) -> Any:
            if os.getpid() != process:
                return function(*arguments, **options)
            traceback.print_stack()
            sys.stderr.write(f"flopwatch run: crashed: the code called os.{name} before the job's work was done\n")
            sys.stderr.flush()
            return leave(EXIT_CODES["crashed"])

        return end

    before = [(module, name, getattr(module, name)) for module in (os, posix) for name in ENDS]
    for module, name, function in before:
        setattr(module, name, guarded(name, function))
    try:
        yield
    finally:
        for module, name, function in before:
            setattr(module, name, function)


def run_here(arguments: list[str]) -> int:
    """Run the spec in a JSON file ("-": standard input); returns the exit code, 0 only if the job succeeded and
    no result is wrong."""
    parser = argparse.ArgumentParser(prog="flopwatch run", description="Run one job in this process, without a queue.")
    parser.add_argument("spec", help="a JSON file with the spec; - reads standard input")
    parser.add_argument("--json", action="store_true", help="print everything as JSON instead of a table")
    parser.add_argument("--output", type=Path, default=Path(), help="folder for artifacts (default: here)")
    parser.add_argument("--code", type=Path, action="append", default=[], help="a file that the spec's `code` names")
    options = parser.parse_args(arguments)
    try:
        spec = _read(options.spec).drawn()
    except (OSError, ValueError) as error:
        sys.stderr.write(f"flopwatch run: {options.spec}: {_explain(error)}\n")
        return 2
    if idle := spec.without_effect():
        sys.stderr.write(f"flopwatch run: without effect here: {', '.join(idle)}\n")
    code, results = [file.read_bytes() for file in options.code], LocalResults(options.output.absolute())
    with tempfile.TemporaryDirectory(prefix="flopwatch-") as folder, chdir(folder):
        try:
            if code:
                os.environ.update(uploaded.write(Path(folder) / "code", code))
            with ending_forks(), _nobody_ends_it(), _prints_to_stderr():
                _run_units(spec, results, Path(folder))
        except RunnerError as error:
            sys.stderr.write(f"flopwatch run: {error.code}: {error}\n")
            return EXIT_CODES[error.code]
        except BaseException as error:
            why = failure_code(error)
            if isinstance(error, KeyboardInterrupt):  # mostly the terminal's: then shells want to see the signal
                sys.stderr.write(f"flopwatch run: {why}: {uploaded.describe(error)}\n")
                raise
            traceback.print_exception(error)
            sys.stderr.write(f"flopwatch run: {why}: {uploaded.describe(error)}\n")
            return EXIT_CODES[why]
    result = results.result()
    _show(spec, result, as_json=options.json)
    if (failure := results.spool.failure()) is not None:
        sys.stderr.write(f"flopwatch run: failed: {failure}\n")
        return EXIT_CODES["failed"]
    return WRONG if (result["validity"] or {}).get("verdict") == "wrong" else 0


def _run_units(spec: SpecBase, results: LocalResults, folder: Path) -> None:
    runner, ceilings = runner_for(spec.kind), Settings.from_environment().ceilings_dir
    if isinstance(runner, Adaptive):
        raise Unsupported(f"kind {spec.kind} measures in fresh processes, which follow from each other: submit it")
    sys.argv = sys.argv[:1]  # the user's code may parse it
    units = runner.plan(spec)
    for index, unit in enumerate(units):
        if index == 1:
            _warn_of_one_process(units)
        if index:
            # The next unit finds this process as the first one did.
            gc.unfreeze()  # measuring has hidden what lived then, such as the unit's model, from the collector
            reset_process()
            trim_free_memory()
        _warn_of_wrap(unit)
        results.spool.begin_unit(index, unit.title, unit.side)
        scratch = folder / str(index)
        scratch.mkdir()
        enter_empty(scratch)
        runner.run(spec, unit, Reporter(results.take, scratch=scratch, ceilings=ceilings))
        results.spool.end_unit(Succeeded())


@contextmanager
def _prints_to_stderr() -> Iterator[None]:
    """Send the output of models and libraries to standard error meanwhile: standard output is for the result, also if
    the user's code puts something else in its place, as to silence prints."""
    before = sys.stdout, sys.stderr
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        with suppress(AttributeError, ValueError):  # the code may have left None there, or closed it
            sys.stdout.flush()
        sys.stdout, sys.stderr = before
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)


def _warn_of_one_process(units: Sequence[Unit]) -> None:
    # A unit under a wrapper is exec'd because of the wrapper, and not to be independent of the others.
    if sum(unit.start == "exec" and not unit.wrap for unit in units) < 2:
        return
    compares = any(unit.side for unit in units)
    sys.stderr.write(
        f"flopwatch run: all replicates{' of both sides' if compares else ''} run in this process, so they are no "
        "independent samples: `flopwatch submit` gives each a process of its own"
        f"{', and compares the sides' if compares else ''}\n"
    )


def _warn_of_wrap(unit: Unit) -> None:
    if unit.wrap:
        sys.stderr.write(
            f"{unit.title}: runs without {unit.wrap[0]!r}, and what that would have written is not collected: "
            "start flopwatch run under it, or submit the job\n"
        )


def _read(path: str) -> SpecBase:
    """Read the spec from a file or from standard input. Raises OSError, ValueError."""
    sent = json.loads(sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8"))
    if isinstance(sent, dict) and "spec" in sent and "kind" not in sent:
        raise ValueError("this is the body of a job: `run` wants only what stands under its key spec")
    return parse_spec(sent)


def _explain(error: OSError | ValueError) -> str:
    if isinstance(error, ValidationError):
        if error.errors()[0]["type"] == "union_tag_not_found":
            return f"kind is missing; known kinds: {', '.join(sorted(KINDS))}"
        return "; ".join(f"{'/'.join(map(str, item['loc'][1:]))}: {item['msg']}" for item in error.errors())
    return str(error)


def _answers(spec: SpecBase, tables: list[dict[str, Any]]) -> list[str]:
    """Return the tables that answer the kind's question, in Markdown; one column of text is written as sentences."""
    from app.results import merged, render

    parts = []
    for name in spec.answers:
        for table in (table for table in tables if table["name"] == name):
            if len(table["columns"]) == 1:
                parts.append("".join(f"{row[0]}\n" for row in table["rows"]) + "\n")
            else:
                whole = merged([(table["unit_index"], table["columns"], table["rows"])], spec.columns_first(name))
                parts.append(f"{render(whole, 'markdown')}\n")
    return parts


def _show(spec: SpecBase, result: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        json.dump(result, sys.stdout, indent=2)
        sys.stdout.write("\n")
        return
    # Imported here, since pandas takes half a second to import, and the job must not wait for it.
    from app.results import local_table, merged, render
    from app.results.agreement import VALUES

    sheet = local_table(spec, result["measurements"], result["validity"])
    lines = sheet.missing or []
    parts = [*_answers(spec, result["tables"]), render(sheet, "markdown")]
    parts += ["".join(f"{line}\n" for line in ("", *lines))] if lines else []
    # All checks of all cases, and what steps returned for comparisons, are in the JSON; people read the table of
    # results, and the verdict below.
    hidden = (TABLE, VALUES, *spec.answers)
    names = dict.fromkeys(table["name"] for table in result["tables"] if table["name"] not in hidden)
    for name in sorted(names, key=spec.table_place):
        reports = [table for table in result["tables"] if table["name"] == name]
        parts_of_units = [(part["unit_index"], part["columns"], part["rows"]) for part in reports]
        whole = merged(parts_of_units, spec.columns_first(name))
        cut = f", the first {TABLE_ROWS} of {len(whole.rows)} rows" if len(whole.rows) > TABLE_ROWS else ""
        parts.append(f"\n{name}{cut}:\n\n{render(whole.part(0, TABLE_ROWS), 'markdown')}")
    text = "".join(parts)
    sys.stdout.write(shortened(text) if sys.stdout.isatty() else text)
    if result["artifacts"]:
        sys.stdout.write("".join(f"{line}\n" for line in ("\nfiles:", *(file["path"] for file in result["artifacts"]))))
    if result["validity"] is not None:
        told = [*notes(result["validity"]), f"validity: {result['validity']['verdict']}"]
        sys.stdout.write("".join(f"{line}\n" for line in ("", *told)))
