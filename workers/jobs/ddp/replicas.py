"""Checks that the ranks of a step of the user's own hold the same model where a data-parallel wrapper promises it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from workers.measure.check import Check

if TYPE_CHECKING:
    from torch import Tensor, nn

SAMPLED = 64
"""About how many elements of a large parameter are compared."""
LIMIT = 1e-5
"""Relative difference of a parameter's elements up to which ranks agree: they add the same gradients to it."""


def samples(roots: Sequence["nn.Module"]) -> list[tuple[list[int], dict[str, list[float]]]]:
    """Return of each wrapper in these modules, torch's or ours, its ranks, and elements of each trained parameter, by
    name and shape."""
    from torch import distributed, nn

    from parallel.data_parallel import DataParallel

    found = []
    for module in (part for root in roots for part in root.modules()):
        if isinstance(module, DataParallel):
            group, trained = module.group, module.trainable
        elif isinstance(module, nn.parallel.DistributedDataParallel) and _synchronizes(module):
            named = module.module.named_parameters()
            group = module.process_group
            trained = {name: one for name, one in named if name not in module.parameters_to_ignore}
        else:
            continue
        plain = {name: one for name, one in trained.items() if type(one) is nn.Parameter and one.requires_grad}
        real = {name: one for name, one in plain.items() if one.is_floating_point() and not one.is_meta}
        elements = {f"{name} {list(one.shape)}": _elements(one) for name, one in real.items()}
        found.append((distributed.get_process_group_ranks(group), elements))
    return found


def _synchronizes(wrapper: Any) -> bool:
    """Return False if the last pass was in `no_sync`, or gradients are shared by a part of the ranks: in local SGD
    parameters differ until they are averaged."""
    hooks = (str(getattr(hook, "__name__", "")) for hook, _ in wrapper._comm_hooks)
    return wrapper.require_forward_param_sync and not any("local" in name for name in hooks)


def _elements(parameter: "Tensor") -> list[float]:
    flat = parameter.detach().reshape(-1)
    # An odd distance comes to all columns of a matrix.
    return list(flat[:: flat.numel() // SAMPLED | 1].double().tolist())


def check_replicas(ranks: Sequence[Sequence[tuple[Sequence[int], Mapping[str, Sequence[float]]]]]) -> list[Check]:
    """Name a parameter that differs between ranks, whose `samples` these are; no check if none does."""
    for rank, (group, mine) in ((rank, one) for rank, wrappers in enumerate(ranks) for one in wrappers):
        same = [its for others, its in ranks[group[0]] if others == group and its.keys() == mine.keys()]
        apart = [dict(_apart(mine, its)) for its in same]  # ranks may list wrappers in another order
        if apart and all(apart):
            name, error = max(min(apart, key=len).items(), key=lambda one: one[1])
            detail = (
                f"ranks {group[0]} and {rank} train different models: {name} differs by {error:.2g} of its norm, and "
            )
            detail += "its data-parallel wrapper means it to be equal, unless they average now and then (local SGD)"
            return [Check("replicas", False, detail)]
    return []


def _apart(mine: Mapping[str, Sequence[float]], its: Mapping[str, Sequence[float]]) -> Iterator[tuple[str, float]]:
    for name, one in mine.items():
        norm = max(math.hypot(*one), math.hypot(*its[name]))
        if (distance := math.dist(one, its[name])) > LIMIT * norm:
            yield name, distance / norm
