"""The matrix products of a step by shape, with their FLOPs and bytes, for the roofline.

The profiler records the shapes and types of operators' inputs, so the FLOPs and bytes of a product are exact. Those of
other operators are unknown: inputs do not show how much an elementwise operator writes, or a fused one keeps in
registers. Products inside kernels of a compiler or of a CUDA graph are no operators, so they are not listed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from workers.model.accounting import Cost, matrix_product

FACTORS = {
    **{f"aten::{name}": 0 for name in ("mm", "bmm", "_scaled_mm")},
    **{f"aten::{name}": 1 for name in ("addmm", "addmm_", "baddbmm", "baddbmm_", "_addmm_activation")},
}
"""Operators that multiply two matrices, or as many pairs as there are in a batch, with the position of the first factor
among their inputs."""
DTYPES = {
    "float": ("fp32", 4),
    "c10::BFloat16": ("bf16", 2),
    "c10::Half": ("fp16", 2),
    "double": ("fp64", 8),
    **dict.fromkeys(("c10::Float8_e4m3fn", "c10::Float8_e5m2"), ("fp8", 1)),
}
"""Names of the profiler's data types, with ours and the bytes of a number."""


@dataclass(frozen=True, slots=True)
class Product:
    """The product of `batch` pairs of matrices, (rows × inner) · (inner × columns)."""

    batch: int
    rows: int
    inner: int
    columns: int
    dtype: str
    element_bytes: int

    @property
    def cost(self) -> Cost:
        """The FLOPs, and the fewest bytes read and written."""
        return matrix_product(self.batch, self.rows, self.inner, self.columns, self.element_bytes)

    @property
    def size(self) -> str:
        """The shapes as people write them: "256×128 · 128×512", or "8 × (64×32 · 32×64)" of a batch."""
        one = f"{self.rows}×{self.inner} · {self.inner}×{self.columns}"
        return one if self.batch == 1 else f"{self.batch} × ({one})"


def product_of(name: str, shapes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> Product | None:
    """Return the product that an operator computes, from the shapes and types of its inputs; None if it is not a
    product.

    None also for data types that are not in `DTYPES`, and for sparse or nested inputs.
    """
    first = FACTORS.get(name)
    if first is None or len(shapes) < first + 2 or dtypes[first] not in DTYPES:
        return None
    left, right = shapes[first : first + 2]
    if len(left) != len(right) or len(left) not in (2, 3) or left[-1] != right[-2]:
        return None
    dtype, element_bytes = DTYPES[dtypes[first]]
    batch = left[0] if len(left) == 3 else 1
    return Product(batch, left[-2], left[-1], right[-1], dtype, element_bytes)
