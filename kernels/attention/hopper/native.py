"""Calls from C++ (`source/calls.cpp`, built on first use), which repeat the launches that Python made for such a call.

For short sequences, the Python code of an autograd function and three launches takes the host longer than the device
needs. The first call of each kind, and every call if the library cannot be built, goes through `kernels.launching`,
which computes the same.
"""

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import triton
from torch import Tensor

from ...building import Library
from ...launching import Launch, hooks_are_set

LIBRARY = Library(
    name="flopwatch_hopper_calls",
    sources=Path(__file__).with_name("source"),
    what="attention's calls without Python",
    compiler_flags=("-std=c++20", "-O2", "-Wall", "-Wno-unknown-pragmas"),
    include_folders=(str(Path(triton.__file__).parent / "backends" / "nvidia" / "include"),),
)
DRIVER, STREAMS = "libcuda.so.1", "libtorch_cuda.so"
"""Libraries that are loaded in a process with tensors on a GPU."""

_log = logging.getLogger(__name__)
_loading = threading.Lock()
_loaded: Any | None = None
"""The library; None until a call has been registered with it."""
_failed = False
"""True if building or loading failed, so that this process does not use the library."""
_differentiate_in_python: Callable[..., tuple[Tensor | None, ...]] | None = None
"""Computes the gradients of calls that are not registered with the library; None until `begin` was called."""


def begin(differentiate: Callable[..., tuple[Tensor | None, ...]]) -> None:
    """Start to register calls with the library. The module that defines the torch operations must call this after it
    has defined them, since the library implements them.

    Args:
        differentiate: `differentiate(out_gradient, q, k, v, out, logsumexp, is_causal, tf32, needed)` returns the
            gradients of q, k and v that are needed.
    """
    global _differentiate_in_python
    _differentiate_in_python = differentiate


def _library() -> Any | None:
    """Return the library, built now if this host has not built it; None while another thread builds it."""
    global _loaded
    if _loaded is None and _loading.acquire(blocking=False):
        try:
            if _loaded is not None:  # another thread has just loaded it
                return _loaded
            _log.info("building %s, unless an earlier process has: 10 to 30 s", LIBRARY.what)
            loaded = load(LIBRARY.file())
            loaded.open(DRIVER, STREAMS)
            implement(loaded, "CUDA")
            _loaded = loaded
        finally:
            _loading.release()
    return _loaded


def load(file: Path) -> Any:
    """Import the library from its file, and pass it the Python functions for other gradients and for launch hooks.

    Raises:
        ImportError: the file does not fit this Python or this torch.
    """
    loader = ExtensionFileLoader(LIBRARY.name, str(file))
    spec = spec_from_file_location(LIBRARY.name, file, loader=loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    module.ask(functools.partial(_differentiate, None), hooks_are_set)
    return module


def implement(library: Any, device: str) -> None:
    """Make the library implement the torch operations for tensors on such a device ("CUDA").

    Compiled functions call these operations. Their implementation in Python, with its function at autograd's dispatch
    key, takes the host longer than the rest of such a call; it still runs calls that are not registered.
    """
    library.implement(device)


def attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor | None:
    """Return the output (batch, heads, queries, head_dim), differentiable; None if such calls are not registered.

    Raises:
        RuntimeError: the CUDA driver refuses a launch; the message says why.
    """
    if _loaded is None or hooks_are_set():
        return None
    out: Tensor | None = _loaded.attend(q, k, v, is_causal)
    return out


def learn_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, launch: Launch) -> None:
    """Register calls of this kind with the library, once Triton has compiled their kernel."""
    _teach([(launch, range(5))], lambda library, kernels: library.learn_forward(q, k, v, is_causal, *kernels))


def learn_backward(
    out_gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, is_causal: bool,
    numbers: int, is_deterministic: bool, launches: Sequence[tuple[Launch, Sequence[int]]],
) -> None:  # fmt: skip
    """Register backward passes of this kind with the library, once Triton has compiled their kernels.

    Args:
        numbers: Elements of the float32 buffer.
        is_deterministic: The kernels give the same bits in every run.
        launches: Launches, each with the indices of its tensors in the list q, k, v, the output's gradient, the buffer,
            dk, dv, dq, the output and its log-sum-exp.
    """
    kind = out_gradient, q, k, v, out, logsumexp, is_causal, numbers, is_deterministic
    _teach(launches, lambda library, kernels: library.learn_backward(*kind, kernels))


def _teach(
    launches: Sequence[tuple[Launch, Sequence[int]]], learn: Callable[[Any, list[dict[str, Any]]], None]
) -> None:
    """Register launches with the library. Errors are only logged: without the library, calls are slower but work."""
    global _failed
    if _failed or _differentiate_in_python is None or hooks_are_set():
        return
    try:
        kernels = _described(launches)
        library = None if kernels is None else _library()
        if kernels is not None and library is not None:
            learn(library, kernels)
    except Exception as error:  # noqa: BLE001 - of the build, the loading, or Triton's private parts
        _failed = True
        _log.warning("attention's calls go through Python, which takes the host longer: %s", error)


def _described(launches: Sequence[tuple[Launch, Sequence[int]]]) -> list[dict[str, Any]] | None:
    described = []
    for launch, places in launches:
        kernel = None if launch.direct is None else launch.direct.described(places)
        if kernel is None:
            return None
        described.append(kernel)
    return described


def _differentiate(_context: None, *inputs: Any) -> tuple[Tensor | None, ...]:
    """Compute the needed gradients of a call that is not registered, from the arguments that the library received."""
    assert _differentiate_in_python is not None
    out_gradient, q, k, v, out, logsumexp, is_causal, needed = inputs
    return _differentiate_in_python(out_gradient, q, k, v, out, logsumexp, is_causal, False, tuple(needed))
