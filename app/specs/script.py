"""`script`: a training script of the user's own, which measures its step with `flopwatch.measure(step)`."""

import shlex
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from app.specs._base import Device, SpecBase, field_error
from app.specs._code import UNNAMED, CodeSpec, Uploaded, coordinates, names
from app.specs._identity import Scalar


class ScriptSpec(SpecBase):
    """Run a training script that calls flopwatch.measure(step). Its output is the job's log."""

    kind: Literal["script"] = "script"
    script_code: Annotated[CodeSpec | None, Uploaded("script")] = None
    """The script, with the function `__main__`; null: an example, which multiplies matrices. Only workers started with
    --allow-code run it."""
    arguments: str = Field(default="", max_length=10_000)
    """The script's arguments, as a shell reads them."""
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    """Precision whose peak MFU and ceiling refer to; `tf32` allows such products. Autocast is the script's."""
    device: Device = "auto"
    """`auto` takes a GPU where the worker has one. The script sees no other."""

    unmeasured: ClassVar[frozenset[str]] = frozenset({"device"})
    labels: ClassVar[dict[str, tuple[str, ...]]] = {"script": names("script_code")}
    table_rows: ClassVar[tuple[str, ...]] = ("script", "arguments")
    has_own_phases: ClassVar[bool] = True
    table_columns: ClassVar[tuple[str, ...]] = (
        "forward_ms", "backward_ms", "optimizer_ms", "rest_ms", "step_ms", "tokens_per_s", "items_per_s", "mfu",
        "peak_memory_mib",
    )  # fmt: skip

    @model_validator(mode="after")
    def _arguments_are_words(self) -> Self:
        try:
            self.words()
        except ValueError as error:
            raise field_error("arguments", f"a shell could not read this: {error}") from error
        return self

    def words(self) -> list[str]:
        """Return the arguments as the script gets them."""
        return shlex.split(self.arguments)

    def normalised(self, identity: dict[str, Scalar]) -> tuple[dict[str, Scalar], dict[str, Scalar]]:
        identity = coordinates(identity, "script_code", self.script_code)
        return {**identity, "arguments": self.arguments or None}, {"script": self.label()}

    def label(self) -> str:
        return "example" if self.script_code is None else self.script_code.file or UNNAMED
