"""Repeated launches of Triton kernels in which only the tensors' addresses change, at little cost to the host.

A `Launch` is a kernel's launch without the addresses of its tensors. Its first call goes through Triton, which compiles
the kernel. Later calls pass the addresses directly to Triton's launcher in C. The arguments of the last calls are kept,
up to one bound per process, so that the CUDA driver encodes the copy engine's descriptors only once for each address.
The launcher is a private interface of Triton, so it is used only with the versions that it was verified with; with
others, in the interpreter, and while launch hooks are set (profilers set them), each call goes through Triton.

A descriptor holds an address and no memory: it stays valid when the memory is freed and allocated again. The launcher
copies descriptors when it launches, also into a CUDA graph.
"""

from __future__ import annotations

import functools
import struct
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .versions import is_verified

REMEMBERED_CALLS = 2048
"""Number of calls, of all launches together, whose arguments are kept, up to 3 KiB each. Enough for a model's step."""
ALIGNMENT = 16
"""Triton compiles one kernel for addresses that are multiples of this, and another one for other addresses."""


@dataclass(frozen=True)
class Address:
    """Argument of a kernel: an address in a tensor, which `place` gives as an index into the tensors of a call."""

    place: int
    offset: int = 0
    """In elements of the tensor, which then is contiguous."""

    def of(self, tensor: Tensor) -> Tensor:
        """Return the tensor, or the part of it from the offset on."""
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
        """Return the window of a tensor with a contiguous last axis. The stride of an axis of length 1 may be anything
        in torch; a descriptor needs a valid one."""
        steps = [step if length > 1 else ALIGNMENT for length, step in zip(shape[:-1], strides[:-1], strict=True)]
        return cls(place, tuple(shape), (*steps, 1), tuple(block), layout, offset)

    def of_tensor(self, tensor: Tensor) -> Any:
        """Return Triton's descriptor of a tensor."""
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
        """True if Triton's launcher refused the arguments."""

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        """Launch on the current device and stream."""
        direct = self._direct
        if direct is not None and not hooks_are_set():
            try:
                if direct.launch(tuple([tensor.data_ptr() for tensor in tensors])):
                    return
            except (TypeError, AttributeError):  # nothing was launched: this Triton's launcher has another signature
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


class _Direct:
    """A compiled kernel, called without Triton's checks."""

    def __init__(
        self, compiled: Any, launcher: Any, raw: Any, arguments: Sequence[Any], grid: int, tensors: Sequence[Tensor]
    ) -> None:
        self._raw, self._arguments, self._device = raw, tuple(arguments), tensors[0].device
        self._compiled, self._overlaps = compiled, bool(launcher.launch_pdl)
        self._sizes = tuple(tensor.element_size() for tensor in tensors)
        self._metas = tuple(getattr(compiled.metadata, "tensordesc_meta", None) or ())
        self._head = grid, 1, 1
        self._function = compiled.function
        self._is_cooperative = launcher.launch_cooperative_grid
        scratch = hooks = (None, None)
        options = (launcher.launch_cooperative_grid, launcher.launch_pdl)
        metadata = (compiled.packed_metadata, None, *hooks)
        self._annotations = getattr(launcher, "arg_annotations", None)
        """Of Triton 3.7, whose launcher takes all arguments of the kernel in one list; None in 3.6."""
        self._middle: tuple[Any, ...]
        if self._annotations is None:
            self._middle = (*options, *scratch, *metadata)
        else:
            self._middle = (*options, *metadata, *scratch, self._annotations, launcher.kernel_signature)

    @classmethod
    def of(cls, compiled: Any, arguments: Sequence[Any], grid: int, tensors: Sequence[Tensor]) -> _Direct | None:
        """Return a direct call of a kernel; None if that is not possible here."""
        device = tensors[0].device
        if device.type != "cuda" or compiled is None or not is_verified():
            return None
        launcher = getattr(compiled, "run", None)
        raw = getattr(launcher, "launch", None)
        if isinstance(raw, types.FunctionType) and "launcher" in raw.__code__.co_freevars:
            # This launcher makes descriptors of tensors, and calls the launcher in C.
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
        arguments = expanded if self._annotations is None else (expanded,)
        self._raw(*self._head, stream, self._function, *self._middle, *arguments)
        return True

    def expand(self, addresses: tuple[int, ...]) -> tuple[Any, ...] | None:
        """Return the kernel's arguments in the launcher's form; None if it was not compiled for such addresses."""
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

    def described(self, places: Sequence[int]) -> dict[str, Any] | None:
        """Describe the launch for `hopper/source/calls.cpp`: everything that the launcher passes to the driver.

        Args:
            places: For each tensor of this launch, its index among the tensors of the call.

        Returns:
            The description; None if the kernel needs more than it can contain.
        """
        warps, blocks_of_a_cluster, shared_bytes = self._compiled.packed_metadata
        if blocks_of_a_cluster != 1 or self._is_cooperative:
            return None
        parameters: list[tuple[Any, ...]] = []
        metas = iter(self._metas)
        for kind, argument in _flat(tuple(self._compiled.src.signature.values()), self._arguments):
            if isinstance(argument, Window):
                parameters += self._described_window(argument, places[argument.place], next(metas))
            elif isinstance(argument, Address):
                bytes_in = argument.offset * self._sizes[argument.place]
                parameters.append(("address", places[argument.place], bytes_in))
            elif kind in INTEGERS:
                parameters.append(("value", argument & 0xFFFF_FFFF_FFFF_FFFF))
            elif kind == "fp32":
                parameters.append(("value", int.from_bytes(struct.pack("<f", argument), "little")))
            else:
                return None
        return {
            "function": self._function, "grid": self._head[0], "threads": 32 * warps, "shared_bytes": shared_bytes,
            "overlaps": self._overlaps, "parameters": parameters,
        }  # fmt: skip

    def _described_window(self, window: Window, place: int, meta: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

        size = meta["elem_size"]
        descriptor = (
            *("window", place, window.offset * self._sizes[window.place]),
            *(TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]], meta["swizzle"]),
            *(window.shape, [size * step for step in window.strides], meta["block_size"]),
        )
        return [descriptor, *(("value", number) for number in (*window.shape, *window.strides))]


INTEGERS = frozenset({"i1", "i8", "i16", "i32", "i64", "u1", "u8", "u16", "u32", "u64"})
"""Triton's names of types that a launcher passes unchanged."""


def _flat(kinds: Sequence[Any], arguments: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Return a kernel's run-time arguments with their types; the elements of tuples are separate arguments."""
    for kind, argument in zip(kinds, arguments, strict=True):
        if isinstance(kind, tuple):
            yield from _flat(kind, argument)
        elif kind != "constexpr":
            yield kind, argument


@functools.lru_cache(maxsize=REMEMBERED_CALLS)
def _expanded(direct: _Direct, addresses: tuple[int, ...]) -> tuple[Any, ...] | None:
    return direct.expand(addresses)


class _Place:
    """A window at an address, with the attributes that Triton's `make_tensordesc_arg` reads."""

    padding = "zero"
    round_f32_to_tf32 = False

    def __init__(self, window: Window, address: int) -> None:
        self.base, self._address = self, address
        self.shape, self.strides = list(window.shape), list(window.strides)

    def data_ptr(self) -> int:
        return self._address


def hooks_are_set() -> bool:
    """Return True if Triton has launch hooks, such as a profiler's; each launch must then go through Triton."""
    hooks = triton.knobs.runtime
    return bool(getattr(hooks.launch_enter_hook, "calls", True) or getattr(hooks.launch_exit_hook, "calls", True))


_thread = threading.local()


def make_context_current(device: torch.device) -> None:
    """Make sure that this thread has a CUDA context, which the driver needs to fill descriptors. A thread gets one with
    its first call of the CUDA runtime; a new thread that got all memory from torch's cache has made no such call."""
    known = _thread.__dict__.setdefault("devices", set())
    if device.type == "cuda" and device not in known:
        torch.cuda.mem_get_info(device)  # a call that is allowed even while a graph is captured
        known.add(device)
