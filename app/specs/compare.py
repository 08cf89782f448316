"""`compare`: two specs of one kind, measured in turns by fresh processes on the same device."""

import secrets
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from app.specs._base import Resources, Seed, SpecBase, field_error
from app.specs._identity import Case, Scalar
from app.specs._union import KINDS, PlainSpec
from flopwatch.text.values import value_text

MAX_SEED = 2**31
FEWEST_OF_BLOCK = 4
"""Fewest turns of a side in a block: fewer say nothing by themselves (`app.results.inference.FEWEST`)."""


def blocks_of_turns(replicates: int) -> list[int]:
    """Return the number of turns that each side has in each block: in a block every order of its turns is equally
    likely, and the test of a comparison exchanges turns within blocks."""
    blocks = max(1, replicates // FEWEST_OF_BLOCK)
    return [replicates // blocks + (block < replicates % blocks) for block in range(blocks)]


def _tiny(precision: str) -> SpecBase:
    return KINDS["benchmark"].model_validate({"model": {"size": "tiny"}, "context_length": 64, "precision": precision})


class CompareSpec(SpecBase):
    """Measure a baseline and a candidate in turns, whose order is drawn, each in a fresh process."""

    model_config = ConfigDict(defer_build=True)

    kind: Literal["compare"] = "compare"
    baseline: PlainSpec
    """The spec to compare with. It has any kind but this one."""
    candidate: PlainSpec
    """The spec that is compared. It has the baseline's kind and uses the same devices."""
    replicates: int = Field(default=8, ge=1, le=100)
    """Fresh processes of each side. With fewer than 4, a difference cannot be distinguished from chance."""
    convergence_steps: int | None = Field(default=None, ge=20, le=10_000)
    """Also train both sides for so many steps, from equal seeds on equal batches without CUDA graphs, and compare their
    losses: synthetic text, a Markov chain of letters. Null: compare times only. Both sides are benchmarks with mode
    train_step."""
    convergence_pairs: int = Field(default=6, ge=6, le=100)
    """With `convergence_steps`: pairs of runs, each with another seed; the difference has a 95 % interval over them."""
    seed: Seed | None = None
    """Seed from which the order of the turns is drawn; null: drawn itself, at submission, and kept here."""

    holds_specs: ClassVar[bool] = True
    has_sides: ClassVar[bool] = True
    unmeasured: ClassVar[frozenset[str]] = SpecBase.unmeasured | {
        "replicates",
        "convergence_steps",
        "convergence_pairs",
    }
    answers: ClassVar[tuple[str, ...]] = ("convergence",)
    first_tables: ClassVar[tuple[str, ...]] = ("convergence", "losses")
    table_rows: ClassVar[tuple[str, ...]] = ("side",)
    table_notes: ClassVar[Mapping[str, Mapping[Scalar, str]]] = {
        "side": {
            "baseline": "Medians describe each side. The answer, that of `flopwatch compare`, has other numbers: "
            "ratios of all pairs of processes, on a CPU by the fastest sample of each."
        }
    }

    @model_validator(mode="after")
    def _sides_go_together(self) -> Self:
        if self.baseline.kind != self.candidate.kind:
            raise field_error("candidate/kind", f"must be {self.baseline.kind}, as the baseline's")
        for side, spec in self.sides().items():
            if getattr(spec, "replicates", 1) != 1:
                detail = "leave it out: the comparison has replicates of its own (--replicates of compare and versus)"
                raise field_error(f"{side}/replicates", detail)
        before, after = (spec.resources() for spec in self.sides().values())
        if (before.devices, before.nodes) != (after.devices, after.nodes) or len(
            {before.device_type, after.device_type} - {"auto"}
        ) > 1:
            raise field_error(
                "candidate", f"needs {_named(after)}, the baseline {_named(before)}: both run on the same devices"
            )
        if self.convergence_steps is not None:
            self._check_convergence()
        return self

    def _check_convergence(self) -> None:
        for side, spec in self.sides().items():
            if spec.kind != "benchmark":
                raise field_error("convergence_steps", "trains models of kind benchmark: leave it out")
            if getattr(spec, "step_code", None) is not None:
                raise field_error(
                    f"{side}/step_code", "convergence_steps trains our models only: leave one of them out"
                )
            if getattr(spec, "mode", None) != "train_step":
                raise field_error(f"{side}/mode", "convergence_steps trains: choose train_step")
        for field in ("batch_size", "accumulation_steps", "context_length", "model/vocab_size", "seed"):
            first, _, last = field.partition("/")
            values = [getattr(spec, first) for spec in self.sides().values()]
            before, after = [getattr(value, last) for value in values] if last else values
            if before != after:
                raise field_error(
                    f"candidate/{field}", f"is {after}, the baseline's {before}: convergence_steps needs equal batches"
                )

    @classmethod
    def example(cls) -> Self:
        """Return a small comparison. Only clients know what to compare, so the sides have no defaults."""
        return cls(baseline=_tiny("fp32"), candidate=_tiny("bf16"))

    def drawn(self) -> Self:
        """Return the spec with a seed. Each comparison has another: no load can keep time with all of them."""
        return self if self.seed is not None else self.model_copy(update={"seed": secrets.randbelow(MAX_SEED)})

    def sides(self) -> dict[str, SpecBase]:
        return {"baseline": self.baseline, "candidate": self.candidate}

    def resources(self) -> Resources:
        """Return the resources that both sides need: `auto` becomes the device type that the other side asks for."""
        before, after = (spec.resources() for spec in self.sides().values())
        return Resources(
            device_type=after.device_type if before.device_type == "auto" else before.device_type,
            devices=before.devices,
            nodes=before.nodes,
            exclusive_host=before.exclusive_host or after.exclusive_host,
        )

    def cells(self) -> list[tuple[SpecBase, Any]]:
        return [(spec, cell) for spec in self.sides().values() for cell in spec.cells()]

    def number_of_cells(self) -> int:
        return sum(spec.number_of_cells() for spec in self.sides().values())

    def case(self, cell: tuple[SpecBase, Any] | None = None) -> Case:
        """Return the case of one side's cell, the same as that of a job of that side alone. Raises ValueError without a
        cell: a comparison as a whole has no case."""
        if cell is None:
            raise ValueError("a comparison as a whole has no case: pass one of its cells(), or ask for cases()")
        spec, inner = cell
        return spec.case(inner)

    def without_effect(self) -> list[str]:
        """Return the fields of both sides that change nothing there, and pairs without steps."""
        own = [] if self.convergence_steps is not None else self.changed("convergence_pairs")
        return [*own, *(f"{side}.{field}" for side, spec in self.sides().items() for field in spec.without_effect())]

    def summary(self) -> dict[str, Scalar]:
        """Return the sides' summaries and every coordinate in which they differ, as "baseline → candidate"."""
        shown = {*self.baseline.summary(), *self.candidate.summary()}
        before, after = self.baseline.overview(), self.candidate.overview()
        return {
            name: both for name, both in self.overview().items() if name in shown or before.get(name) != after.get(name)
        }

    def overview(self) -> dict[str, Scalar]:
        """Return all coordinates of both sides; a coordinate in which they differ reads "baseline → candidate"."""
        before, after = self.baseline.overview(), self.candidate.overview()
        return {
            name: before[name]
            if name in before and name in after and before[name] == after[name]
            else f"{value_text(before.get(name))} → {value_text(after.get(name))}"
            for name in dict.fromkeys([*before, *after])
        }


def _named(resources: Resources) -> str:
    on_nodes = f" on each of {resources.nodes} nodes" if resources.nodes > 1 else ""
    return f"{resources.devices} × {resources.device_type}{on_nodes}"
