"""One problem on which tilings of attention's Triton kernels are tried: inputs, room for results, and right results."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.attention import triton_launch as launch
from kernels.attention.triton_inputs import like, precision_of, room_for_results, tf32_is_allowed, with_heads
from kernels.attention.triton_tiles import Tiling
from kernels.tolerance import TF32_TOLERANCE, TOLERANCES, error

RESULTS = {
    "forward": ("out", "logsumexp"),
    "keys": ("dk", "dv"),
    "queries": ("dq",),
    "one_pass": ("dk", "dv", "dq"),
}
"""What each kernel computes; the kernels are named as `Tilings` names them."""


@dataclass
class Problem:
    """Inputs (batch, heads, rows, head_dim) with a contiguous last axis, detached, and the kernels' calls on them."""

    q: Tensor
    k: Tensor
    v: Tensor
    is_causal: bool
    precision: str
    """Precision of products, by triton_launch's names."""
    operands: tuple[Tensor, Tensor, Tensor]
    """q, k and v as kernels take them."""
    room: dict[str, Tensor] = field(default_factory=dict)
    """Tensors to which kernels write, by the results' names."""
    right: dict[str, Tensor] = field(default_factory=dict)
    """Results that others are compared with."""
    _backward_inputs: tuple[Tensor, Tensor, Tensor] | None = None

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, tf32: bool | None) -> Problem:
        """Make a problem of inputs as `flash_attention` takes them.

        Raises:
            ValueError: `flash_attention` does not take the inputs, or they are empty.
        """
        q, k, v = (tensor.detach() for tensor in (q, k, v))
        out, logsumexp = room_for_results(q, k, v)
        if out.numel() == 0:
            raise ValueError(f"there is nothing to tune for: q's shape is {tuple(q.shape)}")
        q, k, v, out = with_heads(q, k, v, out)
        precision = precision_of(q, tf32_is_allowed() if tf32 is None else tf32)
        first, second, third = launch.operands(precision, q, k, v)
        return cls(
            q,
            k,
            v,
            is_causal,
            precision,
            (first, second, third),
            {"out": out, "logsumexp": logsumexp.view(out.shape[:-1])},
        )

    def run(self, kernel: str, tiling: Tiling) -> None:
        """Call a kernel once. "one_pass" adds to its sum of dQ, so a caller that reads the sum clears it first."""
        q, k, v = self.operands
        room, how = self.room, (self.is_causal, self.precision)
        if kernel == "forward":
            launch.forward(q, k, v, room["out"], room["logsumexp"], *how, tiling)
            return
        inputs = (q, k, v, *self._prepared())
        if kernel == "queries":
            launch.queries(*inputs, room["dq"], *how, tiling)
        else:
            dq_sum = room["dq_sum"] if kernel == "one_pass" else None
            launch.keys(*inputs, room["dk"], room["dv"], *how, dq_sum, tiling)

    def in_one_pass(self, tiling: Tiling) -> None:
        """Run the backward pass in one pass, with its preparation."""
        self._prepared()
        self.room["dq_sum"].zero_()
        self.run("one_pass", tiling)
        launch.take_sum(self.room["dq_sum"], self.room["dq"])

    def in_two_passes(self, keys: Tiling, queries: Tiling) -> None:
        """Run the backward pass in two passes, with its preparation."""
        self.run("keys", keys)
        self.run("queries", queries)

    def take_as_right(self, kernel: str, tiling: Tiling) -> None:
        """Take this tiling's results as the right ones for the kernel's other tilings."""
        self._run_on_cleared(kernel, tiling)
        self.right |= {name: self.room[name].clone() for name in RESULTS[kernel]}

    def why_wrong(self, kernel: str, tiling: Tiling) -> str | None:
        """Run a tiling, and say what is wrong with its results; None if they are right."""
        self._run_on_cleared(kernel, tiling)
        tolerance = TF32_TOLERANCE if self.precision == "tf32" else TOLERANCES[self.q.dtype]
        for name in RESULTS[kernel]:
            if reason := error(self.room[name], self.right[name].double()).why_wrong(tolerance):
                return f"{name}: {reason}"
        return None

    def _run_on_cleared(self, kernel: str, tiling: Tiling) -> None:
        """Clear the results before the run: another kernel may have left right values where this one writes none."""
        if kernel != "forward":
            self._prepared()
        for name in RESULTS[kernel]:
            self.room[name].fill_(float("nan"))
        if kernel == "one_pass":
            self.room["dq_sum"].zero_()
        self.run(kernel, tiling)
        if kernel == "one_pass":
            launch.take_sum(self.room["dq_sum"], self.room["dq"])

    def _prepared(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output's gradient as kernels take it, and the results of `launch.rows`; needs a right output. Made
        once.
        """
        if self._backward_inputs is None:
            q, k, v = self.q, self.k, self.v
            generator = torch.Generator(q.device).manual_seed(0)
            gradient = torch.empty_like(self.right["out"]).normal_(generator=generator)
            exponents, deltas, dq_sum = launch.rows(
                self.right["out"], gradient, self.right["logsumexp"], None, add_up=True
            )
            assert dq_sum is not None
            self.room |= {"dq": torch.empty_like(self.right["out"]), "dk": like(k)}
            self.room |= {"dv": like(v)}
            self.room["dq_sum"] = dq_sum
            (operand,) = launch.operands(self.precision, gradient)
            self._backward_inputs = operand, exponents, deltas
        return self._backward_inputs
