"""Runs `diagnosis`: looks at a step, tries changes of it, and says what helps. The stages are in planning.py."""

from dataclasses import replace

from app.specs.diagnosis import DiagnosisSpec
from workers.jobs._base import SoFar, Unit
from workers.jobs.diagnosis import planning
from workers.outcome import Failed
from workers.reporter import Reporter


class DiagnosisRunner:
    kind = "diagnosis"

    def plan(self, spec: DiagnosisSpec) -> list[Unit]:
        """Plan the look at the step; what follows depends on what it shows."""
        return [Unit("where the time goes", {"stage": "look"})]

    def further(self, spec: DiagnosisSpec, so_far: SoFar) -> list[Unit]:
        return planning.further(spec, so_far)

    def resume(self, spec: DiagnosisSpec, unit: Unit, position: int, failure: Failed) -> Unit | None:
        """Return the unit that says that a change has crashed the step; None if the step as it is has crashed."""
        if not unit.params.get("changes"):
            return None
        detail = failure.detail
        if "SIGALRM" in detail:
            detail = (
                f"{planning.TOO_LONG} {unit.params['limit_s']:.0f} s and was ended: a larger budget_s gives it longer"
            )
        return replace(unit, params={**unit.params, "crashed": detail}, start="fork")

    def run(self, spec: DiagnosisSpec, unit: Unit, report: Reporter) -> None:
        from workers.jobs.diagnosis import conclude, look, ranks, turn

        match unit.params["stage"]:
            case "look":
                (ranks if spec.step.kind == "ddp" else look).run(spec, unit, report)
            case "conclude":
                conclude.run(spec, unit, report)
            case _:
                turn.run(spec, unit, report)


RUNNER = DiagnosisRunner()
