"""Counts torch.compile's work so far in this process: graphs, breaks, and hits of its cache on disk."""

from __future__ import annotations

import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Compilation:
    """Dynamo's and Inductor's counters at one moment."""

    graphs: int = 0
    graph_breaks: int = 0
    frames_not_compiled: int = 0
    """Functions that fell back to eager, for instance after too many recompilations."""
    cache_hits: int = 0
    cache_misses: int = 0

    @property
    def cache(self) -> str:
        """How the compile cache on disk served this process: "cold", "warm", "mixed" or "unused"."""
        if self.cache_hits and self.cache_misses:
            return "mixed"
        if self.cache_hits:
            return "warm"
        return "cold" if self.cache_misses else "unused"


def compilation() -> Compilation:
    """Return the counters' present values, zero if nothing was compiled. Does not import the compiler."""
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return Compilation()
    counters = utils.counters
    frames, caches = counters["frames"], (counters["aot_autograd"], counters["inductor"])
    return Compilation(
        graphs=counters["stats"]["unique_graphs"],
        graph_breaks=sum(counters["graph_break"].values()),
        frames_not_compiled=frames["total"] - frames["ok"],
        # After a hit in the outer cache, torch does not look into Inductor's inner one.
        cache_hits=max(caches[0]["autograd_cache_hit"], caches[1]["fxgraph_cache_hit"]),
        cache_misses=max(caches[0]["autograd_cache_miss"], caches[1]["fxgraph_cache_miss"]),
    )
