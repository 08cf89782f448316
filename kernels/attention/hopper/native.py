"""Calls that need no Python: `source/calls.cpp`, built on first use, and taught what calls of each kind launch.

Python's part of an autograd function, and of three launches, takes the host longer than the device works on short
sequences. A call that is not known yet, and every call where the library cannot be built, goes the longer way through
`kernels.launching`, which computes the same.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.building import BuildError, Library
from kernels.launching import Launch, hooks_are_set

LIBRARY = Library(
    name="flopwatch_hopper_calls",
    sources=Path(__file__).with_name("source"),
    what="calls of attention without Python",
    compiler_flags=("-std=c++20", "-O2", "-Wall", "-Wno-unknown-pragmas"),
    include_folders=(str(Path(triton.__file__).parent / "backends" / "nvidia" / "include"),),
)
DRIVER = "libcuda.so.1"

_log = logging.getLogger(__name__)


_loading = threading.Lock()
_failed = False
_known: Any | None = None
"""The library, from the first call on that it was taught."""


def _library() -> Any | None:
    """The library, built now if this host has not built it; None if that is not possible, which is logged once."""
    global _known, _failed
    with _loading:
        if _known is None and not _failed:
            try:
                loaded = load(LIBRARY.file())
                loaded.open(DRIVER, str(Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"))
                _known = loaded
            except (BuildError, ImportError, OSError, RuntimeError) as error:
                _failed = True
                _log.warning("attention's calls take the host longer than they need: %s", error)
        return _known


def load(file: Path) -> Any:
    """Import the library from its file, and let it ask Python for gradients that it does not know.

    Raises:
        ImportError: the file does not fit this Python or this torch.
    """
    loader = ExtensionFileLoader(LIBRARY.name, str(file))
    spec = spec_from_file_location(LIBRARY.name, file, loader=loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    module.differentiate_with(_differentiate)
    return module


def attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor | None:
    """Return the output, differentiable, or None for a call of an unknown kind."""
    if _known is None or hooks_are_set():
        return None
    out: Tensor | None = _known.attend(q, k, v, is_causal)
    return out


def forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor] | None:
    """Return the output and its log-sum-exp, or None for a call of an unknown kind."""
    if _known is None or hooks_are_set():
        return None
    results: tuple[Tensor, Tensor] | None = _known.forward(q, k, v, is_causal)
    return results


def gradients(
    out_gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return dq, dk and dv, or None for a call of an unknown kind."""
    if _known is None or hooks_are_set():
        return None
    results: tuple[Tensor, Tensor, Tensor] | None = _known.gradients(
        out_gradient, q, k, v, out, logsumexp, is_causal
    )  # fmt: skip
    return results


def learn_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, launch: Launch) -> None:
    """Let later calls of this kind be known, once Triton has compiled their kernel."""
    described = _described([(launch, range(5))])
    library = None if described is None else _library()
    if described is not None and library is not None:
        library.learn_forward(q, k, v, is_causal, *described)


def learn_backward(
    out_gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, is_causal: bool,
    numbers: int, is_deterministic: bool, launches: Sequence[tuple[Launch, Sequence[int]]],
) -> None:  # fmt: skip
    """As `learn_forward`.

    Args:
        numbers: Elements of the float32 buffer.
        is_deterministic: The kernels give the same bits in every run.
        launches: With the places of their tensors among q, k, v, the output's gradient, the buffer, dk, dv, dq, the
            output and its log-sum-exp.
    """
    described = _described(launches)
    library = None if described is None else _library()
    if library is not None:
        library.learn_backward(
            out_gradient, q, k, v, out, logsumexp, is_causal, numbers, is_deterministic, described
        )  # fmt: skip


def _described(launches: Sequence[tuple[Launch, Sequence[int]]]) -> list[dict[str, Any]] | None:
    described = []
    for launch, places in launches:
        one = None if launch.direct is None else launch.direct.described(places)
        if one is None:
            return None
        described.append(one)
    return described


def _differentiate(*inputs: Any) -> tuple[Tensor | None, ...]:
    """Return the gradients that are needed, of a call that the library does not know; it gives what it was given."""
    results: tuple[Tensor | None, ...] = _differentiate_once(None, *inputs)
    return results


@once_differentiable
def _differentiate_once(
    _context: None, out_gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor,
    is_causal: bool, needed: Sequence[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    from kernels.attention.flash_triton import gradients_of  # which imports this module

    return gradients_of(
        out_gradient, None, q, k, v, out, logsumexp, is_causal, False, (needed[0], needed[1], needed[2])
    )  # fmt: skip
