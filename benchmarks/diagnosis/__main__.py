"""Diagnoses steps with a planted slowness, says what was found, named and cured, and prints the ledger of predictions.

    flopwatch up --allow-code                                       # in another terminal
    python -m benchmarks.diagnosis                                  # all cases of a GPU, or else of the CPU
    python -m benchmarks.diagnosis --only item pageable --narrow --budget-s 60
    python -m benchmarks.diagnosis --only small_fastest --repeat 20
    python -m benchmarks.diagnosis --ranks 2 --narrow --budget-s 130
    python -m benchmarks.diagnosis --job 17 18                      # diagnoses that have run, also of other steps

`--narrow` tries only the changes that a case names, which saves most of the time. `--ranks` runs the cases of that many
ranks, on as many GPUs or on the CPU; on GPUs they need a slow link, such as NCCL_P2P_DISABLE=1 in the worker's
environment makes of NVLink. The ledger has what a step would take
without a cause, by the profile or by a counterfactual, beside what a counterfactual or a cure measured. One that brings
more than was predicted proves the prediction wrong, and stands first.
"""

import argparse
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tabulate import tabulate

from benchmarks.diagnosis.busy_host import busy_beside
from flopwatch import Flopwatch
from workers.changes import CHANGES

PLANTED = Path(__file__).with_name("planted.py")
TOLERATED_PERCENT = 1.0
"""A cure may bring this much of a step more than the bound: both are measured."""
EAGER = {"context_length": 2048, "precision": "bf16", "optimizer": "torch_fused_adamw"}
OF_A_GPU = {"warmup_steps": 5, "measure_steps": 20}
LATE_HOST = frozenset({"launches", "host", "synchronisation", "input"})
FAST = {
    "context_length": 512, "precision": "bf16", "optimizer": "torch_fused_adamw", "compile": True,
    "compile_scope": "blocks", "cuda_graph": True, "attention": "sdpa_cudnn", "parameter_dtype": "bf16",
    "fused": ["linear_cross_entropy", "rms_norm", "rope"],
}  # fmt: skip
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Case:
    """A step, and what its diagnosis has to say."""

    name: str
    causes: tuple[str, ...] = ()
    """Any of these is the planted one; none: nothing is planted."""
    cures: tuple[str, ...] = ()
    """Changes of which one has to help."""
    bounds: tuple[str, ...] = ()
    """Changes that remove work, tried with `--narrow`."""
    marks: tuple[str, ...] = ()
    """The planted lines."""
    module: str = ""
    """Where our model's step is slow."""
    refused: str | None = None
    """A change that has to be refused with a reason."""
    never: frozenset[str] = frozenset()
    """Causes that would be wrong."""
    step: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the step; with `model` it is our model's."""
    devices: tuple[str, ...] = ("cuda",)
    of_ranks: bool = False
    """The step is one of several ranks."""
    busy_rank: int | None = None
    """The rank that shares a core with other processes while it trains."""

    @property
    def negative(self) -> bool:
        return not self.causes

    @property
    def kind(self) -> str:
        return "ddp" if self.of_ranks else "benchmark"

    @property
    def tried(self) -> list[str]:
        known = CHANGES.names()
        return [one for one in (*self.bounds, *self.cures, *([self.refused] if self.refused else ())) if one in known]


BOTH = ("cuda", "cpu")
OF_RANKS = {
    "model": {"d_model": 2048, "d_ff": 8192, "num_layers": 4, "num_heads": 16}, "context_length": 512,
    "optimizer": "torch_fused_adamw",
}  # fmt: skip
"""Few wide layers: a device that works for longer than its host, and gradients that travel for as long as it works."""
OF_A_CPU = {"model": {"d_model": 512, "d_ff": 2048, "num_layers": 4, "num_heads": 8}, "context_length": 16}
CASES = (
    Case("item", ("synchronisation",), (), ("no_synchronisation",), ("item",)),
    Case("loader", ("input",), ("loader_workers",), ("batches_from_memory",), ("loader",), devices=BOTH),
    Case("tiny_kernels", ("launches", "host"), ("cuda_graph",), (), ("forward",)),
    Case("printing", ("synchronisation", "host"), (), ("no_synchronisation",), ("printing",)),
    Case("pageable", ("copies", "synchronisation", "input"), ("pinned_memory",), (), ("pageable",)),
    Case("attention", ("attention",), ("fused_attention",), module="MultiHeadAttention",
         step={**EAGER, "model": {"size": "small"}, "warmup_steps": 2, "measure_steps": 8}),
    Case("optimizer", ("optimizer", "launches"), ("fused_optimizer",), ("no_optimizer",), ("optimizer",), devices=BOTH),
    Case("fp32_products", ("kernels", "precision"), ("tf32",), (), ("forward",)),
    Case("graph_break", ("synchronisation", "launches", "host"), (), ("no_synchronisation",), ("graph_break",)),
    Case("collecting", ("host", "launches"), ("gc_freeze",), (), ("collecting",)),
    Case("sorting", ("host",), (), ("no_synchronisation",), ("sorting",)),
    Case("emptying", ("synchronisation", "launches"), (), (), ("emptying",)),
    Case("threads", ("kernels",), ("threads",), (), ("threads",), devices=("cpu",)),
    Case("xl_fastest", step={**FAST, "model": {"size": "xl"}}),
    Case("small_fastest", step={**FAST, "model": {"size": "small"}}),
    Case("graph_gaps", never=LATE_HOST),
    Case("uncaptured", refused="cuda_graph"),
    Case("late_rank", ("launches", "host", "kernels"), refused="cuda_graph_model", devices=BOTH, of_ranks=True,
         busy_rank=1, module="rank 1", step={"model": {"size": "small"}, "context_length": 256}),
    Case("one_bucket", ("communication",), ("smaller_buckets",), devices=BOTH, of_ranks=True,
         module="all_reduce before optimizer", step={**OF_RANKS, "bucket_size_mb": None}),
    Case("late_gather", ("communication",), ("gather_earlier",), devices=BOTH, of_ranks=True,
         module="all_gather before", step={**OF_RANKS, "strategy": "fsdp", "prefetch": 0}),
)  # fmt: skip


@dataclass(frozen=True)
class Diagnosis:
    name: str
    number: int
    causes: Rows
    changes: Rows
    answer: Sequence[str] = ()
    failed: str | None = None

    @property
    def step_ms(self) -> float | None:
        first = next(iter(self.causes), None)
        return None if first is None else 100 * first["lost_ms"] / first["lost_percent"]


def read(server: Flopwatch, number: int, busy_rank: int | None = None) -> Diagnosis:
    """Wait for a diagnosis, and return what it says. Print how long each part takes, and keep a rank's host busy."""
    begun, shown, planted = time.monotonic(), "", ExitStack()

    def show(_done: int, _total: int, message: str) -> None:
        nonlocal shown
        if (part := message.partition(": measuring")[0]) != shown:
            shown = part
            print(f"{time.monotonic() - begun:6.1f} s  {part}", flush=True)
        if busy_rank is not None and "warming up" in message and not busy:
            busy.append(planted.enter_context(busy_beside(busy_rank)))

    busy: list[None] = []
    with planted:
        job = server.wait(number, check=False, show=show)
    name = job["name"] or f"job {number}"
    if job["state"] != "succeeded":
        return Diagnosis(name, number, (), (), failed=f"{job['state']}: {(job.get('error') or {}).get('detail')}")
    causes, changes, answer = (server.job_table_rows(job, table) for table in ("causes", "changes", "answer"))
    return Diagnosis(name, number, causes, changes, [row["answer"] for row in answer])


def submit(server: Flopwatch, case: Case, given: argparse.Namespace) -> int:
    """Submit the diagnosis of a case; returns the job's number."""
    numbers = OF_A_GPU if given.device == "cuda" else {}
    step = {"kind": case.kind, "device": given.device, **numbers, **case.step}
    if case.of_ranks:
        step |= {"world_size": given.ranks, "warmup_steps": 3, "measure_steps": 12}
        step |= {"backend": "nccl"} if given.device == "cuda" else OF_A_CPU
    spec: dict[str, Any] = {"kind": "diagnosis", "step": step, "budget_s": given.budget_s}
    if given.narrow and case.tried:
        spec["changes"] = case.tried
    own = None if "model" in step else f"{PLANTED}:{case.name}"
    return int(server.submit(spec, step=own, name=case.name)["id"])


def marked(names: Iterable[str]) -> set[int]:
    """Return the numbers of the lines in which something is planted."""
    lines = PLANTED.read_text().splitlines()
    return {at for at, line in enumerate(lines, 1) for name in names if line.endswith(f"# planted: {name}")}


def names_line(where: str | None, lines: set[int]) -> bool:
    """Return True if a cause's place ("planted.py:51-55 item.step") holds one of these lines."""
    found = re.search(r"planted\.py:(\d+)(?:-(\d+))?", where or "")
    return found is not None and any(int(found[1]) <= line <= int(found[2] or found[1]) for line in lines)


def judged(case: Case, said: Diagnosis) -> dict[str, str]:
    """Return the row of a case: was the cause found, at which rank, with its line, and the cure."""
    step = f"{said.step_ms:.4g}" if said.step_ms else "–"
    row = {"case": case.name, "job": str(said.number), "step, ms": step}
    better = [one for one in said.changes if one["verdict"] in ("better", "bound") and one["change"] != "together"]
    cures = [one for one in better if not removes(one["change"])]
    first = next(iter(said.causes), None)
    told = "–" if first is None else f"{first['cause']} {first['lost_percent']:.0f} % {first['where'] or ''}".strip()
    if said.failed:
        return {**row, "first": said.failed, "found": "–", "named": "–", "cured": "–"}
    if case.negative:
        return {**row, "first": told, **_negative(case, said, cures)}
    ranks = [one["rank"] for one in said.causes if one["cause"] in case.causes]
    lines = marked(case.marks)
    own = [one for one in said.causes if one["cause"] in case.causes]
    places = [(one["rank"], one["where"] or "") for one in own]
    with_line = [rank for rank, at in places if names_line(at, lines) or (case.module and case.module in at)]
    wanted = [one for one in better if one["change"] in (case.cures or case.bounds)]
    best = min(wanted, key=lambda one: one["ratio"], default=None)
    cured = _once(case, said) if best is None else f"{best['change']} × {best['ratio']:.3f}"
    named = f"yes, {with_line[0]}" if with_line else "no"
    return {**row, "first": told, "found": f"yes, {ranks[0]}" if ranks else "no", "named": named, "cured": cured}


def _once(case: Case, said: Diagnosis) -> str:
    """Say what a cure brought in processes that are too few for an interval."""
    tried = [one for one in said.changes if one["change"] in (case.cures or case.bounds) and one["ratio"] is not None]
    tried = [one for one in tried if one["verdict"] == "inconclusive" and one["ratio"] < 1]
    best = min(tried, key=lambda one: one["ratio"], default=None)
    return "no" if best is None else f"no, but once {best['change']} × {best['ratio']:.3f}"


def _negative(case: Case, said: Diagnosis, cures: Rows) -> dict[str, str]:
    wrong = sorted({one["cause"] for one in said.causes if one["cause"] in case.never})
    gains = [f"{one['change']} × {one['ratio']:.3f}" for one in cures]
    row = {"found": f"wrongly {', '.join(wrong)}" if wrong else "–", "named": "–"}
    if case.refused is None:
        return {**row, "cured": f"gains: {', '.join(gains)}" if gains else "no gain, as it should be"}
    why = [one["how"] for one in said.changes if one["change"] == case.refused and one["verdict"] == "refused"]
    return {**row, "cured": f"refused: {why[0]}" if why else f"{case.refused} not refused"}


def removes(change: str) -> bool:
    return change in CHANGES.names() and bool(CHANGES.load(change).removes)


@dataclass(frozen=True)
class Entry:
    """What a step would take without a cause, by a prediction, and what a change against it measured; in ms."""

    case: str
    cause: str
    step_ms: float
    by: str
    """The profile, or the counterfactual that has run."""
    predicted_ms: float
    change: str
    measured_ms: float
    once: bool
    """Too few processes have measured it for an interval."""

    @property
    def error_percent(self) -> float:
        """By how much of the step the changed one differs from the prediction; below 0 if the change brought more."""
        return 100 * (self.measured_ms - self.predicted_ms) / self.step_ms

    @property
    def wrong(self) -> bool:
        return self.error_percent < -TOLERATED_PERCENT


def entries(said: Diagnosis) -> list[Entry]:
    """Return the causes of a diagnosis against which a counterfactual has run or a change has helped."""
    if said.step_ms is None:
        return []
    lost: dict[str, float] = defaultdict(float)
    for one in said.causes:
        lost[one["cause"]] += one["lost_ms"]
    found = []
    for cause, ms in lost.items():
        by, predicted = "profile", said.step_ms - ms
        tried = [one for one in said.changes if one["cause"] == cause and one["change"] != "together"]
        helped = [one for one in tried if one["verdict"] in ("better", "bound", "inconclusive") and one["ratio"] < 1]
        for of_bounds in (True, False):
            some = [one for one in helped if removes(one["change"]) == of_bounds]
            if best := min(some, key=lambda one: one["ratio"], default=None):
                measured, once = said.step_ms * best["ratio"], best["verdict"] == "inconclusive"
                found.append(Entry(said.name, cause, said.step_ms, by, predicted, best["change"], measured, once))
                by, predicted = best["change"], measured
    return found


def ledger(found: Iterable[Entry]) -> list[dict[str, str]]:
    """Return the rows of the ledger: the wrong predictions first, then those with the largest errors."""
    ordered = sorted(found, key=lambda one: (not one.wrong, -abs(one.error_percent)))
    return [
        {
            "case": one.case,
            "cause": one.cause,
            "step, ms": f"{one.step_ms:.4g}",
            "predicted by": one.by,
            "without it": f"{one.predicted_ms:.4g}",
            "measured by": f"{one.change}{' (once)' if one.once else ''}",
            "measured": f"{one.measured_ms:.4g}",
            "error, % of the step": f"{one.error_percent:+.1f}{' wrong' if one.wrong else ''}",
        }
        for one in ordered
    ]


def print_table(title: str, rows: Sequence[Mapping[str, str]]) -> None:
    print(f"\n{title}\n\n{tabulate(rows, headers='keys', tablefmt='github', disable_numparse=True)}")


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[case.name for case in CASES])
    parser.add_argument("--device", choices=BOTH, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--budget-s", type=int, default=300)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--narrow", action="store_true")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--job", type=int, nargs="+", default=[])
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    given = options(arguments)
    of_kind = [case for case in CASES if case.of_ranks == (given.ranks > 1)]
    chosen = [case for case in of_kind if (case.name in given.only if given.only else given.device in case.devices)]
    said = []
    with Flopwatch() as server:
        told: list[tuple[int, int | None]] = [(number, None) for number in given.job] or [
            (submit(server, case, given), case.busy_rank) for case in chosen for _ in range(given.repeat)
        ]
        for number, busy_rank in told:
            said.append(read(server, number, busy_rank))
            print("", f"{said[-1].name}, job {number}", *said[-1].answer, said[-1].failed or "", sep="\n", flush=True)
    rows = [judged(case, one) for one in said for case in CASES if case.name == one.name]
    if rows:
        print_table("Planted steps", rows)
    found = [entry for one in said for entry in entries(one)]
    print_table("Ledger", ledger(found))
    if found:
        mean = sum(abs(one.error_percent) for one in found) / len(found)
        wrong = sum(one.wrong for one in found)
        print(f"\n{len(found)} predictions, {wrong} wrong; mean error {mean:.1f} % of the step")


if __name__ == "__main__":
    main()
