"""The seven categories of memory, and the categories of the storages of a model, its gradients and its optimizer.

The rule by which `ledger` gives every allocation one category:

1. Owned. At the end of each phase, storages that belong to parameters (`parameter`), to their `.grad` (`gradient`), to
   the state of the optimizer or a gradient scaler (`optimizer_state`), and to the batch or the model's buffers, such as
   tables of angles (`input`), are known. The allocation of such a storage has that category during its whole life. The
   loss that the step keeps is an `activation`.
2. `temporary`: allocated and released within one phase: results that only the phase needs, such as scores in inference,
   gradients of activations, an optimizer's intermediate results.
3. `activation`: allocated in the forward pass and alive at its end, because the backward pass needs it. This includes
   autocast's bfloat16 copies of weights, which a product saves for its backward pass.
4. `unknown`: everything else, such as the workspaces that cuBLAS allocated during the warm-up and keeps. They have a
   name where they can be identified.

So a category may be known only at the end of a phase. Activations that activation checkpointing recomputes in the
backward pass are `temporary` there.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

CATEGORIES = ("parameter", "gradient", "optimizer_state", "activation", "input", "temporary", "unknown")
UNKNOWN = CATEGORIES.index("unknown")
TEMPORARY = CATEGORIES.index("temporary")
ACTIVATION = CATEGORIES.index("activation")
FORWARD = "forward"
"""The phase after which unowned living allocations are activations."""
SPARSE = {
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices", "values")),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices", "values")),
}
"""Methods that return what a tensor of a sparse layout consists of."""


@dataclass(frozen=True)
class Owner:
    """The owner of a storage of `size` bytes. `category`: index into CATEGORIES. `name`: the tensor's; of gradients and
    optimizer state, the parameter's."""

    category: int
    name: str
    size: int


Owners = dict[int, Owner]
"""Owners by the address of their storage."""


def owners_of(
    device: torch.device,
    model: nn.Module,
    optimizers: Iterable[Optimizer] = (),
    scaler: torch.amp.GradScaler | None = None,
    inputs: Iterable[Tensor] = (),
    losses: Iterable[Tensor] = (),
    bare: Iterable[Tensor] = (),
    states: Iterable[object] = (),
) -> Owners:
    """Return the present owners of the storages on `device`. The first of several tensors with one storage owns it.
    `bare`: parameters that may be in no module. `states`: objects that hold the state of optimizers that torch does not
    know."""
    owners: Owners = {}
    optimizers = list(optimizers)
    named = list(model.named_parameters())
    of_groups = (one for optimizer in optimizers for group in optimizer.param_groups for one in group["params"])
    in_modules = {id(one) for _, one in named}
    more = {id(one): one for one in (*bare, *of_groups) if id(one) not in in_modules}
    named += [("parameter in no module", one) for one in more.values()]
    add(owners, device, "parameter", named)
    add(owners, device, "gradient", ((name, one.grad) for name, one in named if one.grad is not None))
    add(owners, device, "optimizer_state", _state(named, optimizers, scaler))
    of_objects = ((type(one).__name__, tensor) for one in states for tensor in tensors_in(vars(one)))
    add(owners, device, "optimizer_state", of_objects)
    add(owners, device, "input", (("batch", one) for one in inputs))
    add(owners, device, "input", model.named_buffers())
    add(owners, device, "activation", (("loss", one) for one in losses))
    return owners


def add(owners: Owners, device: torch.device, category: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Add the storages of named tensors on `device` that have no owner yet."""
    index = CATEGORIES.index(category)
    for name, tensor in tensors:
        if tensor.device.type != device.type:
            continue
        for part in parts_of(tensor):
            storage = part.untyped_storage()
            if storage.nbytes():
                owners.setdefault(storage.data_ptr(), Owner(index, name, storage.nbytes()))


def parts_of(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors of which one consists that have a storage: itself, those of a sparse one or those that another
    one wraps, such as a quantised weight; none of what is not made yet, or has its memory elsewhere."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from parts_of(getattr(tensor, name))
    elif tensor.layout in SPARSE:
        yield from (getattr(tensor, name)() for name in SPARSE[tensor.layout])
    elif tensor.layout is torch.strided and not is_lazy(tensor):
        yield tensor


def _state(
    named: Sequence[tuple[str, Tensor]], optimizers: Iterable[Optimizer], scaler: torch.amp.GradScaler | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that live from one optimizer step to the next."""
    for optimizer in optimizers:
        for name, parameter in named:
            yield from ((name, value) for value in tensors_in(optimizer.state.get(parameter, {})))
        for group in optimizer.param_groups:
            yield from (("learning rate", value) for value in group.values() if isinstance(value, Tensor))
    for attribute in ("_scale", "_growth_tracker"):
        value = getattr(scaler, attribute, None)
        if isinstance(value, Tensor):
            yield "gradient scale", value


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yield the tensors in containers, of which one may hold itself."""
    waiting, seen = [value], set[int]()
    while waiting:
        one = waiting.pop()
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, dict | list | tuple) and id(one) not in seen:
            seen.add(id(one))
            waiting += one.values() if isinstance(one, dict) else one
