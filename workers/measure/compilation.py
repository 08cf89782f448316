"""Counts what torch.compile has done so far in this process: graphs, their breaks, and hits of its cache on disk."""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_REASONS = 5
"""Most reasons of graph breaks that are listed, the most frequent first."""
MAX_REASON = 200
"""Most characters of a reason."""


@dataclass(frozen=True)
class Compilation:
    """Dynamo's and Inductor's counters at one moment."""

    graphs: int = 0
    graph_breaks: int = 0
    frames_not_compiled: int = 0
    """Functions that fell back to eager, for instance after too many recompilations."""
    cache_hits: int = 0
    cache_misses: int = 0
    break_reasons: Sequence[str] = ()
    """Why graphs broke and in which line: at most MAX_REASONS different ones, each with its number."""

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
        break_reasons=_break_reasons(utils),
    )


def _break_reasons(utils: Any) -> tuple[str, ...]:
    reasons = Counter(_reason(one) for one in getattr(utils, "graph_break_reasons", ()) if one.graph_break)
    listed = [f"{number} × {reason}" for reason, number in reasons.most_common(MAX_REASONS)]
    more = len(reasons) - len(listed)
    return (*listed, *([f"and {more} more reasons"] if more else []))


def _reason(graph_break: Any) -> str:
    """Return the reason of a torch._dynamo.output_graph.GraphCompileReason, without its hints, and its line of code."""
    lines = [line.strip() for line in graph_break.reason.splitlines()]
    explained = [line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")]
    text = ": ".join([*lines[:1], *explained[:1]])
    text = text if len(text) <= MAX_REASON else f"{text[:MAX_REASON]}…"
    if not graph_break.user_stack:
        return text
    frame = graph_break.user_stack[-1]
    return f"{text} ({Path(frame.filename).name}:{frame.lineno}, in {frame.name})"
