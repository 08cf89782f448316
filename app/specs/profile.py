"""`profile`: the time of a step by kernel, operator, class of kernel and part of attention."""

import re
import warnings
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from app.specs._base import Needs, Resources, SpecBase, StrictModel, field_error
from app.specs._training import PHASES, TrainingSpec, always


class NcuSpec(StrictModel):
    """The measurement of Nsight Compute: hardware counters of a few launches of some kernels."""

    kernels: str | None = Field(default=None, min_length=1, max_length=500)
    """Regular expression of the kernels' names; null: all kernels."""
    set: Literal["basic", "detailed", "full", "roofline"] = "basic"
    """Set of sections, as ncu names it: the larger, the more often each kernel is run again."""
    launches: int = Field(default=5, ge=1, le=1000)
    """Launches measured."""

    @model_validator(mode="after")
    def _kernels_is_an_expression(self) -> Self:
        text = self.kernels or ""
        if not text.isprintable():
            raise field_error("kernels", "has a control character, which no command line and no kernel's name holds")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore"
                )  # Python's warnings concern Python's future syntax, and ncu has other rules
                re.compile(text)
        # Too large a repetition overflows, and too many parentheses recurse too deeply.
        except (re.error, OverflowError, RecursionError) as error:
            raise field_error("kernels", f"is no regular expression: {error}") from error
        return self


class ProfileSpec(TrainingSpec):
    """Profile the steps of one model at one batch size and context length."""

    kind: Literal["profile"] = "profile"
    accumulation_steps: Literal[1] = 1
    """Always 1: all micro-batches do the same work."""
    profile_steps: int = Field(default=3, ge=1, le=20)
    """Steps under torch's profiler, after the warm-up; of a slow step, or one with very many operators, one."""
    phases: list[Literal["forward", "backward", "optimizer", "prefill", "decode"]] | None = Field(
        default=None, min_length=1, max_length=5
    )
    """Phases whose kernels and operators are listed; null: all of the mode. The shares cover all of them anyway."""
    stacks: bool = True
    """Record Python stacks, in a step of their own, and draw a flame graph of them."""
    trace_max_mib: int = Field(default=50, ge=1, le=1024)
    """Largest compressed Chrome trace that is kept, in MiB."""
    nsys: Annotated[bool, Needs("tool", "nsys")] = False
    """Run the job once more under Nsight Systems, and keep its report. Needs a GPU. Unverified: tested with a stand-in
    for the tool, on no host that has it."""
    ncu: Annotated[NcuSpec | None, Needs("tool", "ncu")] = None
    """Run the job once more under Nsight Compute, and keep its report. Needs a GPU."""

    unmeasured: ClassVar[frozenset[str]] = SpecBase.unmeasured | {
        *("profile_steps", "phases", "stacks", "trace_max_mib", "nsys", "ncu")
    }
    first_tables: ClassVar[tuple[str, ...]] = (
        "lines", "summary", "waits", "classes", "attention", "products", "ceilings", "kernels", "operators", "ranges",
    )  # fmt: skip
    first_columns: ClassVar[dict[str, tuple[str, ...]]] = {
        "lines": (
            *("file", "line", "function", "self_ms", "self_percent", "self_margin_percent"),
            *("total_ms", "python_ms"),
            *("device_self_ms", "device_total_ms", "calls", "code"),
        ),
        "kernels": ("name", "class", "total_ms", "share_percent", "calls", "median_us"),
        "operators": ("name", "class", "device_ms", "host_ms", "host_total_ms", "cpu_mib", "share_percent", "calls"),
        "attention": ("part", "phase", "total_ms", "share_percent", "tflops", "limit_percent", "bound", "note"),
        "products": ("phase", "operator", "product", "dtype", "calls", "total_ms", "tflops", "limit_percent", "bound"),
    }
    table_rows: ClassVar[tuple[str, ...]] = ("model", "context_length", "mode")
    has_own_phases: ClassVar[bool] = True
    table_columns: ClassVar[tuple[str, ...]] = (
        "unprofiled_step_ms",
        "gpu_busy_percent",
        "forward_matmul_share_percent",
        "step_matmul_share_percent",
    )

    _one_micro_batch = always(
        "accumulation_steps", 1, "all micro-batches of a step do the same work: leave it out, and profile one of them"
    )

    @model_validator(mode="after")
    def _phases_are_of_the_mode(self) -> Self:
        if self.phases is None:
            return self
        if self.step_code is not None:
            raise field_error("phases", "are those that step_code names, and all are listed: leave it out")
        if self.cuda_graph:
            raise field_error("phases", "a CUDA graph is one phase to a profiler: leave phases out, or cuda_graph")
        for phase in self.phases:
            if phase not in PHASES[self.mode]:
                known = ", ".join(PHASES[self.mode])
                raise field_error("phases", f"mode {self.mode} has no phase {phase!r}, only {known}")
        if len(set(self.phases)) < len(self.phases):
            raise field_error("phases", "a phase is there twice")
        return self

    @model_validator(mode="after")
    def _tools_need_a_gpu(self) -> Self:
        for tool in ("nsys", "ncu"):
            if getattr(self, tool) and self.device == "cpu":
                raise field_error(tool, f"{tool} profiles the kernels of a GPU: leave it out, or choose device cuda")
        return self

    def resources(self) -> Resources:
        own = super().resources()
        return own.model_copy(update={"device_type": "cuda"}) if self.nsys or self.ncu else own
