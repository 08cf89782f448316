"""Runs `memory`: the allocations of a model's steps, by phase and category, and the allocator's snapshots."""

from app.specs.memory import MemorySpec
from workers.jobs._base import Unit
from workers.jobs._training import building
from workers.reporter import Reporter


class MemoryRunner:
    kind = "memory"

    def plan(self, spec: MemorySpec) -> list[Unit]:
        return [Unit(title=spec.title(f"context {spec.context_length}", spec.mode))]

    def run(self, spec: MemorySpec, unit: Unit, report: Reporter) -> None:
        """Record the steps and report their allocations. Running out of memory is a result."""
        from workers.jobs.memory.recording import record
        from workers.jobs.memory.results import results
        from workers.jobs.memory.tables import report_tables
        from workers.measure import environment
        from workers.measure.validity import verdict

        device, build_model = building.prepare(spec)
        report.environment(environment.fingerprint(device))
        with building.known_errors():
            session = record(spec, device, build_model, report)
        values, checks = results(session)
        case = spec.case()
        report.validity(verdict(checks), case.key, unit.title)
        values.report(case, environment.device_key(device), report)
        report_tables(session, report)


RUNNER = MemoryRunner()
