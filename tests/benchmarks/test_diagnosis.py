"""The judge of diagnoses, with tables whose truth is known."""

from typing import Any

import pytest

from app.specs import KINDS
from benchmarks.diagnosis import __main__ as program
from benchmarks.diagnosis import planted
from benchmarks.diagnosis.__main__ import CASES, Case, Diagnosis, judged, marked
from workers.changes import CHANGES

OPTIMIZER = next(case for case in CASES if case.name == "optimizer")
(LINE,) = marked(OPTIMIZER.marks)


def cause(name: str, rank: int, lost: float, where: str | None = None) -> dict[str, Any]:
    return {"cause": name, "rank": rank, "lost_ms": lost, "lost_percent": lost, "where": where}


def change(name: str, cause: str, ratio: float, verdict: str = "better") -> dict[str, Any]:
    return {"change": name, "cause": cause, "ratio": ratio, "verdict": verdict, "how": "why not"}


def said(causes: list[dict[str, Any]], changes: list[dict[str, Any]]) -> Diagnosis:
    return Diagnosis("optimizer", 7, causes, changes)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_case_has_its_step_and_its_lines(case: Case) -> None:
    if "model" in case.step:
        backend = {"backend": "nccl"} if case.of_ranks else {}
        KINDS[case.kind].model_validate({**case.step, "device": "cuda", **backend})
    else:
        assert callable(getattr(planted, case.name))
    assert bool(marked(case.marks)) == bool(case.marks)
    assert {*case.cures, *case.bounds, *([case.refused] if case.refused else [])} <= set(CHANGES.names())


def test_a_diagnosis_is_judged_by_cause_line_and_cure() -> None:
    causes = [
        cause("kernels", 1, 50, f"planted.py:{LINE} Training.step"),
        cause("optimizer", 2, 30, f"planted.py:{LINE - 2}-{LINE} Training.step (line 3: 200 times a step)"),
    ]
    row = judged(OPTIMIZER, said(causes, [change("fused_optimizer", "optimizer", 0.75)]))
    assert (row["found"], row["named"], row["cured"]) == ("yes, 2", "yes, 2", "fused_optimizer × 0.750")
    causes[1] |= {"where": f"planted.py:{LINE + 1} Training.step"}
    row = judged(OPTIMIZER, said(causes, [change("fused_optimizer", "optimizer", 0.75, "inconclusive")]))
    assert (row["found"], row["named"], row["cured"]) == ("yes, 2", "no", "no, but once fused_optimizer × 0.750")
    row = judged(OPTIMIZER, said(causes[:1], [change("no_optimizer", "optimizer", 0.5)]))
    assert (row["found"], row["named"], row["cured"]) == ("no", "no", "no")


def test_negatives_tell_gains_wrong_causes_and_what_was_not_refused() -> None:
    fast, gaps, uncaptured = Case("fast"), Case("gaps", never=program.LATE_HOST), Case("un", refused="cuda_graph")
    assert judged(fast, said([], []))["cured"].startswith("no gain")
    assert judged(fast, said([], [change("tf32", "kernels", 0.9)]))["cured"] == "gains: tf32 × 0.900"
    assert judged(gaps, said([cause("launches", 1, 20)], []))["found"] == "wrongly launches"
    assert judged(uncaptured, said([], [change("cuda_graph", "launches", 0.9)]))["cured"] == "cuda_graph not refused"
    refused = change("cuda_graph", "launches", 1.0, "refused")
    assert judged(uncaptured, said([], [refused]))["cured"] == "refused: why not"
