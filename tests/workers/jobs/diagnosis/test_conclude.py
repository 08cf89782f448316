"""The answer of a diagnosis: its lines, in the form and the order in which a terminal shows them."""

import random
from pathlib import Path
from typing import Any

import pytest

from app.specs.diagnosis import DiagnosisSpec
from tests.workers.reporting import Report
from workers.jobs._base import Unit
from workers.jobs.diagnosis import conclude
from workers.jobs.diagnosis.conclude import MOST_LINES, TOGETHER, WIDTH, Result
from workers.jobs.diagnosis.turn import JOINED

CAUSES: list[list[Any]] = [
    [1, "optimizer", "train.py:51-55 SlowAdam.step (line 52: 17260 times a step)", 437.0, 92.0, 38.1, "measured"],
    [2, "input", "train.py:58 Data.__getitem__", 21.0, 4.4, 454.0, "measured"],
    [3, "precision", "train.py:36-38 Attention.forward", 9.0, 1.9, 466.0, "ceiling"],
]


def result(change: str, verdict: str, ratio: float | None = None, **known: Any) -> Result:
    ends = (
        {} if ratio is None else {"ratio": ratio, "low": ratio - 0.006, "high": ratio + 0.006, "step_ms": 475 * ratio}
    )
    return Result(
        **{"change": change, "cause": "optimizer", "how": f"do {change}", "verdict": verdict, **ends, **known}
    )


NOTHING = result(TOGETHER, "no_difference")


def test_each_cause_has_its_bound_and_its_line_and_the_first_of_a_kind_its_cure() -> None:
    results = [
        result("fused_optimizer", "better", 0.1, difference=2e-6),
        result("loader_workers", "better", 0.958, cause="input", difference=0.003),
        result("threads", "no_difference", 0.999),
        result("compile_model", "inconclusive", 0.97),
        result("tf32", "inconclusive", 0.5, low=None, high=None, sure=False),
        result("compile_blocks", "not_tried", reason=conclude.NO_TIME),
        result("fused_attention", "refused", reason="it has none", cause="attention"),
        result("no_optimizer", "better", 0.08, removes=True),
    ]
    together = result(TOGETHER, "better", 0.05, how="fused_optimizer + loader_workers", difference=0.0)
    assert conclude.answer("step 475 ms ± 0.4 %", CAUSES, results, together) == [
        "step 475 ms ± 0.4 %",
        "#  lost to     share  step without it",
        "1  optimizer  92.0 %  38.1 ms (35.24 … 40.96)  train.py:51-55 SlowAdam.step",
        "   line 52: 17260 times a step",
        "   -> fused_optimizer: 47.5 ms, −90.0 % (−90.6 … −89.4); 5 steps' losses equal",
        "   within 2e-06",
        "2  input       4.4 %  454 ms, timed            train.py:58 Data.__getitem__",
        "   -> loader_workers: 455 ms, −4.2 % (−4.8 … −3.6); changes the loss by up to",
        "   0.3 %",
        "3  precision   1.9 %  own work                 train.py:36-38 Attention.forward",
        "not worth it: threads −0.1 % (−0.7 … +0.5)",
        "not certain: tf32 (too few processes), compile_model −3.0 % (−3.6 … −2.4)",
        "not tried: compile_blocks (no time was left: a larger budget_s tries it)",
        "refused: fused_attention (it has none)",
        "all together (fused_optimizer, loader_workers): 23.75 ms, −95.0 %",
        "   (−95.6 … −94.4); 5 steps' losses equal",
    ]


def test_a_graph_whose_steps_return_other_numbers_repeats_one_batch() -> None:
    graph = result("cuda_graph", "better", 0.5, difference=0.019)
    both = result(TOGETHER, "better", 0.4, difference=0.019, how="cuda_graph + gc_freeze")
    lines = conclude.answer(
        "step 475 ms", CAUSES[:1], [graph, result("gc_freeze", "better", 0.9, difference=0.019)], both
    )
    text = " ".join(map(str.strip, lines))
    assert text.count("changes the loss by up to 1.9 %: a graph repeats one batch unless each is copied") == 2
    assert text.count("changes the loss") == 3


@pytest.mark.parametrize(("processes", "step_ms"), [(1, None), (4, 10.0)])
def test_the_time_with_all_changes_is_no_metric_if_too_few_processes_measured_it(tmp_path, processes, step_ms) -> None:
    turns = {"": [100.0] * processes, JOINED.join(("threads", "gc_freeze")): [10.0] * processes}
    params = {**found([]), "turns": turns, "joined": ["threads", "gc_freeze"], "device_key": "1x cpu"}
    report = Report(tmp_path)
    conclude.run(DiagnosisSpec.example(), Unit(title="the answer", params=params), report)
    assert {row["metric"]: row["median"] for row in report.rows} == {"together_ms": step_ms, "answer_step_ms": 100.0}


@pytest.mark.parametrize("seed", range(8))
def test_whatever_is_found_fits_a_terminal_with_all_that_helps(seed: int) -> None:
    draw = random.Random(seed)
    deep = "src/" + "deep/" * draw.randrange(12) + f"train.py:9 Model.{'f' * draw.randrange(90)}"
    kinds = draw.choices(("input", "synchronisation", "host", "optimizer", "unexplained"), k=draw.randrange(20))
    causes = [[rank, kind, draw.choice((deep, None)), 9.0, 9.0, 1.0, "ceiling"] for rank, kind in enumerate(kinds, 1)]
    verdicts = draw.choices(("better", "no_difference", "worse", "inconclusive", "not_tried"), k=draw.randrange(16))
    results = [
        result(f"change_{at}_{'x' * draw.randrange(20)}", verdict, None if verdict == "not_tried" else 0.9,
               reason="because " * draw.randrange(20), cause=draw.choice([*kinds, "kernels"]))
        for at, verdict in enumerate(verdicts)
    ]  # fmt: skip
    better = [one.change for one in results if one.verdict == "better"]
    together = result(TOGETHER, "better", 0.5, how=" + ".join(better)) if len(better) > 1 else NOTHING
    lines = conclude.answer("step 475 ms ± 0.4 %", causes, results, together)
    assert len(lines) <= MOST_LINES
    assert max(map(len, lines)) <= WIDTH
    alone = " ".join(map(str.strip, lines)).partition("all together (")[0]
    assert all(change in alone for change in better)


def found(turns: list[float], busy_percent: float | None = None) -> dict[str, Any]:
    return {"turns": {"": turns}, "screened": {}, "looked": [], "profiled_ms": None, "others": [], "seen": [],
            "busy_percent": busy_percent, "joined": [], "device_key": None, "candidates": [], "refused": {},
            "differences": {}, "beside": None}  # fmt: skip


def test_the_first_line_has_the_farther_end_of_the_steps_interval_and_how_much_of_it_the_device_works() -> None:
    six = [99.0, 100.0, 100.0, 101.0, 100.0, 98.0]
    assert conclude._step(found(six, 61.2), 100.0) == "step 100 ms ± 2.0 %, the device works 61 % of it"


def test_a_bound_is_the_share_that_its_own_stage_measured() -> None:
    seen = [{"cause": "optimizer", "where": "", "lost_ms": 50.0}, {"cause": "kernels", "where": "", "lost_ms": 50.0}]
    bound = result("no_optimizer", "inconclusive", 0.6, removes=True, step_ms=150.0)  # when a step took 250 ms
    (row, *_) = conclude._causes(seen, [bound], 100.0)
    assert (row[1], row[-1]) == ("optimizer", "measured")
    assert row[-2] == pytest.approx(60.0)


def test_a_measured_cause_comes_before_a_ceiling_of_about_its_size() -> None:
    sure = result("no_input", "better", 0.92, cause="input", removes=True)
    times = {"synchronisation": 11.0, "input": 8.0, "kernels": 81.0}
    assert ranked([sure], **times) == ["input", "synchronisation", "kernels"]
    assert ranked([sure], **{**times, "synchronisation": 13.0})[0] == "synchronisation"


def test_one_process_on_a_busy_host_measures_no_bound_and_no_gain() -> None:
    """One of the processes that measured the step as it is took three times as long as the others."""
    known = {"change": "no_optimizer", "cause": "optimizer", "how": "", "removes": True}
    of = {"": [236.5], "no_optimizer": [61.7]}
    found = {"looked": [66.0], "screened": of, "turns": {"": [66.0] * 4}, "differences": {}, "busy_percent": 60.0}
    once = conclude._measured(found, "no_optimizer", known)
    assert (once.ratio, once.sure) == (pytest.approx(61.7 / 66), False)
    row = conclude._causes([{"cause": "optimizer", "where": "", "lost_ms": 3.4}], [once], 66.0)[0]
    assert row[-1] == "ceiling"
    quiet = {**found, "screened": {**of, "": [66.5]}}
    assert conclude._measured(quiet, "no_optimizer", known).sure
    assert not conclude._measured({**quiet, "busy_percent": None}, "no_optimizer", known).sure, "on a CPU"


@pytest.mark.parametrize(
    ("plain", "changed", "told"),
    [
        ([20.7, 21.2], [10.7, 9.6], "promising, but not certain yet: loader_workers: 10.15 ms, about −51.6 % (2"),
        ([20.7, 21.2], [10.7, 19.6], "nothing that was tried"),
        ([20.7], [9.6], "promising, but not certain yet: loader_workers: 9.6 ms, about −53.6 % (1 process)"),
        ([20.7], [15.0], "nothing that was tried"),
        ([11.0, 41.2], [10.7, 9.6], "nothing that was tried"),
    ],
    ids=["far apart", "one is slow", "one alone", "one alone is noise", "one of the step as it is was as fast"],
)
def test_what_too_few_processes_show_clearly_is_told_as_uncertain_and_never_as_nothing(plain, changed, told) -> None:
    of = {"": plain, "loader_workers": changed}
    found = {"looked": [23.5], "screened": {}, "turns": of, "differences": {}, "busy_percent": None}
    known = {"change": "loader_workers", "cause": "input", "how": "", "removes": False}
    one = conclude._measured(found, "loader_workers", known)
    assert one.verdict == "inconclusive"
    lines = [line.strip() for line in conclude.answer("step 20.9 ms", CAUSES, [one], NOTHING)]
    assert told in " ".join(lines[-3:])


def ranked(results: list[Result], **ms: float) -> list[str]:
    seen = [{"cause": cause, "where": "", "lost_ms": one} for cause, one in ms.items()]
    return [row[1] for row in conclude._causes(seen, results, sum(ms.values()))]


def test_what_a_step_waits_for_comes_before_its_own_work_unless_a_change_shortens_that() -> None:
    times = {"kernels": 80.0, "attention": 8.0, "synchronisation": 10.0, "host": 2.0}
    late = [result("attention_cudnn", "not_tried", cause="attention")]
    assert ranked(late, **times) == ["synchronisation", "attention", "kernels", "host"], "2 % are little"
    assert ranked([], **times) == ["synchronisation", "kernels", "attention", "host"], "nothing would shorten it"
    for cause, where in (("attention", "x.py:1 f (written out)"), ("kernels", "x.py:1 f (not in every step)")):
        seen = [
            {"cause": "kernels", "where": "x.py:9", "lost_ms": 80.0},
            {"cause": cause, "where": where, "lost_ms": 20.0},
        ]
        assert conclude._causes(seen, [], 100.0)[0][2] == where
    tf32 = result("tf32", "better", 0.3, cause="kernels")
    assert ranked([tf32, *late], **times) == ["kernels", "synchronisation", "attention", "host"]
    maybe = result("tf32", "inconclusive", 0.3, cause="kernels")
    assert ranked([maybe], **times) == ranked([], **times), "what is not certain proves nothing"
    useless = [result("tf32", "no_difference", 0.995, cause=cause) for cause in ("kernels", "attention")]
    assert ranked(useless, **times) == ["synchronisation", "kernels", "attention", "host"]


def test_an_optimizer_that_is_fused_already_is_what_a_step_is_made_of() -> None:
    times = {"optimizer": 20.0, "kernels": 74.0, "host": 6.0}
    assert ranked([], **times) == ["optimizer", "host", "kernels"]
    fused = result("fused_optimizer", "refused", reason="it is fused already", done=True)
    assert ranked([fused], **times) == ["host", "kernels", "optimizer"]
    bound = result("no_optimizer", "better", 0.8, removes=True)
    assert ranked([fused, bound], **times)[0] == "optimizer", "what was measured counts"


def test_what_a_late_rank_computes_longer_comes_before_what_all_compute() -> None:
    seen = [("kernels", "matmul", 60.0), ("kernels", f"rank 1 matmul {conclude.OTHERS_WAIT}", 30.0), ("host", "", 10.0)]
    rows = [dict(zip(("cause", "where", "lost_ms"), one, strict=True)) for one in seen]
    causes = conclude._causes(rows, [], 100.0)
    assert [row[3] for row in causes] == [30, 10, 60]
    assert [conclude._is_own(row) for row in causes] == [False, False, True]


def test_a_cause_is_worth_what_a_step_without_it_gained_and_one_process_is_no_proof() -> None:
    times = {"kernels": 60.0, "input": 30.0, "synchronisation": 10.0}
    hidden = result("no_input", "better", 0.95, cause="input", removes=True)
    assert ranked([hidden], **times) == ["synchronisation", "input", "kernels"], "5 % are much"
    once = result("no_input", "inconclusive", 0.95, cause="input", removes=True, low=None, high=None)
    assert ranked([once], **times) == ["input", "synchronisation", "kernels"]
    more = result("no_synchronisation", "inconclusive", 0.6, cause="synchronisation", removes=True, low=None, high=None)
    assert ranked([more], **times) == ["synchronisation", "input", "kernels"]


def test_a_step_without_a_part_of_its_work_is_a_bound_and_no_cure() -> None:
    bound = result("no_optimizer", "better", 0.08, removes=True)
    row = dict(zip([column.name for column in conclude.CHANGES], bound.row, strict=True))
    assert row["verdict"] == "bound"
    lines = conclude.answer("step 475 ms", CAUSES, [bound], NOTHING)
    assert lines[-1] == "no change was tried but no_optimizer, which is no cure"
    assert not any("->" in line for line in lines)


def test_a_step_whose_processes_differ_is_suspect_and_its_first_line_says_so(tmp_path: Path) -> None:
    """Of alternating runs on a host that did other work."""
    apart = found([78.02, 90.0, 95.44, 162.0])
    assert conclude._step(apart, 92.72).endswith("; suspect: uncertain by more than 20%")
    threads = "other threads compute for 46 % of it, most in x.py:2 watch"
    assert conclude._step(found([92.0]) | {"beside": threads}, 92.0) == f"step 92 ms (1 process); {threads}"
    others = {"others": [None, "other processes used 51.3% of the CPU"]}
    assert conclude._step(apart | others, 92.72).endswith("more than 20%, as other processes used the CPU")
    for turns, verdict in (
        ([78.02, 90.0, 95.44, 162.0], "suspect"),
        ([90.0, 91.0, 93.0, 95.0], "valid"),
        ([50.0, *[100.0] * 10, 200.0], "valid"),  # the interval of the median leaves two of twelve out
    ):
        report = Report(tmp_path / str(len(turns)) / verdict)
        unit = Unit(title="the answer", params={**apart, **others, "turns": {"": turns}})
        conclude.run(DiagnosisSpec.example(), unit, report)
        assert report.verdict["verdict"] == verdict
        failed = [check["name"] for check in report.verdict["checks"] if not check["ok"]]
        assert failed == (["variation", "host_load"] if verdict == "suspect" else []), "processes that agree were not"


SEEN = [{"cause": "input", "where": "", "lost_ms": 10.0}, {"cause": "kernels", "where": "", "lost_ms": 90.0}]


def test_no_bound_contradicts_a_time_that_was_measured() -> None:
    """A profile of a busy host saw little input, and a change against it has saved more than that."""
    once = {"cause": "input", "removes": True, "low": None, "high": None, "sure": False}
    cure = result("loader_workers", "better", 0.6, cause="input", step_ms=60.0)

    def bound(*results: Result, seen: Any = SEEN, **known: bool) -> tuple[Any, str]:
        rows = conclude._causes(seen, results, 100.0, **known)
        (row,) = (row for row in rows if row[1] == "input")
        return row[5], conclude._columns([row], results)[1].split("%")[1].strip()

    assert bound() == (90.0, "about 90 ms")
    assert bound(cure) == (60.0, "at most 60 ms")
    assert bound(result("no_input", "inconclusive", 0.5, **once)) == (90.0, "about 90 ms"), "the profile's share"
    assert bound(result("no_input", "inconclusive", 1.08, **once)) == (None, "not certain")
    much = [{**SEEN[0], "lost_ms": 70.0}, {**SEEN[1], "lost_ms": 30.0}]
    assert bound(result("no_input", "inconclusive", 0.4, **once), seen=much) == (30.0, "about 30 ms")
    assert bound(result("no_input", "inconclusive", 0.6, **once), seen=much) == (None, "not certain"), "not 30, for one"
    assert bound(rough=True) == (None, "not known"), "no step without it was measured"
    assert bound(cure, rough=True) == (60.0, "at most 60 ms")
    assert bound(result("no_input", "inconclusive", 0.5, **once), agree=False) == (None, "not certain")


def test_float64_that_float32_does_not_shorten_has_no_bound_and_comes_after_what_helps() -> None:
    vain = result("float32", "inconclusive", 1.011, cause="precision", low=0.9998, high=1.029)
    helps = result("fused_optimizer", "better", 0.972, cause="optimizer", low=0.952, high=0.988)
    seen = [{"cause": cause, "where": f"slow.py:{ms} f", "lost_ms": ms} for cause, ms in
            (("input", 36.7), ("precision", 6.6), ("optimizer", 4.3), ("kernels", 52.4))]  # fmt: skip
    rows = conclude._causes(seen, [vain, helps], 100.0)
    of = {row[1]: row for row in rows}
    assert of["precision"][5] is None
    assert rows.index(of["precision"]) > rows.index(of["optimizer"])
    lines = " ".join(line.strip() for line in conclude.answer("step 100 ms", rows, [vain, helps], NOTHING))
    assert "float32 does not help: +1.1" in lines.replace("\N{NO-BREAK SPACE}", " ")


def test_a_loader_whose_step_without_it_was_measured_is_one_cause_with_all_its_places() -> None:
    """Of a step of 6.128 ms, its bound stood beside the largest of three places alone."""
    seen = [
        {"cause": cause, "where": where, "lost_ms": ms}
        for cause, where, ms in (
            ("input", "train.py:25-27 Signals.__getitem__ (line 27: 32768 times a step)", 1.7),
            ("kernels", "train.py:63 Net.forward", 3.2),
            ("input", "train.py:22-29 Signals.__getitem__ (line 28: 92 % of it)", 1.1),
            ("input", "train.py:81 forever", 0.01),
        )
    ]
    bound = result("batches_from_memory", "better", 0.58, cause="input", removes=True)
    rows = conclude._causes(seen, [bound], 6.0)
    assert [row[1] for row in rows] == ["input", "kernels"]
    assert sum(row[3] for row in rows) == pytest.approx(6.0)
    assert rows[0][2] == (
        "train.py:25-27 Signals.__getitem__ (28.3 % here; line 27: 32768 times a step; "
        "18.3 % in train.py:22-29 Signals.__getitem__)"
    )
    tried = result("loader_workers", "inconclusive", 1.352, cause="input", low=None, high=None)
    why_not = "it has no worker processes: loader_workers adds them"
    refused = result("loader_prefetch", "refused", cause="input", reason=why_not)
    said = " ".join(conclude.answer("step 6 ms", rows, [bound, tried, refused], NOTHING))
    assert "no loader_prefetch: it has no worker processes" in said, "one process says nothing of the other change"
    assert "adds them" not in said, "it was tried, and brought nothing"
    apart = conclude._causes(seen, [], 6.0)
    assert [row[1] for row in apart] == ["input", "input", "kernels"], "without a bound each has its own ceiling"
