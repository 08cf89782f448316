"""`flopwatch run SPEC.json`: one job in this very process, without a queue.

For profilers that start a program: `nsys profile flopwatch run spec.json` sees every CUDA call. All units run one after
the other in this process, so replicates are no independent samples here.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from app.layout import missing
from app.specs import KINDS
from workers.jobs import runner_for
from workers.jobs._base import parse_spec
from workers.outcome import EXIT_CODES, RunnerError, failure_code

if TYPE_CHECKING:
    from app.specs import SpecBase
    from workers.measure.measurement import Measurement


class LocalReporter:
    """A Reporter that keeps measurements, moves artifacts to a folder and shows progress on standard error."""

    def __init__(self, scratch: Path, output: Path) -> None:
        self.scratch = scratch
        self.result: dict[str, Any] = {"measurements": [], "environment": None, "validity": None, "artifacts": []}
        self._output = output

    def progress(self, done: int, total: int, message: str) -> None:
        sys.stderr.write(f"{done}/{total} {message}\n")

    def measure(self, measurement: Measurement) -> None:
        self.result["measurements"].append(measurement.to_wire())

    def artifact(self, path: Path, *, name: str, kind: str, media_type: str) -> None:
        self._output.mkdir(parents=True, exist_ok=True)
        target = self._output / name
        target.write_bytes(path.read_bytes())
        self.result["artifacts"].append({"name": name, "kind": kind, "media_type": media_type, "path": str(target)})

    def environment(self, fingerprint: Mapping[str, Any]) -> None:
        self.result["environment"] = dict(fingerprint)

    def validity(self, verdict: Mapping[str, Any]) -> None:
        self.result["validity"] = dict(verdict)


def run_here(arguments: list[str]) -> int:
    """Run the spec in a JSON file ("-": standard input); returns the exit code, 0 only if the job succeeded."""
    parser = argparse.ArgumentParser(prog="flopwatch run", description="Run one job in this process, without a queue.")
    parser.add_argument("spec", help="a JSON file with the spec; - reads standard input")
    parser.add_argument("--json", action="store_true", help="print everything as JSON instead of a table")
    parser.add_argument("--output", type=Path, default=Path(), help="folder for artifacts (default: here)")
    options = parser.parse_args(arguments)
    try:
        spec = _read(options.spec)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"flopwatch run: {options.spec}: {_explain(error)}\n")
        return 2
    with tempfile.TemporaryDirectory(prefix="flopwatch-") as scratch:
        reporter = LocalReporter(Path(scratch), options.output)
        try:
            runner = runner_for(spec.kind)
            for unit in runner.plan(spec):
                runner.run(spec, unit, reporter)
        except RunnerError as error:
            sys.stderr.write(f"flopwatch run: {error.code}: {error}\n")
            return EXIT_CODES[error.code]
        except Exception as error:  # noqa: BLE001 - a runner and the user's model in it may raise anything
            traceback.print_exc()
            return EXIT_CODES[failure_code(error)]
    _show(spec, reporter.result, as_json=options.json)
    return 0


def _read(path: str) -> SpecBase:
    """The spec in a file, or on standard input. Raises OSError, ValueError."""
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


def _show(spec: SpecBase, result: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        json.dump(result, sys.stdout, indent=2)
        sys.stdout.write("\n")
        return
    # Here, since pandas takes half a second to import, which the job is not to wait for.
    from app.store.results import local_table, render

    rows = [{**row["case"], **row} for row in result["measurements"]]
    coordinates = list(dict.fromkeys(name for row in result["measurements"] for name in row["case"]))
    lines = missing(rows, coordinates)
    sys.stdout.write(render(local_table(spec, result["measurements"]), "markdown"))
    sys.stdout.write("".join(f"{line}\n" for line in ("", *lines)) if lines else "")
    if result["validity"] is not None:
        sys.stdout.write(f"\nvalidity: {result['validity']['verdict']}\n")
