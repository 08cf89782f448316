"""Runs `profile`: a few steps under torch's profiler, and again under the outside profilers that the spec asks for."""

from __future__ import annotations

from pathlib import Path

from app.specs.profile import ProfileSpec
from workers.jobs import _outside_profilers
from workers.jobs._base import Reporter, Unit


class ProfileRunner:
    """The runner of kind `profile`."""

    kind = "profile"

    def plan(self, spec: ProfileSpec) -> list[Unit]:
        """Plan a unit for torch's profiler, and one for each outside profiler: CUPTI takes one subscriber."""
        title = f"{spec.model.label()}, context {spec.context_length}"
        return [Unit(title=title), *_outside_profilers.units(spec, title)]

    def run(self, spec: ProfileSpec, unit: Unit, report: Reporter) -> None:
        """Profile one unit and report it."""
        if _outside_profilers.tool_of(unit) is not None:
            _outside_profilers.run(spec, unit, report)
            return
        raise NotImplementedError

    def collect(self, spec: ProfileSpec, unit: Unit, scratch: Path, report: Reporter) -> None:
        """Report what an outside profiler has written."""
        _outside_profilers.collect(spec, unit, scratch, report)

    def wrapper_error(
        self, spec: ProfileSpec, unit: Unit, scratch: Path, output: str, *, succeeded: bool
    ) -> str | None:
        """Return the error that an outside profiler told, in its own words."""
        return _outside_profilers.error_of(spec, unit, scratch, output, succeeded=succeeded)


RUNNER = ProfileRunner()
