"""`diagnosis`: what a step waits for, and what helps: each cause measured, each change tried."""

import secrets
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from app.specs._base import Name, Named, Resources, Seed, SpecBase, field_error
from app.specs._identity import Case, Scalar
from app.specs._union import KINDS, PlainSpec
from app.specs.compare import MAX_SEED

DIAGNOSED = ("benchmark", "ddp")
"""The kinds of steps that are diagnosed."""
WORK = ("attention", "kernels", "precision")
"""Causes that are operators of the step's own lines, for which nothing waits: no cure takes their time away as a whole,
but that of loops over small ones."""
SMALL = "small operators"
"""The note on a loop whose operators take hardly longer than it takes to call them: no work that a step must do."""
RARE = "not in every step"
"""The note on a line that the traced step did not run."""
OTHERS_WAIT = "(the others wait for it)"
"""In the place of a cause that a late rank has, by how much longer than the others'."""
REMOVABLE = (SMALL, RARE, OTHERS_WAIT)
"""The notes on work that a cure may take away as a whole."""
WRITTEN = "written out"
"""The note on attention in several operators."""


class DiagnosisSpec(SpecBase):
    """Find what a step waits for, and measure the changes that may help, in turns with the step as it is."""

    model_config = ConfigDict(defer_build=True)

    kind: Literal["diagnosis"] = "diagnosis"
    step: PlainSpec
    """The step, as a spec of kind `benchmark` or, of several ranks, `ddp`: our model's, or one of your own
    (`step_code`)."""
    budget_s: int = Field(default=300, ge=10, le=86_400)
    """About how long it may take in seconds, by how long processes took so far. Changes that do not fit are listed as
    `not_tried`; a process that takes longer is not ended."""
    changes: list[Annotated[Name, Named("change")]] | None = Field(default=None, min_length=1, max_length=50)
    """Changes to try; null: those for which the profile has found a cause."""
    seed: Seed | None = None
    """Seed from which the order of the turns is drawn; null: drawn itself, at submission, and kept here."""

    holds_specs: ClassVar[bool] = True
    held_kinds: ClassVar[tuple[str, ...] | None] = DIAGNOSED
    unmeasured: ClassVar[frozenset[str]] = SpecBase.unmeasured | {"budget_s", "changes"}
    answers: ClassVar[tuple[str, ...]] = ("answer",)
    first_tables: ClassVar[tuple[str, ...]] = ("answer", "causes", "changes", "gaps", "turns")
    table_rows: ClassVar[tuple[str, ...]] = ("model", "context_length")
    metric_notes: ClassVar[Mapping[frozenset[str], str]] = {
        frozenset(
            {"step_ms"}
        ): "step_ms is of the one process that was profiled, before it was; answer_step_ms is the answer's step, of "
        "the processes that alternate, each by its mean."
    }
    process_metrics: ClassVar[frozenset[str]] = frozenset({"answer_step_ms"})
    table_columns: ClassVar[tuple[str, ...]] = ("answer_step_ms", "together_ms", "host_us", "gpu_busy_percent")

    @model_validator(mode="after")
    def _step_can_be_diagnosed(self) -> Self:
        if self.step.kind not in DIAGNOSED:
            raise field_error("step/kind", f"must be {' or '.join(DIAGNOSED)}: no other kind's steps are diagnosed")
        if getattr(self.step, "replicates", 1) != 1:
            raise field_error("step/replicates", "leave it out: the diagnosis plans its own processes")
        changes = self.changes or []
        if twice := [name for name in changes if changes.count(name) > 1]:
            raise field_error("changes", f"{twice[0]} is there twice")
        return self

    @classmethod
    def example(cls) -> Self:
        return cls(step=KINDS["benchmark"].model_validate({"model": {"size": "tiny"}, "context_length": 64}))

    def drawn(self) -> Self:
        return self if self.seed is not None else self.model_copy(update={"seed": secrets.randbelow(MAX_SEED)})

    def resources(self) -> Resources:
        return self.step.resources()

    def case(self, cell: Any = None) -> Case:
        """Return the case of the step as it is: that of the spec inside, as a diagnosis."""
        inner = self.step.case(cell)
        return Case(self.kind, inner.identity, inner.labels, inner.added)

    def without_effect(self) -> list[str]:
        return [f"step.{field}" for field in self.step.without_effect()]

    def summary(self) -> dict[str, Scalar]:
        return self.step.summary()

    def overview(self) -> dict[str, Scalar]:
        return self.step.overview()
