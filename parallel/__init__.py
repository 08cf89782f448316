"""Collectives and data parallelism.

Nothing here may import the service (app) or workers, and of kernels only its clocks: the package works on any host with
torch alone. Only process_group starts ranks, and only from inside a job's process. The wrappers work in any initialised
process group, however its ranks were started. torch is imported with the first attribute, not with the package.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import accounting, collectives, process_group, scaling
    from .collectives import recorded
    from .data_parallel import BucketedDataParallel, FlatDataParallel, NaiveDataParallel, OverlappedDataParallel
    from .fully_sharded import FullyShardedDataParallel
    from .process_group import Rank, RanksFailed, RanksTimedOut, launch
    from .sharded_optimizer import ShardedOptimizer
    from .uneven import in_step

__all__ = [
    "BucketedDataParallel",
    "FlatDataParallel",
    "FullyShardedDataParallel",
    "NaiveDataParallel",
    "OverlappedDataParallel",
    "Rank",
    "RanksFailed",
    "RanksTimedOut",
    "ShardedOptimizer",
    "accounting",
    "collectives",
    "in_step",
    "launch",
    "node_ranks",
    "nodes",
    "process_group",
    "recorded",
    "scaling",
]

_OF_MODULES = {
    "collectives": ["recorded"],
    "data_parallel": ["BucketedDataParallel", "FlatDataParallel", "NaiveDataParallel", "OverlappedDataParallel"],
    "fully_sharded": ["FullyShardedDataParallel"],
    "process_group": ["Rank", "RanksFailed", "RanksTimedOut", "launch"],
    "sharded_optimizer": ["ShardedOptimizer"],
    "uneven": ["in_step"],
}
_HOMES = {name: f".{module}" for module, names in _OF_MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name], __name__), name)
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
