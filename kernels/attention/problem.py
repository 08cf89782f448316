"""What a call of attention computes, beside its tensors: heads, mask, scale, soft cap; and the FLOPs that follow.

The mask is a band of diagonals: query i sees key j if `lower <= j - i <= upper`, and, in packed sequences, if both are
in one document. Causal masks and sliding windows are such bands (`band_of`). Imports torch on use only.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from ..registry import FEATURES

if TYPE_CHECKING:
    import torch


DIFFERENTIABLE = "attention 'eager' or 'sdpa_math' of kernels.registry.ATTENTION"
"""What has every derivative, for messages."""


class Band(NamedTuple):
    """The diagonals of the scores, key minus query, that are visible; None: no bound."""

    lower: int | None
    upper: int | None


def band_of(queries: int, keys: int, is_causal: bool, *, window: int | None = None, bottom_right: bool = False) -> Band:
    """Return the band of a mask, without bounds that hide nothing.

    Args:
        is_causal: A query sees no key behind its own position.
        window: Keys that a query sees back, its own position among them; without `is_causal`, also as many forth.
        bottom_right: The last query's position is the last key. False: the first query's is the first key (top-left).
    """
    offset = keys - queries if bottom_right else 0
    upper = offset if is_causal else None if window is None else offset + window - 1
    lower = None if window is None else offset - window + 1
    return Band(
        None if lower is None or lower <= 1 - queries else lower, None if upper is None or upper >= keys - 1 else upper
    )


def may_see_nothing(queries: int, keys: int, band: Band) -> bool:
    return (band.upper is not None and band.upper < 0) or (band.lower is not None and queries - 1 + band.lower >= keys)


def check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, any_width: bool = False) -> None:
    """Check that queries (…, heads, queries, head_dim), keys and values fit together, which torch would broadcast.

    Args:
        any_width: The head dimension of the values may be another one.

    Raises:
        ValueError: they do not.
    """
    if q.dim() < 2 or k.dim() != q.dim() or v.dim() != k.dim() or v.shape[:-1] != k.shape[:-1]:
        raise ValueError(
            "expected q, k and v with as many axes, k and v of one shape but for the head dimension, not "
            f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if not any_width and v.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"expected values with the head dimension of the keys, {k.shape[-1]}, not {v.shape[-1]}: of another one "
            f"they are taken by {DIFFERENTIABLE}"
        )
    batch = q.dim() - (3 if q.dim() > 3 else 2)
    if q.shape[-1] == 0:
        raise ValueError(f"the head dimension of q {tuple(q.shape)} is 0")
    if k.shape[:batch] != q.shape[:batch] or k.shape[-1] != q.shape[-1]:
        raise ValueError(f"batch and head dimension of q {tuple(q.shape)} and k {tuple(k.shape)} differ")
    if q.dim() > 3 and (k.shape[-3] == 0 or q.shape[-3] % k.shape[-3] != 0):
        raise ValueError(f"q's {q.shape[-3]} heads are no multiple of k's {k.shape[-3]}")


def check_inputs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, any_width: bool = False, with_heads: bool = False
) -> None:
    """Check shapes as `check_shapes` does; and dtypes, which autocast may make one, and devices.

    Args:
        with_heads: There must be an axis of heads.

    Raises:
        ValueError: they do not fit together.
    """
    check_shapes(q, k, v, any_width=any_width)
    if with_heads and q.dim() != 4:
        raise ValueError(f"expected q, k and v (batch, heads, sequence, head_dim), not {tuple(q.shape)}")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v are on {q.device}, {k.device} and {v.device}")
    import torch

    dtypes = {q.dtype, k.dtype, v.dtype}
    # Autocast leaves float64 as it is.
    is_one = len(dtypes) == 1 or (torch.float64 not in dtypes and torch.is_autocast_enabled(q.device.type))
    if not (is_one and q.is_floating_point() and k.is_floating_point() and v.is_floating_point()):
        raise ValueError(f"expected q, k and v of one floating-point dtype, not {q.dtype}, {k.dtype} and {v.dtype}")


def check_options(scale: float | None, window: int | None, softcap: float | None) -> None:
    """Check options of attention.

    Raises:
        ValueError: one is out of its range.
    """
    for name, value in (("scale", scale), ("softcap", softcap)):
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{name} must be a positive number, not {value}")
    if window is not None and (isinstance(window, float) or window < 1):
        raise ValueError(f"window must be at least 1, the query's own position, and whole, not {window}")


@dataclass(frozen=True)
class AttentionProblem:
    """A problem of attention. Fields are named as in specs; `features` has those that not every implementation takes.

    Raises:
        ValueError: the fields do not fit together.
    """

    num_heads: int = 1
    """Heads of the queries."""
    num_kv_heads: int | None = None
    """Heads of keys and values, each shared by a group of query heads; None: as many as those."""
    is_causal: bool = False
    """Query i sees no key behind i."""
    bottom_right: bool = False
    """The last query is aligned with the last key; False: the first with the first (top-left)."""
    window: int | None = None
    """Keys that a query sees back, its own position among them; without `is_causal`, also as many forth. None: all."""
    document_lengths: tuple[int, ...] | None = None
    """Lengths of the documents that are packed into each sequence, 0 allowed: a query sees the keys of its own document
    only. Queries and keys are as many, the sum of these. None: a sequence is one document."""
    scale: float | None = None
    """Factor of the scores; None: 1/sqrt(head_dim)."""
    softcap: float | None = None
    """Scaled scores s become softcap * tanh(s / softcap); None: they stay."""
    return_lse: bool = False
    """The log-sum-exp of each query's scores (natural, float32, q's shape without the last axis) is returned, too."""

    def __post_init__(self) -> None:
        check_options(self.scale, self.window, self.softcap)
        if self.num_kv_heads is not None and (self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads):
            raise ValueError(f"{self.num_heads} heads are no multiple of {self.num_kv_heads} key heads")
        if self.document_lengths is not None and min(self.document_lengths, default=-1) < 0:
            raise ValueError("document_lengths must have at least one length, none of them negative")

    @property
    def features(self) -> frozenset[str]:
        """The `FEATURES` that it needs."""
        given = {field.name for field in fields(self) if getattr(self, field.name) != field.default}
        if self.num_kv_heads == self.num_heads:
            given.discard("num_kv_heads")
        return FEATURES & given

    def options(self, device: torch.device | str) -> dict[str, Any]:
        """Return the keyword arguments of an implementation's function, beside q, k, v and is_causal: those that are
        not at their defaults. Documents become `document_ends`, int32 on the device."""
        names = self.features - {"num_kv_heads", "document_lengths"}
        options = {name: getattr(self, name) for name in sorted(names)}
        if self.document_lengths is not None:
            import torch

            ends = list(accumulate(self.document_lengths))
            options["document_ends"] = torch.tensor(ends, dtype=torch.int32, device=device)
        return options

    def band(self, queries: int, keys: int) -> Band:
        """Return the band of the mask. Raises ValueError if the documents do not fill the sequence."""
        if self.document_lengths is not None and not queries == keys == sum(self.document_lengths):
            raise ValueError(
                f"documents have {sum(self.document_lengths)} tokens, and there are {queries} queries and {keys} keys"
            )
        return band_of(queries, keys, self.is_causal, window=self.window, bottom_right=self.bottom_right)

    def visible_pairs(self, queries: int, keys: int) -> int:
        """Return the pairs of a query and a key that it sees, of one head of one sequence.

        The forward pass does 4 * head_dim FLOPs for each: two products.
        """
        band = self.band(queries, keys)
        if self.document_lengths is None:
            return _pairs(queries, keys, band)
        return sum(_pairs(length, length, band) for length in self.document_lengths)


def _pairs(queries: int, keys: int, band: Band) -> int:
    """The pairs within a band, whose lower bound is not above its upper one."""

    def below(diagonal: int) -> int:
        """Pairs with key - query <= diagonal: the sum over queries of query + diagonal + 1, cut to 0 … keys."""
        return ramp(queries + diagonal) - ramp(diagonal)

    def ramp(last: int) -> int:
        """The sum of 1 … last, each cut to keys."""
        rising = min(max(last, 0), keys)
        return rising * (rising + 1) // 2 + max(last - keys, 0) * keys

    hidden = 0 if band.lower is None else below(band.lower - 1)
    return (queries * keys if band.upper is None else below(band.upper)) - hidden
