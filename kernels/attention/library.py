"""Attention as torch ships it: `eager`, written out in PyTorch operations; `compiled`, the same through torch.compile;
each backend of its fused operation; and FlexAttention, compiled.

A backend that does not support its inputs (head dimension, dtype, device) raises torch's "No available kernel". It
never falls back to another backend, so the named backend is the one that is timed.
"""

import functools
import importlib
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import compiling
from ..compiling import each_size_compiled
from ..registry import FEATURES, AttentionFunction, Implementation
from .masks import check_documents, documents_of, version_of, visible_keys
from .problem import Band, band_of, check_inputs, check_options
from .reference import attention

HALF = frozenset({"bfloat16", "float16"})
SINGLE_AND_HALF = HALF | {"float32"}
ALL = SINGLE_AND_HALF | {"float64"}

NO_KERNEL = "No available kernel"
"""Part of the message of torch's RuntimeError for inputs that the chosen backend does not support."""


def optional(module: str, package: str) -> Any:
    """Import a module that another package brings. Raises RuntimeError: it cannot be imported; names the package for
    pip ("No available kernel: …")."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise RuntimeError(f"{NO_KERNEL}: {module} cannot be imported ({error}): pip install {package}") from error


MASKED = frozenset({"num_kv_heads", "scale", "window", "document_lengths", "bottom_right"})
"""What torch's fused operation takes, the last three as a mask; its backends refuse what they do not support."""


def _fused(backend: SDPBackend) -> AttentionFunction:
    def fused_attention(
        q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, *, scale: float | None = None, **masks: Any
    ) -> Tensor:
        check_inputs(q, k, v, any_width=True, with_heads=True)
        check_options(scale, masks.get("window"), None)
        is_causal, mask = _mask(q, k, is_causal, **masks) if masks else (is_causal, None)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )

    return fused_attention


def _mask(
    q: Tensor, k: Tensor, is_causal: bool, document_ends: Tensor | None = None, **masks: Any
) -> tuple[bool, Tensor | None]:
    """The arguments `is_causal` and `attn_mask`, which not every backend takes, only where it is needed."""
    band = band_of(q.shape[2], k.shape[2], is_causal, **masks)
    if document_ends is None and band.lower is None and band.upper in (None, 0):
        return band.upper == 0, None
    version = version_of(document_ends)
    return False, _remembered_mask(q.shape[2], k.shape[2], q.device, is_causal, document_ends, version, **masks)


# One mask: it grows with the square of the length. The key of a tensor is the tensor itself. A mask made under
# `torch.inference_mode` could not be saved for a backward pass later.
@functools.lru_cache(maxsize=1)
@torch.inference_mode(False)
def _remembered_mask(
    queries: int, keys: int, device: torch.device, is_causal: bool, document_ends: Tensor | None, _version: object,
    **masks: Any,
) -> Tensor:  # fmt: skip
    hidden = visible_keys(queries, keys, device, is_causal, document_ends=document_ends, **masks).hidden(slice(0, keys))
    assert hidden is not None
    return ~hidden


def _compiled_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, **options: Any) -> Any:
    if torch.compiler.is_compiling():
        return attention(q, k, v, is_causal, **options)
    # In a compiled function errors are Dynamo's, and the values of documents unknown.
    check_inputs(q, k, v, any_width=True)
    check_options(*(options.get(name) for name in ("scale", "window", "softcap")))
    if (document_ends := options.get("document_ends")) is not None:
        check_documents(q.shape[-2], k.shape[-2], q.device, document_ends)
    with each_size_compiled():
        return compiling.compiled(attention)(q, k, v, is_causal, **options)


def _flex(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, *, scale: float | None = None,
    softcap: float | None = None, document_ends: Tensor | None = None, return_lse: bool = False, **masks: Any,
) -> Any:  # fmt: skip
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    check_inputs(q, k, v, any_width=True, with_heads=True)
    check_options(scale, masks.get("window"), softcap)
    if q.shape[-1] < 16:
        raise RuntimeError(f"{NO_KERNEL}: FlexAttention takes head dimensions from 16 on")
    if document_ends is not None:
        check_documents(q.shape[2], k.shape[2], q.device, document_ends)
    band, version = band_of(q.shape[2], k.shape[2], is_causal, **masks), version_of(document_ends)
    group = q.shape[1] // k.shape[1]
    # Below 128 queries, torch chooses its kernel for decoding. That has all rows of a group in one tile, and torch 2.11
    # to 2.13 find no kernel at all if there are more than 128.
    is_too_high = q.shape[2] < 128 < q.shape[2] * group
    with each_size_compiled():
        result = compiling.compiled(flex_attention)(
            q, k, v,
            score_mod=None if softcap is None else _capped(softcap),
            block_mask=_visible_blocks(q.shape[2], k.shape[2], q.device, band, document_ends, version),
            scale=scale, enable_gqa=group > 1, kernel_options={"BACKEND": "TRITON"} if is_too_high else None,
            return_aux=AuxRequest(lse=True) if return_lse else None,
        )  # fmt: skip
    return (result[0], result[1].lse) if return_lse else result


@functools.cache
def _capped(softcap: float) -> Any:
    def cap(score: Tensor, _batch: Tensor, _head: Tensor, _query: Tensor, _key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


@functools.lru_cache(maxsize=1)
@torch.inference_mode(False)
def _visible_blocks(
    queries: int, keys: int, device: torch.device, band: Band, document_ends: Tensor | None, _version: object
) -> Any:
    from torch.nn.attention.flex_attention import and_masks, create_block_mask

    (lower, upper), visible = band, []
    if upper is not None:
        visible.append(lambda _batch, _head, query, key: query + upper >= key)
    if lower is not None:
        visible.append(lambda _batch, _head, query, key: query + lower <= key)
    if document_ends is not None:
        number = documents_of(document_ends, keys)
        visible.append(lambda _batch, _head, query, key: number[query] == number[key])
    if not visible:
        return None
    return create_block_mask(and_masks(*visible), None, None, queries, keys, device=device)


eager = Implementation("eager", attention, {"cpu": ALL, "cuda": ALL}, features=FEATURES)
compiled = Implementation("compiled", _compiled_attention, {"cpu": ALL, "cuda": ALL}, features=FEATURES)
flex = Implementation("flex", _flex, {"cuda": SINGLE_AND_HALF}, features=FEATURES)
sdpa_math = Implementation("sdpa_math", _fused(SDPBackend.MATH), {"cpu": ALL, "cuda": ALL}, features=MASKED)
sdpa_flash = Implementation(
    "sdpa_flash", _fused(SDPBackend.FLASH_ATTENTION), {"cpu": ALL, "cuda": HALF}, features=MASKED
)
sdpa_efficient = Implementation(
    "sdpa_efficient", _fused(SDPBackend.EFFICIENT_ATTENTION), {"cuda": SINGLE_AND_HALF}, features=MASKED
)
sdpa_cudnn = Implementation("sdpa_cudnn", _fused(SDPBackend.CUDNN_ATTENTION), {"cuda": HALF}, features=MASKED)
