"""Runs a training step under Nsight Systems or Nsight Compute, and reads their reports."""

from __future__ import annotations

from pathlib import Path

from app.specs.profile import ProfileSpec
from workers.jobs._base import Reporter, Unit


def units(spec: ProfileSpec, title: str) -> list[Unit]:
    """Return one unit for each outside profiler that the spec asks for."""
    return []


def tool_of(unit: Unit) -> str | None:
    """Return the outside profiler that a unit runs under: "nsys" or "ncu"; None if it runs under none."""
    tool: str | None = unit.params.get("tool")
    return tool


def run(spec: ProfileSpec, unit: Unit, report: Reporter) -> None:
    """Run the steps that the outside profiler watches. Their times are no measurements."""
    raise NotImplementedError


def collect(spec: ProfileSpec, unit: Unit, scratch: Path, report: Reporter) -> None:
    """Report the outside profiler's report as an artifact, and its figures as tables and measurements."""
    raise NotImplementedError
