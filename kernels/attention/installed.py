"""FlashAttention as its makers ship it, where it is installed: versions 2, 3 and 4.

They are what people would take instead of our kernels. Sources: Dao, FlashAttention-2 (2023); Shah et al.,
FlashAttention-3 (2024); and https://github.com/Dao-AILab/flash-attention.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..registry import FEATURES, Implementation
from .library import HALF, NO_KERNEL, optional
from .masks import check_documents, version_of
from .problem import check_inputs, check_options


@dataclass(frozen=True)
class FlashAttention:
    """One version of the library, called as our implementations are. Raises RuntimeError: it is not installed, or does
    not compute this problem; says which ("No available kernel: …")."""

    module: str
    """It has the functions flash_attn_func and flash_attn_varlen_func."""
    package: str
    """For pip, and where it is if not on PyPI."""
    unlimited: int | None
    """Its word for a window without an end."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, *, scale: float | None = None,
        window: int | None = None, softcap: float | None = None, document_ends: Tensor | None = None,
        bottom_right: bool = False,
    ) -> Tensor:  # fmt: skip
        check_inputs(q, k, v, with_heads=True)
        check_options(scale, window, softcap)
        queries, keys = q.shape[2], k.shape[2]
        if queries != keys and not bottom_right and (is_causal or window is not None):
            raise RuntimeError(f"{NO_KERNEL}: {self.module} aligns masks with the last query and the last key")
        if q.shape[-1] % 8 or q.shape[-1] > 256:  # version 2 pads those that are no multiples
            raise RuntimeError(f"{NO_KERNEL}: {self.module} takes head dimensions that are multiples of 8, up to 256")
        back = self.unlimited if window is None else window - 1
        options: dict[str, Any] = {
            "causal": is_causal,
            "softmax_scale": scale,
            "window_size": (back, 0 if is_causal and window is not None else back),
            "softcap": 0.0 if softcap is None else softcap,  # the backward pass of version 4 takes no None
        }
        rows = [tensor.transpose(1, 2) for tensor in (q, k, v)]
        if document_ends is None:
            return _output(optional(self.module, self.package).flash_attn_func(*rows, **options)).transpose(1, 2)
        check_documents(queries, keys, q.device, document_ends)
        starts, longest = _starts(document_ends, version_of(document_ends), q.shape[0], keys)
        out = optional(self.module, self.package).flash_attn_varlen_func(
            *(tensor.flatten(0, 1) for tensor in rows), cu_seqlens_q=starts, cu_seqlens_k=starts,
            max_seqlen_q=longest, max_seqlen_k=longest, **options,
        )  # fmt: skip
        return _output(out).view(q.shape[0], queries, *rows[0].shape[2:]).transpose(1, 2)


def _output(result: Any) -> Tensor:
    """The output, without the log-sum-exp that some versions return beside it."""
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out


# The lengths of a measured problem are read from the device once.
@functools.lru_cache(maxsize=1)
@torch.inference_mode(False)
def _starts(document_ends: Tensor, _version: object, batch: int, tokens: int) -> tuple[Tensor, int]:
    """Return where documents begin and end in the rows of all sequences, int32, and the length of the longest. Those
    without tokens are left out."""
    edges = torch.cat([F.pad(document_ends.clamp(max=tokens), (1, 0)), document_ends.new_tensor([tokens])])
    edges = torch.unique_consecutive(edges)
    offsets = tokens * torch.arange(batch, device=edges.device, dtype=edges.dtype)
    starts = torch.cat([(edges[:-1] + offsets.unsqueeze(-1)).flatten(), offsets[-1:] + tokens])
    return starts, int(edges.diff().max())


def _implementation(name: str, library: FlashAttention) -> Implementation:
    return Implementation(name, library, {"cuda": HALF}, features=FEATURES - {"return_lse"})


PACKAGE_3 = "flash-attn-3 (PyTorch's package index has it, PyPI does not)"
# Not of `flash_attn`: where version 4 alone is installed, that is a package without functions.
flash_attn = _implementation("flash_attn", FlashAttention("flash_attn.flash_attn_interface", "flash-attn", -1))
flash_attn_3 = _implementation("flash_attn_3", FlashAttention("flash_attn_interface", PACKAGE_3, -1))
flash_attn_4 = _implementation("flash_attn_4", FlashAttention("flash_attn.cute", "flash-attn-4", None))
