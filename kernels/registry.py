"""Implementations by name: built in, or installed as entry points.

The installed entry points are the allow-list: a name from a request is looked up in it, and never imported as a module.
Names are listed from metadata, without importing the implementations, so the agent lists them without torch.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

    from .attention.problem import AttentionProblem

AttentionFunction: TypeAlias = "Callable[..., Tensor]"
"""(q, k, v, is_causal, **options) -> output, each (batch, heads, sequence, head_dim), aligned as in
`kernels.attention`. The options are those of `AttentionProblem.options`, of which it takes what its `features` name;
with `return_lse`, it returns (output, lse)."""
FEATURES: Final = frozenset(
    {"bottom_right", "document_lengths", "num_kv_heads", "return_lse", "scale", "softcap", "window"}
)
"""What a problem of attention may need beside `is_causal`: fields of `AttentionProblem`."""
DEVICES: Final = frozenset({"cpu", "cuda"})
"""Types of devices that jobs can ask for."""
DTYPES: Final = frozenset({"float64", "float32", "bfloat16", "float16"})
"""Data types that an implementation may support. Only tests use float64."""
_HERE = __name__.rpartition(".")[0]
Vary: TypeAlias = "Callable[..., Sequence[Tensor]]"
"""Normally distributed float32 inputs -> inputs of the same shapes; it may change those it gets."""


class RegistryError(Exception):
    """Base of this module's errors."""


class UnknownName(RegistryError):
    """No such implementation here; the message lists the known ones."""


class DuplicateName(RegistryError):
    """Two implementations claim one name."""


class BrokenEntryPoint(RegistryError):
    """An installed implementation could not be loaded."""


class Registry:
    """The implementations of one kind of thing.

    Args:
        what: Their name in messages: "attention implementation".
        group: Entry-point group for implementations of other packages.
        built_in: The project's own implementations: name -> "module:attribute".
        check: Called with each name and the object loaded for it; raises TypeError if it is not of that kind.
    """

    def __init__(
        self,
        what: str,
        group: str,
        built_in: Mapping[str, str],
        check: Callable[[str, object], None] = lambda _name, _loaded: None,
    ) -> None:
        self.what = what
        self.group = group
        self._check = check
        self._built_in = {name: EntryPoint(name, value, group) for name, value in built_in.items()}

    def names(self) -> tuple[str, ...]:
        """Return all names, sorted, without importing the implementations.

        Raises:
            DuplicateName: two entry points, or an entry point and a built-in implementation, have one name.
        """
        return tuple(sorted(self._entries))

    def load(self, name: str) -> Any:
        """Import and return the object of this name.

        Raises:
            UnknownName: no implementation has this name.
            BrokenEntryPoint: importing it failed, or the object is not of the right kind.
        """
        # Built-in ones first: reading every installed distribution's metadata takes tens of milliseconds.
        entry = self._built_in.get(name) or self._entries.get(name)
        if entry is None:
            raise UnknownName(f"unknown {self.what} {name!r}; known are {_listed(name, self.names())}")
        try:
            loaded = entry.load()
            self._check(name, loaded)
        except Exception as error:
            raise BrokenEntryPoint(
                f"{self.what} {name!r} (entry point {entry.value!r} of group {self.group!r}) could not be loaded: "
                f"{type(error).__name__}: {error}"
            ) from error
        return loaded

    @functools.cached_property
    def _entries(self) -> Mapping[str, EntryPoint]:
        entries = dict(self._built_in)
        for entry in entry_points(group=self.group):
            known = entries.setdefault(entry.name, entry)
            if known.value != entry.value:
                raise DuplicateName(
                    f"two {self.what}s are called {entry.name!r}: {known.value!r} and {entry.value!r}; uninstall one"
                )
        return entries


@dataclass(frozen=True)
class Implementation:
    """One way to compute attention, or another operation, and where it works."""

    name: str
    function: AttentionFunction | Callable[..., Tensor]
    dtypes: Mapping[str, frozenset[str]]
    """Supported data types ("float32", "bfloat16", …) by device type ("cpu", "cuda")."""
    has_backward: bool = True
    features: frozenset[str] = frozenset()
    """Of attention: the `FEATURES` that it takes."""
    forward_bytes: Callable[..., tuple[int, int]] | None = None
    """(batch, heads, length, head_dim, **block_sizes) -> bytes of working memory, and of the output, of one forward
    call; None if torch's allocator knows them."""
    of: str = "attention"
    """The operation that it computes, for messages."""

    @property
    def devices(self) -> frozenset[str]:
        """The device types that it runs on."""
        return frozenset(self.dtypes)

    def why_not(
        self, device: str, dtype: str, *, backward: bool, problem: AttentionProblem | None = None
    ) -> str | None:
        """Return why it cannot run with these inputs; None if it can."""
        if device not in self.dtypes:
            return f"{self.of} {self.name!r} does not run on {device}, only on {', '.join(sorted(self.dtypes))}"
        if dtype not in self.dtypes[device]:
            return (
                f"{self.of} {self.name!r} does not take {dtype} on {device}: {', '.join(sorted(self.dtypes[device]))}"
            )
        if backward and not self.has_backward:
            return f"{self.of} {self.name!r} has no backward pass: use mode forward or generate"
        if problem is not None and (missing := problem.features - self.features):
            return f"{self.of} {self.name!r} does not take {', '.join(sorted(missing))}"
        return None


@dataclass(frozen=True)
class Kernel:
    """An operation on a matrix of rows and columns, its plain PyTorch, and kernels that replace that."""

    name: str
    shapes: Callable[[int, int], Sequence[tuple[int, ...]]]
    """(rows, columns) -> the shapes of the inputs, which are normally distributed."""
    plain: Callable[..., Tensor]
    """Inputs -> one output. Implementation `torch`."""
    kernels: Sequence[Implementation] = ()
    """Further implementations: functions of the same inputs, which autograd differentiates."""
    reads_inputs_backward: bool = True
    """False: the inputs' gradients do not depend on the inputs, so a backward pass need not read them."""
    variations: Mapping[str, Vary] = field(default_factory=dict)
    """Further inputs for which results are checked, by the names that messages use: those that show faults which
    normally distributed ones hide. {}: others that are normally distributed."""
    slope: float | None = None
    """Largest deviation of the slope in half precision, if rounding has a bias here; see kernels/tolerance.py."""
    rounding_of_position: float = 0.0
    """Where rows are positions: by how much of itself the limit of float32 results grows with each; see `cancelling` in
    kernels/tolerance.py."""

    def moved(self, inputs: int, output: int) -> tuple[int, int]:
        """Return how much each pass has to read and write, in the unit of the sizes: forward, and backward.

        Args:
            inputs: Size of all inputs together.
            output: Size of the output.
        """
        read_again = inputs if self.reads_inputs_backward else 0
        return inputs + output, read_again + output + inputs

    def implementation(self, name: str) -> Implementation:
        """Return an implementation of this operation.

        Raises:
            UnknownName: it has none of this name.
        """
        everywhere = dict.fromkeys(DEVICES, DTYPES)
        known = [Implementation("torch", self.plain, everywhere, of=self.name), *self.kernels]
        for one in known:
            if one.name == name:
                return one
        names = _listed(name, [one.name for one in known])
        raise UnknownName(f"{self.name} has no implementation {name!r}; it has {names}")

    def expected(self, inputs: Sequence[Tensor], grad_out: Tensor | None) -> list[Tensor]:
        """Return the output and, with its gradient, the inputs' gradients, in the inputs' dtype."""
        leaves = [tensor.detach().requires_grad_(grad_out is not None) for tensor in inputs]
        out = self.plain(*leaves)
        if grad_out is None:
            return [out]
        out.backward(grad_out)  # type: ignore[no-untyped-call]
        return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def _listed(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return ", ".join(known) + (f"; did you mean {near[0]}?" if near else "")


def _check_kernel(name: str, loaded: object) -> None:
    """Check its fields. Raises TypeError: a field is wrong."""
    if not isinstance(loaded, Kernel):
        raise TypeError(f"expected a {__name__}.Kernel, not {type(loaded).__name__}")
    if loaded.name != name:
        raise TypeError(f"its name is {loaded.name!r}: results would carry that; name it as its entry point")
    for one in loaded.kernels:
        _check_implementation(getattr(one, "name", ""), one)


def _check_implementation(name: str, loaded: object) -> None:
    """Check the fields that a worker reports before it runs anything: it may come from another package. Raises
    TypeError: one is wrong."""
    if not isinstance(loaded, Implementation):
        raise TypeError(f"expected a {__name__}.Implementation, not {type(loaded).__name__}")
    if loaded.name != name:
        raise TypeError(f"its name is {loaded.name!r}: results would carry that; name it as its entry point")
    dtypes = loaded.dtypes
    if not (isinstance(dtypes, Mapping) and dtypes and dtypes.keys() <= DEVICES
            and all(isinstance(names, Set) and names <= DTYPES for names in dtypes.values())):  # fmt: skip
        devices, known = (", ".join(sorted(names)) for names in (DEVICES, DTYPES))
        raise TypeError(f"dtypes must map {devices} to sets of {known}, as {{'cpu': {{'float32'}}}}, not {dtypes!r}")


_OF_MODULES = {
    "cpu.implementations": ("cpu_blocked", "cpu_flash", "cpu_fused", "cpu_naive"),
    "installed": ("flash_attn", "flash_attn_3", "flash_attn_4"),
    "library": ("compiled", "eager", "flex", "sdpa_cudnn", "sdpa_efficient", "sdpa_flash", "sdpa_math"),
}
ATTENTION = Registry(
    "attention implementation",
    "flopwatch.attention",
    {
        **{name: f"{_HERE}.attention.{module}:{name}" for module, names in _OF_MODULES.items() for name in names},
        "hopper": f"{_HERE}.attention.flash_triton:hopper_implementation",
        "tiled": f"{_HERE}.attention.tiled:implementation",
        "triton": f"{_HERE}.attention.flash_triton:implementation",
    },
    _check_implementation,
)
"""Every attention implementation; `ATTENTION.load(name)` gives its `Implementation`."""

KERNELS = Registry(
    "kernel",
    "flopwatch.kernels",
    {
        name: f"{_HERE}.operations:{name}"
        for name in ("linear_cross_entropy", "rms_norm", "rope", "swiglu", "weighted_sum")
    },
    _check_kernel,
)
"""Every other operation that kernels compute; `KERNELS.load(name)` gives its `Kernel`."""
