"""`compare`: two specs of one kind, measured in turns by fresh processes on the same device."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from app.specs._base import Resources, SpecBase, field_error
from app.specs._identity import Case, Scalar
from app.specs._union import PlainSpec

SIDES = ("baseline", "candidate")


def _tiny(precision: str) -> dict[str, Any]:
    return {"kind": "benchmark", "model": {"size": "tiny"}, "context_length": 64, "precision": precision}


class CompareSpec(SpecBase):
    """Measure a baseline and a candidate alternately: A B A B …, each in a fresh process."""

    model_config = ConfigDict(defer_build=True)

    kind: Literal["compare"] = "compare"
    baseline: PlainSpec = Field(default_factory=lambda: _validated(_tiny("fp32")))
    """The spec to compare with; of any kind but this one."""
    candidate: PlainSpec = Field(default_factory=lambda: _validated(_tiny("bf16")))
    """The spec that is compared: of the baseline's kind and for the same devices."""
    replicates: int = Field(default=8, ge=1, le=100)
    """Fresh processes of each side; under 4, no difference can be told from chance."""

    holds_specs: ClassVar[bool] = True
    unmeasured: ClassVar[frozenset[str]] = SpecBase.unmeasured | {"replicates"}
    table_rows: ClassVar[tuple[str, ...]] = ("side",)

    @model_validator(mode="after")
    def _sides_go_together(self) -> Self:
        for side in SIDES:
            spec = getattr(self, side)
            if getattr(spec, "replicates", 1) != 1:
                raise field_error(f"{side}/replicates", "leave it out: the comparison's own replicates say how many")
        if self.baseline.kind != self.candidate.kind:
            raise field_error("candidate/kind", f"must be {self.baseline.kind}, as the baseline's")
        if self.baseline.resources() != self.candidate.resources():
            raise field_error("candidate", "needs other devices than the baseline: both run on the same ones")
        return self

    def resources(self) -> Resources:
        return self.baseline.resources()

    def cells(self) -> list[tuple[SpecBase, Any]]:
        """Those of both sides."""
        return [(spec, cell) for spec in (self.baseline, self.candidate) for cell in spec.cells()]

    def case(self, cell: Any = None) -> Case:
        """The case of one side, which is the same as in a job of that side alone."""
        spec, inner = cell
        found: Case = spec.case(inner)
        return found

    def summary(self) -> dict[str, Scalar]:
        """What the sides' lists show, and everything in which they differ, as "baseline → candidate"."""
        before, after = self.baseline.overview(), self.candidate.overview()
        shown = [*self.baseline.summary(), *before, *after]
        return {
            name: before.get(name) if before.get(name) == after.get(name) else f"{before.get(name)} → {after.get(name)}"
            for name in dict.fromkeys(shown)
            if name in self.baseline.summary() or before.get(name) != after.get(name)
        }


def _validated(spec: dict[str, Any]) -> Any:
    from app.specs import spec_adapter

    return spec_adapter.validate_python(spec)
