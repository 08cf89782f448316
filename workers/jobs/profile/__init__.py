"""Runs `profile`: a few steps under torch's profiler, and again under each Nsight tool that the spec asks for."""

from app.specs.profile import ProfileSpec
from workers.jobs._base import Unit
from workers.jobs.profile import nsight
from workers.reporter import Reporter


class ProfileRunner:
    kind = "profile"

    def plan(self, spec: ProfileSpec) -> list[Unit]:
        """Plan a unit for torch's profiler, and one for each Nsight tool: CUPTI takes one subscriber."""
        title = spec.title(f"context {spec.context_length}")
        return [Unit(title=title), *nsight.units(spec, title)]

    def run(self, spec: ProfileSpec, unit: Unit, report: Reporter) -> None:
        """Profile one unit and report it. Running out of memory is a result. Raises InvalidEnvironment: another
        profiler uses CUPTI, so that torch's sees no kernels."""
        from workers.jobs.profile import torch_profiler

        tool = torch_profiler if nsight.tool_of(unit) is None else nsight
        tool.run(spec, unit, report)

    collect = staticmethod(nsight.collect)
    wrapper_error = staticmethod(nsight.error_of)


RUNNER = ProfileRunner()
