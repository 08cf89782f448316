"""Launches of Triton kernels that are repeated with other addresses only, at little cost to the host.

A `Launch` is all of a kernel's launch but the addresses of its tensors. Its first call goes through Triton, which
compiles the kernel. Later ones hand the addresses straight to Triton's launcher in C, and keep what it was given in the
last calls: the copy engine's descriptors, which the CUDA driver encodes, are made once for each address. One bound
holds for what a process keeps. That is a private interface of Triton, so it is used with the version that it was read
in only; elsewhere, in the interpreter, and while launch hooks are set (profilers set them), each call goes through
Triton.

A descriptor holds an address and no memory: it stays right when the memory is freed and given out again. The launcher
copies descriptors when it launches, also into a CUDA graph.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

KNOWN_VERSIONS = ("3.6.",)
"""Begin of the Triton versions whose launcher is called directly."""
REMEMBERED_CALLS = 2048
"""Calls whose arguments are kept, of all launches together, up to 3 KiB each: those of a model's layers in a step."""
REMEMBERED_CHAINS = 512
"""The same, of chains of launches: each has three calls."""
ALIGNMENT = 16
"""Triton compiles for addresses that are multiples of it, and again for others."""


@dataclass(frozen=True)
class Address:
    """Argument of a kernel: an address inside a tensor, by its place among the tensors of a call."""

    place: int
    offset: int = 0
    """In elements of the tensor, which then is contiguous."""

    def of(self, tensor: Tensor) -> Tensor:
        """The tensor, or the rest of it behind the offset."""
        return tensor.view(-1)[self.offset :] if self.offset else tensor


@dataclass(frozen=True)
class Window:
    """Argument of a kernel: a descriptor, through which the copy engine moves blocks of a tensor."""

    place: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]
    layout: Any = None
    """The block's layout in shared memory, for kernels in Gluon."""
    offset: int = 0
    """As of an `Address`."""

    @classmethod
    def of(
        cls,
        place: int,
        shape: Sequence[int],
        strides: Sequence[int],
        block: Sequence[int],
        layout: Any = None,
        offset: int = 0,
    ) -> Window:
        """Window of a tensor with a contiguous last axis. The step along an axis of length 1 is never taken and may be
        anything in torch, but not here.
        """
        steps = [step if length > 1 else ALIGNMENT for length, step in zip(shape[:-1], strides[:-1], strict=True)]
        return cls(place, tuple(shape), (*steps, 1), tuple(block), layout, offset)

    def of_tensor(self, tensor: Tensor) -> Any:
        """Triton's descriptor of a tensor."""
        if self.offset:
            tensor = tensor.view(-1)[self.offset :]
        parts = tensor, list(self.shape), list(self.strides), list(self.block)
        if self.layout is None:
            return TensorDescriptor(*parts)
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

        return GluonDescriptor(*parts, self.layout)


class Launch:
    """One kernel on tensors of given dtypes, shapes and strides."""

    def __init__(self, kernel: Any, grid: int, arguments: Sequence[Any], options: Mapping[str, Any]) -> None:
        """Prepare a launch.

        Args:
            kernel: A `triton.jit` or `gluon.jit` function.
            grid: Number of programs.
            arguments: Positional arguments; an `Address` or a `Window` stands for a tensor.
            options: Constants of the kernel, and options of the launch.
        """
        self._kernel, self._grid = kernel, grid
        self._arguments, self._options = tuple(arguments), dict(options)
        self._windows = any(isinstance(argument, Window) for argument in arguments)
        self._direct: _Direct | None = None
        self._refused = False
        """True if Triton's launcher did not take what it was handed."""

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        """Launch on the current device and stream."""
        direct = self._direct
        if direct is not None and not _hooks_are_set():
            try:
                if direct.launch(tuple([tensor.data_ptr() for tensor in tensors])):
                    return
            except (TypeError, AttributeError):  # nothing was launched: it takes other arguments than were read in it
                self._direct, self._refused = None, True
        self._through_triton(tensors)

    @property
    def direct(self) -> _Direct | None:
        """The function that calls the kernel directly, from its first launch on, if that is possible."""
        return self._direct

    def _through_triton(self, tensors: Sequence[Tensor]) -> None:
        if self._windows:
            make_context_current(tensors[0].device)
        arguments = [
            argument.of(tensors[argument.place]) if isinstance(argument, Address)
            else argument.of_tensor(tensors[argument.place]) if isinstance(argument, Window)
            else argument
            for argument in self._arguments
        ]  # fmt: skip
        compiled = self._kernel[(self._grid,)](*arguments, **self._options)
        if self._direct is None and not self._refused and all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors):
            self._direct = _Direct.of(compiled, self._in_order(), self._grid, tensors)

    def _in_order(self) -> list[Any]:
        names = self._kernel.arg_names
        return [*self._arguments, *(self._options[name] for name in names[len(self._arguments) :])]


class Chain:
    """Launches behind each other on one set of tensors, at less cost to the host than one by one."""

    def __init__(self, *parts: tuple[Launch, tuple[int, ...]]) -> None:
        """Prepare a chain of launches, each with the places of its tensors among those of a call."""
        self.parts = parts
        self._refused = False

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        """Launch all on the current device and stream."""
        if not self._refused and all(launch.direct is not None for launch, _ in self.parts) and not _hooks_are_set():
            calls = _calls(self, tuple([tensor.data_ptr() for tensor in tensors]))
            if calls is not None:
                stream = torch._C._cuda_getCurrentRawStream(tensors[0].device.index)
                try:
                    for launch, head, rest in calls:
                        launch(*head, stream, *rest)
                except (TypeError, AttributeError):  # it takes other arguments than were read in it
                    self._refused = True
                else:
                    return
        for launch, places in self.parts:
            launch([tensors[place] for place in places])


@functools.lru_cache(maxsize=REMEMBERED_CHAINS)
def _calls(chain: Chain, addresses: tuple[int, ...]) -> list[tuple[Any, tuple[Any, ...], tuple[Any, ...]]] | None:
    """The arguments of each launcher of a chain, before and after the stream."""
    calls = []
    for launch, places in chain.parts:
        direct = launch.direct
        call = None if direct is None else direct.call(tuple([addresses[place] for place in places]))
        if call is None:
            return None
        calls.append(call)
    return calls


class _Direct:
    """A compiled kernel, called without Triton's checks."""

    def __init__(
        self, compiled: Any, launcher: Any, raw: Any, arguments: Sequence[Any], grid: int, tensors: Sequence[Tensor]
    ) -> None:
        self._raw, self._arguments, self._device = raw, tuple(arguments), tensors[0].device
        self._sizes = tuple(tensor.element_size() for tensor in tensors)
        self._metas = tuple(getattr(compiled.metadata, "tensordesc_meta", None) or ())
        self._head = grid, 1, 1
        self._function = compiled.function
        scratch = hooks = (None, None)
        launch_metadata = None
        self._middle = (
            *(launcher.launch_cooperative_grid, launcher.launch_pdl, *scratch),
            *(compiled.packed_metadata, launch_metadata, *hooks),
        )

    @classmethod
    def of(cls, compiled: Any, arguments: Sequence[Any], grid: int, tensors: Sequence[Tensor]) -> _Direct | None:
        """The function that calls a kernel directly; None if that is not possible here."""
        device = tensors[0].device
        if device.type != "cuda" or compiled is None or not triton.__version__.startswith(KNOWN_VERSIONS):
            return None
        launcher = getattr(compiled, "run", None)
        raw = getattr(launcher, "launch", None)
        if isinstance(raw, types.FunctionType) and "launcher" in raw.__code__.co_freevars:
            # It makes descriptors of tensors, and calls the one that is meant.
            raw = (raw.__closure__ or ())[raw.__code__.co_freevars.index("launcher")].cell_contents
        if launcher is None or not callable(raw) or launcher.global_scratch_size or launcher.profile_scratch_size:
            return None
        windows = sum(isinstance(argument, Window) for argument in arguments)
        metas = getattr(compiled.metadata, "tensordesc_meta", None) or ()
        if windows != len(metas) or any(meta is None for meta in metas):
            return None
        return cls(compiled, launcher, raw, arguments, grid, tensors)

    def launch(self, addresses: tuple[int, ...]) -> bool:
        """Launch, or return False if the kernel was not compiled for such addresses."""
        expanded = _expanded(self, addresses)
        if expanded is None:
            return False
        stream = torch._C._cuda_getCurrentRawStream(self._device.index)
        self._raw(*self._head, stream, self._function, *self._middle, *expanded)
        return True

    def call(self, addresses: tuple[int, ...]) -> tuple[Any, tuple[Any, ...], tuple[Any, ...]] | None:
        """Triton's launcher, and its arguments before and after the stream; None as `expand`."""
        expanded = self.expand(addresses)
        return None if expanded is None else (self._raw, self._head, (self._function, *self._middle, *expanded))

    def expand(self, addresses: tuple[int, ...]) -> tuple[Any, ...] | None:
        """The kernel's arguments as the launcher takes them; None if it was not compiled for such addresses."""
        if any(address % ALIGNMENT for address in addresses):
            return None
        from triton.backends.nvidia.driver import make_tensordesc_arg

        metas = iter(self._metas)
        if self._metas:
            make_context_current(self._device)
        expanded: list[Any] = []
        for argument in self._arguments:
            if not isinstance(argument, Address | Window):
                expanded.append(argument)
                continue
            address = addresses[argument.place] + argument.offset * self._sizes[argument.place]
            assert address % ALIGNMENT == 0, "offsets are multiples of the alignment, too"
            if isinstance(argument, Address):
                expanded.append(address)
            else:
                expanded += make_tensordesc_arg(_Place(argument, address), next(metas))
        return tuple(expanded)


@functools.lru_cache(maxsize=REMEMBERED_CALLS)
def _expanded(direct: _Direct, addresses: tuple[int, ...]) -> tuple[Any, ...] | None:
    return direct.expand(addresses)


class _Place:
    """A window at an address, as Triton's `make_tensordesc_arg` reads it."""

    padding = "zero"

    def __init__(self, window: Window, address: int) -> None:
        self.base, self._address = self, address
        self.shape, self.strides = list(window.shape), list(window.strides)

    def data_ptr(self) -> int:
        return self._address


def _hooks_are_set() -> bool:
    hooks = triton.knobs.runtime
    return bool(getattr(hooks.launch_enter_hook, "calls", True) or getattr(hooks.launch_exit_hook, "calls", True))


_thread = threading.local()


def make_context_current(device: torch.device) -> None:
    """Descriptors are filled by the CUDA driver, which wants a context. A thread has one from its first call of the
    CUDA runtime on, and a new thread that finds its memory in torch's cache has made none.
    """
    known = _thread.__dict__.setdefault("devices", set())
    if device.type == "cuda" and device not in known:
        torch.cuda.mem_get_info(device)  # a call that may be made anywhere, also while a graph is captured
        known.add(device)
