"""Parts of parameters, and their gradients, whose norms are those of all parts.

`torch.nn.utils.clip_grad_norm_` and `torch.amp.GradScaler` know nothing of sharding. Were parts plain tensors, each
rank would clip by the norm of its own parts, or skip a step alone, and the ranks' parts would no longer be of one
model, without an error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import _foreach_supported_types as _in_optimizers
from torch.utils._foreach_utils import _foreach_supported_types as _in_clipping
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from .collectives import start_all_reduce


class ShardedGradient(Tensor):
    """This rank's part of a gradient, as a one-dimensional tensor.

    Norms (`torch.linalg.vector_norm`, `torch.norm`, `torch.linalg.norm`, `Tensor.norm`) are those of the whole
    gradient, and GradScaler learns of infinities in any part. These communicate: every rank must call them. Other
    numbers made of a gradient, such as its mean or `gradient.isnan().any()`, would be those of a part: RuntimeError.
    Everything else computes on the part. Floating-point results of the part's own shape (`gradient / 2`,
    `gradient.detach()`), and `gradient.isnan()`, are parts, too; other results, and copies by `copy` or `pickle`, are
    plain tensors.
    """

    group: dist.ProcessGroup
    filled: int
    """Elements that are the parameter's; the others are padding, of which a penalty may make anything."""

    @classmethod
    def part_of(cls, gradient: Tensor, group: dist.ProcessGroup, filled: int) -> ShardedGradient:
        """Return a part, in the same memory, of a gradient that is divided among the group."""
        part = gradient.as_subclass(cls)
        part.group, part.filled = group, filled
        return part

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if function in _OVER_ALL_PARTS:
                for one in tree_leaves(args[0]):
                    if isinstance(one, cls) and one.filled < one.numel():
                        one.data[one.filled :].zero_()
            result = function(*args, **kwargs)
            if function in _NORMS:
                order = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p", 2))
                return _over_all_parts([args[0]], [result], order)[0]
            if function is torch._foreach_norm:
                return _over_all_parts(args[0], result, args[1] if len(args) > 1 else kwargs.get("ord", 2))
            if function is torch._amp_foreach_non_finite_check_and_unscale_:
                for group in {one.group for one in args[0] if isinstance(one, cls)}:
                    start_all_reduce(args[1], dist.ReduceOp.MAX, group).wait()
            if function in _JOINING or (isinstance(result, Tensor) and not result.dim()):
                raise RuntimeError(_PART_ONLY.format(name=function.__name__, what="gradient"))
            if function in _FINITENESS and args:
                return cls.part_of(result, args[0].group, args[0].filled)
            return result if function is Tensor.as_subclass else _parts_again(result, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.as_subclass(Tensor).clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A process group cannot be saved.
        return self.as_subclass(Tensor).clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


_stored_gradient: Any = Tensor.grad  # the attribute's descriptor, in C


DIVIDED: Any = WeakIdKeyDictionary()
"""A weak reference to the part that each parameter has become. As its attribute, it could not be pickled."""


class ShardedPart(nn.Parameter):
    """This rank's part of a parameter, in one dimension. Its gradient is a ShardedGradient, whoever wrote it: this
    package, autograd where the part is used outside the forward pass, or the caller."""

    group: dist.ProcessGroup | None = None
    """None: a parameter that is not divided, or a copy, which belongs to no model."""
    filled = 0
    """As in ShardedGradient."""
    whole: nn.Parameter | None = None
    """The full parameter, with which modules compute; None: this is a copy."""

    def dim(self) -> int:
        """Return the parameter's number of axes, by which groups of parameters are made; a part's own is 1."""
        return super().dim() if self.whole is None else self.whole.dim()

    ndim = property(dim)

    def register_hook(self, hook: Callable[[Tensor], Any]) -> Any:
        """Refuse a hook: this rank's gradient comes to the full parameter. Raises TypeError, but for a copy."""
        if self.whole is None:
            return super().register_hook(hook)  # type: ignore[no-untyped-call]
        raise TypeError(NO_HOOKS.format(name="a parameter"))

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], Any]) -> Any:
        """As `register_hook`."""
        if self.whole is None:
            return super().register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        raise TypeError(NO_HOOKS.format(name="a parameter"))

    @property
    def grad(self) -> Tensor | None:
        with torch._C.DisableTorchFunction():
            gradient: Tensor | None = _stored_gradient.__get__(self)
            if gradient is None or self.group is None or isinstance(gradient, ShardedGradient):
                return gradient
            self.grad = part = ShardedGradient.part_of(gradient, self.group, self.filled)
            return part

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        with torch._C.DisableTorchFunction():
            _stored_gradient.__set__(self, gradient)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.data, self.requires_grad).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


_PART_ONLY = (
    "{name} of a {what} that FullyShardedDataParallel has divided would be of this rank's part only, and differ from "
    "rank to rank: take a gradient's norm, which is over all parts, full_state_dict() for parameters, or "
    ".as_subclass(torch.Tensor) for the part alone"
)
NO_HOOKS = (
    "hooks do not work on {name} of a FullyShardedDataParallel, whose gradient is averaged after it has accumulated: "
    "read and change .grad after finish_gradient_synchronization()"
)


_replacing: list[Callable[[Any], Any]] = []
"""What replaces parts now: a wrapped model may call another one."""


@contextmanager
def parts_replaced(replace: Callable[[Any], Any]) -> Iterator[None]:
    """Inside, let functions of torch that are given parts take what `replace` makes of them.

    Outside, parts are as plain as parameters: what optimizers do with them goes without Python.
    """

    def replaced(value: Any) -> Any:
        for one in _replacing:
            if isinstance(value, ShardedPart):
                value = one(value)
        return value

    def call(
        cls: type, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if function not in _SAME_FOR_PARTS:
                args, kwargs = tree_map(replaced, (args, kwargs))
            if any(isinstance(leaf, ShardedPart) for leaf in tree_leaves((args, kwargs))):
                return function(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))

    before = ShardedPart.__torch_function__
    ShardedPart.__torch_function__ = classmethod(call)  # type: ignore[assignment]
    _replacing.append(replace)
    try:
        yield
    finally:
        _replacing.pop()
        ShardedPart.__torch_function__ = before  # type: ignore[method-assign]


_SAME_FOR_PARTS = {
    getattr(Tensor, name).__get__ for name in ("device", "grad", "is_cuda", "is_leaf", "layout", "requires_grad")
}
"""Getters of the attributes in which parts and full parameters agree."""


# As torch does for its DTensor: otherwise it would take the tensors one by one.
_in_optimizers.append(ShardedPart)
_in_clipping.append(ShardedGradient)


def _parts_again(result: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return a function's result, or list of results, with those of the shape of a part that it was given as parts."""
    if type(result) in (list, tuple):
        lists = args and isinstance(args[0], list | tuple) and len(args[0]) == len(result)
        # torch._foreach functions: each result is of the tensor in its place.
        return type(result)(map(_parts_again, result, zip(args[0]), repeat({}))) if lists else result
    if type(result) is Tensor and result.is_floating_point():
        leaves = tree_leaves((args, kwargs))
        # What an operation in place returns stays the tensor that it was.
        if all(leaf is not result for leaf in leaves):
            for leaf in leaves:
                if isinstance(leaf, ShardedGradient) and leaf.shape == result.shape:
                    return ShardedGradient.part_of(result, leaf.group, leaf.filled)
    return result


_NORMS = {torch.linalg.vector_norm, torch.linalg.norm, torch.norm, Tensor.norm}
_OVER_ALL_PARTS = {*_NORMS, torch._foreach_norm, torch._amp_foreach_non_finite_check_and_unscale_}
_FINITENESS = {getattr(where, name) for where in (torch, Tensor) for name in ("isfinite", "isinf", "isnan")}
"""Functions whose results are parts; of other logical results, ranks may want their own, as assert_close does."""
_JOINING = {torch.cat, torch.concat, torch.stack, torch.hstack}


_RANDOM = (
    "{name} of a {what} that FullyShardedDataParallel has divided would draw the same numbers on ranks with the same "
    "seed, for every part: initialise the model before you wrap it, or load_full_state_dict()"
)


def _unless_part_only(name: str, reason: str) -> Callable[..., Any]:
    function = getattr(Tensor, name)

    @functools.wraps(function)
    def method(part: ShardedPart, *args: Any, **kwargs: Any) -> Any:
        if part.group is not None and not _replacing:
            raise RuntimeError(reason.format(name=name, what="parameter"))
        return function(part, *args, **kwargs)

    return method


for _name in ("amax", "amin", "max", "mean", "min", "norm", "std", "var"):
    setattr(ShardedPart, _name, _unless_part_only(_name, _PART_ONLY))
for _name in ("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_"):
    setattr(ShardedPart, _name, _unless_part_only(_name, _RANDOM))


def _over_all_parts(gradients: Iterable[Tensor], norms: Iterable[Tensor], order: Any) -> list[Tensor]:
    """Return the gradients' norms from those of the parts here; plain gradients' norms stay. Raises ValueError: the
    order is not positive."""
    power = 2.0 if order in (None, "fro") else float(order)
    if not power > 0:
        raise ValueError(f"the norm of order {order} over all parts of a gradient is unknown: take a positive order")
    result = list(norms)
    places: dict[dist.ProcessGroup, list[int]] = {}
    for place, gradient in enumerate(gradients):
        if isinstance(gradient, ShardedGradient):
            places.setdefault(gradient.group, []).append(place)
    for group, mine in places.items():
        # In float32 at least: powers of float16 overflow.
        parts = torch.stack(
            [result[place].to(torch.promote_types(result[place].dtype, torch.float32)) for place in mine]
        )
        if power == float("inf"):
            start_all_reduce(parts, dist.ReduceOp.MAX, group).wait()
        else:
            parts = parts.pow_(power)
            start_all_reduce(parts, dist.ReduceOp.SUM, group).wait()
            parts = parts.pow_(1 / power)
        for place, norm in zip(mine, parts, strict=True):
            result[place] = norm.to(result[place].dtype)
    return result
