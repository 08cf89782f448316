"""Collectives and data parallelism.

Nothing here may import the service (app), workers or kernels, or know of jobs, specs and databases: the package works
on any host with torch alone. Only process_group starts ranks, and only from inside a job's process. The wrappers work
in any initialised process group, whoever started its ranks. torch is imported with the first attribute, not with the
package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parallel.data_parallel import (
        BucketedDataParallel,
        FlatDataParallel,
        NaiveDataParallel,
        OverlappedDataParallel,
    )
    from parallel.fully_sharded import FullyShardedDataParallel
    from parallel.sharded_optimizer import ShardedOptimizer

__all__ = [
    "BucketedDataParallel",
    "FlatDataParallel",
    "FullyShardedDataParallel",
    "NaiveDataParallel",
    "OverlappedDataParallel",
    "ShardedOptimizer",
]

_MODULES = {
    "FullyShardedDataParallel": "parallel.fully_sharded",
    "ShardedOptimizer": "parallel.sharded_optimizer",
}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module(_MODULES.get(name, "parallel.data_parallel")), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
