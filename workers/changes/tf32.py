"""float32 products by a GPU's tensor cores, in TF32."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from workers.changes._base import Change, Elsewhere, Look, no_fp32
from workers.measure.own_step import OwnStep


def _why_not(look: Look) -> str | None:
    if not look.on_gpu:
        return Elsewhere("a CPU has no TF32")
    if torch.backends.cuda.matmul.fp32_precision == "tf32":
        return "float32 products are in TF32 already"
    return no_fp32(look)


@contextmanager
def _allowed(_step: OwnStep) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


CHANGE = Change(
    causes=("precision", "kernels", "attention"),
    how='torch.set_float32_matmul_precision("high")',
    why_not=_why_not,
    fields=lambda _: {"precision": "tf32"},
    after=_allowed,  # the code may have chosen otherwise
)
