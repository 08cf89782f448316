"""`mixed_precision`: errors of sums in float16, and the data types that autocast gives the tensors of a training
step."""

import itertools
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from app.presets import BATCH_SIZE
from app.specs._base import Cell, Device, Name, Named, Seed, SpecBase, check_lists, field_error, listed
from app.specs._identity import Scalar
from app.specs._training import HYPER_PARAMETERS, ModelSpec

Accumulation = Literal["fp32", "fp16", "fp16_into_fp32", "fp16_cast_to_fp32"]
Audit = Literal["toy", "transformer"]
Autocast = Literal["none", "fp16", "bf16"]

OF_ACCUMULATIONS = ("addend", "additions")
OF_AUDITS = ("batch_size",)
OF_THE_TRANSFORMER = ("context_length", "attention")
"""Fields that have an effect on some cells only."""


@dataclass(frozen=True)
class MixedPrecisionCell(Cell):
    """One accumulation, or the audit of one model under one autocast."""

    accumulation: Accumulation | None
    audit: Audit | None
    autocast: Autocast | None

    @property
    def title(self) -> str:
        if self.audit is None:
            return f"accumulation {self.accumulation}"
        return f"audit of the {self.audit}, autocast {self.autocast}"


class MixedPrecisionSpec(SpecBase):
    """Add up one number many times in several data types, and list the data types of a training step under autocast."""

    kind: Literal["mixed_precision"] = "mixed_precision"
    accumulations: list[Accumulation] = Field(
        default=["fp32", "fp16", "fp16_into_fp32", "fp16_cast_to_fp32"], max_length=4
    )
    """`fp32` and `fp16`: number and sum in that type. `fp16_into_fp32`: fp16 numbers are added into an fp32 sum.
    `fp16_cast_to_fp32`: each fp16 number is cast to fp32 before it is added. Empty: none."""
    addend: float = Field(default=0.01, gt=0, le=65_504)
    """The number that is added up."""
    additions: int = Field(default=1000, ge=1, le=1_000_000)
    """Number of times that it is added to a sum of zero."""
    audits: list[Audit] = Field(default=["toy", "transformer"], max_length=2)
    """Models whose data types are listed. `toy`: linear, ReLU, layer norm, linear. `transformer`: the model below.
    Empty: none."""
    autocasts: list[Autocast] = Field(default=["none", "fp16", "bf16"], min_length=1, max_length=3)
    """Autocast that the audited steps run under; parameters are fp32, and fp16 scales its loss."""
    model: ModelSpec = ModelSpec(size="tiny")
    batch_size: int = Field(default=BATCH_SIZE, ge=1, le=65_536)
    """Sequences (of the toy: rows) per audited step."""
    context_length: int = Field(default=64, ge=1, le=1_048_576)
    """Tokens per sequence."""
    attention: Annotated[Name, Named("attention")] = "eager"
    """Attention implementation of the transformer, as a worker registers it."""
    device: Device = "auto"
    """`auto` takes a GPU where the worker has one. CPU and GPU differ in what autocast leaves in fp32."""
    seed: Seed = 0
    """Seed of the weights and the random batches."""

    axes: ClassVar[dict[str, str]] = {"accumulations": "accumulation", "audits": "audit", "autocasts": "autocast"}
    labels: ClassVar[dict[str, tuple[str, ...]]] = {
        "subject": (
            "audit",
            *OF_ACCUMULATIONS,
            *OF_AUDITS,
            *OF_THE_TRANSFORMER,
            *(f"model.{name}" for name in ModelSpec.model_fields if name != "size"),
        )
    }
    table_rows: ClassVar[tuple[str, ...]] = ("subject", "accumulation", "autocast")
    first_tables: ClassVar[tuple[str, ...]] = ("accumulations", "kept-in-float32", "float8", "dtypes")
    first_columns: ClassVar[dict[str, tuple[str, ...]]] = {
        "accumulations": ("accumulation", "device", "sum", "error", "rounding_error", "adding_error"),
        "dtypes": ("model", "autocast", "tensor", "name", "module_class", "dtype", "cuda_dtype", "kept_in_float32"),
    }
    table_columns: ClassVar[tuple[str, ...]] = ("sum", "error", "modules", "modules_in_float32")
    first_plotted: ClassVar[str | None] = "error"

    @model_validator(mode="after")
    def _lists_make_sense(self) -> Self:
        check_lists(self)
        if not self.accumulations and not self.audits:
            raise field_error("accumulations", "there is nothing to do: give accumulations, audits or both")
        self.model.check_documents(self.context_length)
        return self

    def cells(self) -> list[MixedPrecisionCell]:
        audits = itertools.product([None], self.audits, self.autocasts)
        return [MixedPrecisionCell(*cell) for cell in (*((one, None, None) for one in self.accumulations), *audits)]

    def normalised(self, identity: dict[str, Scalar]) -> tuple[dict[str, Scalar], dict[str, Scalar]]:
        """Spell out the model's preset, and set fields without effect to null: sums have no model."""
        del identity["model.size"]
        identity |= self.model.coordinates(self.context_length)
        audit = identity.get("audit")
        without_effect = set(OF_AUDITS if audit is None else OF_ACCUMULATIONS)
        if audit != "transformer":
            without_effect.update(OF_THE_TRANSFORMER, (name for name in identity if name.startswith("model.")))
        return {**identity, **dict.fromkeys(without_effect)}, {"subject": self._subject(audit)}

    def _subject(self, audit: Scalar) -> str:
        if audit is None:
            return f"{self.additions} × {self.addend}"
        return "toy" if audit == "toy" else f"{self.model.label()} transformer"

    def summary(self) -> dict[str, Scalar]:
        """Return what lists show of the job: also how its audits run, which their subjects do not tell."""
        of_the_model = (f"model.{name}" for name in ModelSpec.model_fields if name not in (*HYPER_PARAMETERS, "size"))
        untold = {"toy": OF_AUDITS, "transformer": (*OF_AUDITS, *OF_THE_TRANSFORMER, *of_the_model)}
        usual, overview = type(self).example().overview(), self.overview()
        names = [name for audit in self.audits for name in untold[audit]]
        return super().summary() | {name: overview[name] for name in names if overview[name] != usual[name]}

    def overview(self) -> dict[str, Scalar]:
        """Return all coordinates of the job and its subjects, without the autocasts if nothing is audited."""
        coordinates = super().overview()
        del coordinates["model.size"]
        if not self.audits:
            del coordinates["autocast"]
        subjects = [self._subject(audit) for audit in (*([None] if self.accumulations else []), *self.audits)]
        return {"subject": listed(subjects), **coordinates}
