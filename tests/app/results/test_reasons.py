import time
from typing import Any

from app.results.footnotes import MAX_REASONS, Gap, reasons

CASES: list[dict[str, Any]] = [
    {"implementation": implementation, "dtype": dtype}
    for implementation in ("eager", "triton", "flex")
    for dtype in ("fp32", "bf16")
]


def test_a_reason_is_listed_once_with_its_cells() -> None:
    gaps = [Gap(case, metric, "unsupported", "no\nGPU") for case in (2, 3) for metric in ("a", "b")]
    gaps.append(Gap(5, "a", "oom", ""))
    assert reasons(CASES, {0, 1, 4}, gaps) == ["triton (2 cells): unsupported: no GPU", "flex, bf16: oom"]


def test_all_cells() -> None:
    gaps = [Gap(case, "a", "unsupported", "no GPU") for case in (0, 1)]
    assert reasons(CASES[:2], set(), gaps) == ["all 2 cells: unsupported: no GPU"]
    assert reasons(CASES[:1], set(), gaps[:1]) == ["unsupported: no GPU"], "of one cell only the reason is news"


def test_a_hundred_of_many_reasons_are_listed() -> None:
    cases: list[dict[str, Any]] = [{"length": number, "dtype": "fp32"} for number in range(5000)]
    gaps = [Gap(case, "a", "oom", f"out of memory by {case} bytes") for case in range(5000)]
    start = time.thread_time()
    lines = reasons(cases, set(), gaps)
    assert time.thread_time() - start < 1.0  # comparing each with all takes 10 s
    assert (lines[0], len(lines)) == ("length=0: oom: out of memory by 0 bytes", MAX_REASONS + 1)
    assert lines[-1] == "and 4900 more reasons; each measurement has its own"
