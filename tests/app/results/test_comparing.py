"""Comparisons of jobs: which cases are matched, their numbers, notes and tables."""

import itertools
import json
import random
import statistics
import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import update

from app import results
from app.errors import InvalidRequest
from app.results import Question, Sheet, comparing, render, sheet_of
from app.results.comparing import PLAIN
from app.results.environments import Difference, Setup, environment_differences
from app.specs.benchmark import BenchmarkSpec
from app.store import tables
from app.store.database.engine import Database
from app.store.keeping.baselines import Baselines
from app.store.reading import measurements
from app.store.records import Finish, NewJob, UnitRecord
from flopwatch.intervals import median_interval
from tests.builders import STEADY, measured

Measure = Callable[..., int]
CLASSES = {"scope": "string", "class": "string", "total_ms": "number", "calls": "number"}


def compare(database, baseline, candidate, question=PLAIN, limit=None) -> Sheet:
    """Compare jobs, or a baseline with jobs, and return the comparison as a sheet."""
    sides = ([side] if isinstance(side, int) else side for side in (baseline, candidate))
    return sheet_of(results.compare(database, *sides, question), limit)


def compare_sides(database: Database, job_id: int) -> Sheet:
    return sheet_of(results.compare_sides(database, job_id))


def rows(sheet: Sheet) -> list[dict[str, Any]]:
    return json.loads(render(sheet, "json"))["rows"]


def about(sheet: Sheet, name: str) -> Any:
    """A fact about the whole table as JSON has it."""
    return json.loads(render(sheet, "json"))[name]


def test_jobs_beside_a_job_are_no_difference_of_the_environments() -> None:
    one, other = (
        Setup([{"neighbours": jobs, "software.torch": torch}], []) for jobs, torch in (("[]", "2.12"), ("[6]", "2.13"))
    )
    assert [difference.name for difference in environment_differences(one, other)] == ["software.torch"]


@pytest.mark.parametrize("field", ["code", "step_code"])
def test_beside_ones_own_code_what_it_does_not_use_is_no_difference(field: str) -> None:
    sides = (("model", "tiny", "mine"), (f"{field}.function", None, "mine"), ("model.name", "transformer_lm", None))
    told = comparing._unlabelled([Difference(*side) for side in sides], "benchmark")
    assert [one.name for one in told] == ["model"]


class TestMetrics:
    def test_differences_of_jobs_do_not_keep_cases_apart(self, database: Database, measure: Measure) -> None:
        one = measure(("step_ms", {}))
        other = measure(("step_ms", {"device_key": "1x GPU"}), spec={"precision": "bf16", "context_length": 512})
        sheet = compare(database, one, other)
        (row,) = rows(sheet)
        assert row["ratio"] == 1.0
        assert row["case_key"] is None, "the cases are not equal"
        assert about(sheet, "differences") == [
            {"name": "context_length", "baseline": 256, "candidate": 512},
            {"name": "precision", "baseline": "fp32", "candidate": "bf16"},
            {"name": "device", "baseline": "1x test CPU", "candidate": "1x GPU"},
        ]
        assert "context_length=256 → 512, precision=fp32 → bf16" in " ".join(sheet.notes)
        other = measure(("step_ms", {}), spec={"model": {"size": "tiny"}, "gradient_clip_norm": 1.0})
        assert "model=small → tiny, gradient_clip_norm=none → 1.0." in " ".join(compare(database, one, other).notes)

    def test_grid_cases_are_matched_by_varying_coordinates(self, database: Database, measure: Measure) -> None:
        def grid(tuned: bool, *tiles: int) -> int:
            return measure(
                *(("step_ms", {"median": float(tile), "case": {"tile": tile, "tuned": tuned}}) for tile in tiles)
            )

        sheet = compare(database, grid(False, 8, 16), grid(True, 16, 32))
        assert [(row["tile"], row["baseline"], row["candidate"], row["ratio"]) for row in rows(sheet)] == [
            (8, 8.0, None, None),
            (16, 16.0, 16.0, 1.0),
            (32, None, 32.0, None),
        ]
        assert [one["name"] for one in about(sheet, "differences")] == ["tuned"]

    def test_a_missing_number_has_its_outcome(self, database: Database, measure: Measure) -> None:
        one = measure(
            ("step_ms", {"outcome": "oom"}), ("mfu", {"outcome": "unknown"}), ("tflops", {"outcome": "unknown"})
        )
        other = measure(("step_ms", {}), ("mfu", {"outcome": "unknown"}), ("tflops", {"validity": "suspect"}))
        sheet = compare(database, one, other)
        step, tflops = rows(sheet)
        assert (step["baseline"], step["candidate"], step["change"], step["ratio"]) == (None, 2.0, None, None)
        assert (step["baseline_outcome"], step["candidate_outcome"]) == ("oom", "ok")
        assert (tflops["baseline_outcome"], tflops["candidate_validity"]) == ("unknown", "suspect")
        text = render(sheet, "markdown")
        assert "oom" in text
        assert "; the candidate is suspect." in text
        assert "is suspect; its verdict says why" in text

    def test_numbers_in_several_units_have_no_decimals_in_common(self, database: Database, measure: Measure) -> None:
        jobs = [
            measure(
                ("step_ms", {"median": 12.02 * factor}),
                ("peak_memory_mib", {"median": 192.0, "unit": "MiB"}),
                ("tokens_per_s", {"median": 10653.5 / factor, "unit": "tokens/s"}),
            )
            for factor in (1, 2)
        ]
        text = " ".join(render(compare(database, *jobs), "markdown").split())
        assert "| step_ms | ms | 12.02 | 24.04 |" in text
        assert "| peak_memory_mib | MiB | 192 | 192 | 0 |" in text

    def test_jobs_compared_with_themselves_say_so(self, database: Database, measure: Measure) -> None:
        jobs = [measure(("step_ms", {})) for _ in range(2)]
        sentence = "both sides are the same 2 jobs, so there is nothing to compare"
        sheet = compare(database, jobs, jobs[::-1], Question(fail_above_percent=5))
        assert about(sheet, "sentence") == sentence
        assert about(sheet, "gate")["sentence"] == f"inconclusive: {sentence}"
        text = render(sheet, "markdown")
        assert text.startswith(f"{sentence}.\n")
        assert "one after the other" not in text

    def test_a_job_on_both_sides_among_others_is_refused(self, database: Database, measure: Measure) -> None:
        one, other = (measure(("step_ms", {})) for _ in range(2))
        with pytest.raises(InvalidRequest, match=f"Job {one} is on both sides"):
            compare(database, [one, other], one)

    def test_a_metric_that_neither_side_has_is_named(self, database: Database, measure: Measure) -> None:
        unknown = {"outcome": "unknown", "reason": "not reported", "median": None, "n": None}
        ones, others = ([measure(("step_ms", {}), ("items_per_s", unknown)) for _ in range(4)] for _ in range(2))
        question = Question(["step_ms", "items_per_s"], fail_above_percent=5)
        gate = about(compare(database, ones, others, question), "gate")
        assert (gate["outcome"], gate["sentence"].split("; ")[-1]) == (
            "passed",
            "neither side has a value of items_per_s",
        )


class TestWithABaseline:
    """Cases meet by key and device."""

    KEY = BenchmarkSpec().cases()[0].key

    @pytest.fixture
    def run(self, run_job, queue, record, database) -> Callable[..., int]:
        """Run a job of 8 processes on a device; its environment names it, unless none is recorded."""

        def run(device, factor=1.0, *, recorded=True, asks_for="auto", fails=False, host="a") -> int:
            claim = run_job()
            spec = {**claim.spec, "device": asks_for}  # nobody here could claim it
            with database.write() as connection:
                connection.execute(update(tables.job).where(tables.job.c.id == claim.job_id).values(spec=spec))
            found = [
                record("step_ms", case_key=self.KEY, device_key=device, unit_index=at, median=factor * time)
                for at, time in enumerate(() if fails else STEADY)
            ]
            facts = {"device": {"name": device, "type": device[:3]}, "host": {"hostname": host}}
            environment = facts if recorded else None
            units = [UnitRecord(at, f"unit {at}", "succeeded", environment=environment) for at in range(8)]
            ending = Finish("failed", error={"code": "timeout"}) if fails else Finish("succeeded")
            queue.finish(claim, replace(ending, measurements=found, units=units))
            return claim.job_id

        return run

    @pytest.fixture
    def keep(self, database: Database) -> Callable[..., None]:
        def keep(*jobs: int) -> None:
            for job in jobs:
                Baselines(database).put("main", job=job)

        return keep

    def test_the_devices_of_one_case_are_not_pooled(self, database, run, keep) -> None:
        keep(run("cpu 0"), run("gpu 0", 0.1))
        sheet = compare(database, "main", [run("cpu 0"), run("gpu 0", 0.2)], Question(fail_above_percent=5))
        assert [(row["device"], row["baseline_processes"], row["ratio"]) for row in rows(sheet)] == [
            ("cpu 0", 8, 1.0),
            ("gpu 0", 8, 2.0),
        ]
        assert about(sheet, "gate")["outcome"] == "not_confirmed", "twice the time on the GPU, hidden by the CPU's"

    def test_the_sentences_say_how_many_cases_only_one_side_has(self, database, measure, keep) -> None:
        def grid(*lengths: int) -> int:
            cases = ({"case": {"length": length}, "unit_index": unit} for length in lengths for unit in range(4))
            return measure(*(("step_ms", case) for case in cases))

        keep(grid(1, 2, 3))
        sheet = compare(database, "main", grid(1, 4), Question(fail_above_percent=5))
        said = (
            "; 1 of 2 cases are not in the baseline main, and have nothing to meet"
            "; 2 of 3 cases of the baseline were not measured"
        )
        assert about(sheet, "sentence").endswith(said)
        assert (about(sheet, "gate")["outcome"], about(sheet, "gate")["sentence"][-len(said) :]) == ("passed", said)
        assert "not measured" not in about(compare(database, "main", grid(1, 2, 3)), "sentence")

    def test_cases_of_other_jobs_of_a_sweep_are_counted(self, database, measure, queue, shop, record) -> None:
        jobs = [NewJob(BenchmarkSpec(seed=at + 1), point={"seed": at}) for at in range(2)]
        sweep = queue.submit_sweep(None, {}, {"kind": "benchmark"}, {"seed": [1, 2]}, [], jobs).response["id"]
        for key in ("one", "other"):
            queue.finish(shop.claim(), Finish("succeeded", measurements=[record(case_key=key)]))
        Baselines(database).put("main", sweep=sweep)
        sheet = compare(database, "main", measure(("step_ms", {"case_key": "one"})))
        assert about(sheet, "sentence").endswith("; 1 of 2 cases of the baseline were not measured")

    @pytest.mark.parametrize("recorded", [True, False])
    def test_another_device_is_not_comparable(self, database, run, keep, recorded) -> None:
        keep(run("cpu 0", recorded=recorded, asks_for="cpu"))
        sheet = compare(
            database, "main", run("gpu 0", recorded=recorded, asks_for="cuda"), Question(fail_above_percent=5)
        )
        assert about(sheet, "sentence") == "not comparable: device cpu 0 against gpu 0"
        assert about(sheet, "gate")["outcome"] == "not_comparable"

    def test_specs_that_name_devices_need_no_baseline(self, database: Database, run: Callable[..., int]) -> None:
        sheet = compare(database, run("cpu 0", asks_for="cpu"), run("gpu 0", asks_for="cuda"))
        assert about(sheet, "conclusion") == "no_difference"

    def test_the_sentence_names_other_hosts(self, database: Database, run: Callable[..., int]) -> None:
        sheet = compare(database, run("cpu 0", host="a"), run("cpu 0", host="b"), Question(fail_above_percent=5))
        said = "not alternated and on other hosts (a against b), so changes of the host count as well"
        assert about(sheet, "sentence").endswith(said)
        assert about(sheet, "gate")["sentence"].endswith(said)

    def test_a_job_without_measurements_lacks_a_device(self, database, run, keep) -> None:
        keep(run("cpu 0"), run("gpu 0"))
        sheet = compare(database, "main", [run("cpu 0"), run("gpu 0", fails=True)], Question(fail_above_percent=5))
        assert [(row["candidate_outcome"], row["ratio"]) for row in rows(sheet)] == [("ok", 1.0), ("timeout", None)]
        assert about(sheet, "gate")["outcome"] == "missing"


SIDES = ["baseline", "candidate", "baseline", "candidate"]
IN_TURNS = {
    "kind": "compare",
    "baseline": {"kind": "benchmark", "context_length": 64},
    "candidate": {"kind": "benchmark", "context_length": 64, "precision": "bf16"},
    "replicates": 2,
}


def in_turns() -> list[UnitRecord]:
    return [UnitRecord(index, f"{side} {index // 2}", "succeeded", side=side) for index, side in enumerate(SIDES)]


@pytest.mark.parametrize(("state", "code"), [("cancelled", "cancelled"), ("failed", "timeout")])
def test_what_was_measured_of_a_comparison_that_ended_too_soon_is_told(database, measure, state, code) -> None:
    """Five processes of one side and four of the other, of eight each."""

    def case(index: int) -> dict[str, Any]:
        return {"model": "tiny", "context_length": 64, "precision": "bf16" if index % 2 else "fp32"}

    def run(number: int, ended: Any) -> int:
        times = [
            ("step_ms", {"unit_index": i, "case": case(i), "median": (5.0 if i % 2 else 10.0) + 0.01 * i})
            for i in range(number)
        ]
        units = [UnitRecord(i, "", "succeeded", side=SIDES[i % 2]) for i in range(number)]
        return measure(*times, spec={**IN_TURNS, "replicates": 8}, finish=Finish(**ended, units=units))

    job_id = run(9, {"state": state, "error": {"code": code, "title": "", "detail": ""}})
    gated = results.compare_sides(database, job_id, Question(fail_above_percent=5.0))
    sheet = compare_sides(database, job_id)
    (row,) = rows(sheet)

    assert (row["baseline"], row["candidate"]) == (pytest.approx(10.04), pytest.approx(5.04))
    assert about(sheet, "conclusion") == "inconclusive"
    told = f"inconclusive: job {job_id} ended before its time ({code}), after 5 and 4 of 8 processes; so far"
    assert str(about(sheet, "sentence")).startswith(f"{told} the candidate is 1.99× faster")
    assert gated.judgement.gate.outcome == "inconclusive"
    assert gated.judgement.gate.sentence.startswith(told), "the gate says why, too"
    assert not any("no numbers" in note for note in sheet.notes)
    (whole,) = rows(compare_sides(database, run(16, {"state": "succeeded"})))
    assert whole["finding"] == "better", "the control: a comparison that was not cut short"
    nothing = about(compare_sides(database, run(0, {"state": state, "error": {"code": code}})), "sentence")
    assert "ended before" not in str(nothing)


@pytest.fixture
def in_turns_of(database: Database, measure: Measure) -> Callable[..., Sheet]:
    """Compares, in turns on a device, processes of which each side's steps took these times in ms."""

    def run(baseline: Sequence[Sequence[float]], candidate: Sequence[Sequence[float]], device: str = "cpu") -> Sheet:
        asked = Question(fail_above_percent=5.0)
        measured, units = [], []
        for at, (side, samples) in enumerate(
            (side, samples)
            for pair in zip(baseline, candidate, strict=True)
            for side, samples in zip(("baseline", "candidate"), pair, strict=True)
        ):
            units.append(UnitRecord(at, "", "succeeded", side=side, environment={"device": {"type": device}}))
            place = {"unit_index": at, "case": {"seed": side}}
            step = {**place, **statistics_of(samples)}
            work = 1000.0 * 64
            measured += [
                ("step_ms", {**step, "phase": "step"}),
                ("forward_ms", {**step, "phase": "forward"}),
                ("net_cost_ms", step),
                ("tokens_per_s", {**place, **statistics_of([work / step["median"]]), "unit": "tokens/s"}),
                ("mfu", {**place, **statistics_of([1 / step["median"]]), "unit": "fraction"}),
            ]
        spec = {**IN_TURNS, "replicates": len(baseline)}
        job = measure(*measured, spec=spec, finish=Finish("succeeded", units=units))
        return sheet_of(results.compare_sides(database, job, asked))

    return run


def statistics_of(samples: Sequence[float]) -> dict[str, Any]:
    low, high = median_interval(samples) or (None, None)
    return {
        "n": len(samples),
        "median": statistics.median(samples),
        "mean": statistics.fmean(samples),
        "min": min(samples),
        "max": max(samples),
        "median_low": low,
        "median_high": high,
        "samples": zlib.compress(array("d", samples).tobytes()),
    }


def drawn(rng: random.Random, processes: int, steps: int, factor: Callable[[int], float] = lambda step: 1.0) -> Any:
    """Return the times of steps of processes. Other load lengthens each of them, and some processes more than others.

    factor: how much longer a step is, by its number.
    """

    def process() -> list[float]:
        load = rng.expovariate(20)
        return [10 * factor(step) * (1 + rng.expovariate(1 / load)) for step in range(steps)]

    return [process() for _ in range(processes)]


class TestTheValueOfAProcess:
    @pytest.mark.parametrize(
        ("device", "processes", "times", "statistic", "note"),
        [
            ("cpu", 4, (1.0, 1.5), "fastest", "each process's fastest sample"),
            ("cpu", 2, (10.0, 9.0), "median", "Values are medians"),
            ("cuda", 4, (10.0, 9.0), "median", "Values are medians"),
        ],
    )
    def test_on_a_cpu_it_is_the_fastest_sample(self, in_turns_of, device, processes, times, statistic, note) -> None:
        sides = ([[1.0, 10.0, 30.0]] * processes, [[9.0, 1.5, 30.0]] * processes)
        sheet = in_turns_of(*sides, device)
        step, forward, difference, tokens, mfu = rows(sheet)
        for row in (step, forward):
            assert (row["baseline"], row["candidate"], row["statistic"], row["samples"]) == (*times, statistic, 3)
            assert row["ratio"] == pytest.approx(times[1] / times[0])
        assert (difference["baseline"], difference["candidate"]) == (10.0, 9.0), "a difference of times is a median"
        for row in (tokens, mfu):
            assert row["ratio"] == pytest.approx(times[0] / times[1]), "a rate follows the time"
        assert tokens["baseline"] == pytest.approx(64_000 / times[0])
        assert note in sheet.notes[0]

    def test_each_job_of_a_case_is_a_process_of_it(self, database: Database, measure: Measure) -> None:
        """Jobs of a sweep over `seed`."""
        finish = Finish("succeeded", units=[UnitRecord(0, "", "succeeded", environment={"device": {"type": "cpu"}})])
        step = ("step_ms", statistics_of([1.0, 10.0, 30.0]))
        jobs = [measure(step, spec={"seed": seed}, finish=finish) for seed in range(8)]
        sheet = compare(database, jobs[:4], jobs[4:])
        assert (rows(sheet)[0]["statistic"], about(sheet, "candidate")["processes"]) == ("fastest", 4)

    @pytest.mark.parametrize(("ms", "outcome"), [(105.0, "passed"), (105.1, "slower")])
    def test_processes_that_are_slower_by_the_limit_pass(self, in_turns_of, ms: float, outcome: str) -> None:
        assert about(in_turns_of([[100.0] * 10] * 8, [[ms] * 10] * 8, "cuda"), "gate")["outcome"] == outcome

    @pytest.mark.parametrize("device", ["cpu", "cuda"])
    @pytest.mark.parametrize("steps", [(5, 300), (40, 10)])
    def test_equally_many_samples_meet(self, in_turns_of, rng, device, steps) -> None:
        """Identical code was "2.12× faster, CI 1.33–2.92" by the fastest of 300 steps against the fastest of 5."""
        one, other = (drawn(rng, 8, number) for number in steps)
        sheet = in_turns_of(one, other, device)
        step, *_ = rows(sheet)
        fewest, of = min(steps), min if device == "cpu" else statistics.median
        for name, processes in (("baseline", one), ("candidate", other)):
            assert step[name] == pytest.approx(statistics.median(of(samples[:fewest]) for samples in processes))
        assert step["samples"] == fewest
        assert f"8 processes each, by the {step['statistic']} of {fewest} samples" in str(about(sheet, "sentence"))
        assert f"(some have {max(steps)})" in sheet.notes[0]

    def test_samples_that_are_not_stored_are_not_compared(self, database: Database, measure: Measure) -> None:
        def job(number: int, median: float) -> int:
            times = {"n": number, "min": median / number, "median": median}
            units = [UnitRecord(at, "", "succeeded", environment={"device": {"type": "cpu"}}) for at in range(4)]
            measured = [("step_ms", {"unit_index": at, **times}) for at in range(4)]
            return measure(*measured, spec={"replicates": 4}, finish=Finish("succeeded", units=units))

        sheet = compare(database, job(5, 10.0), job(300, 9.0), Question(fail_above_percent=5.0))
        assert about(sheet, "conclusion") == about(sheet, "gate")["outcome"] == "inconclusive"
        assert "processes have 5 to 300 samples, which are not kept" in about(sheet, "sentence")

    @pytest.mark.parametrize(
        ("factor", "words"),
        [
            (lambda step: 1.5 if step % 3 else 1.0, "but by medians 1.50× slower"),
            (lambda step: 1.0 if step % 4 else 2.5, "but by means 1.40× slower"),
            (lambda step: (0.5, 1.5, 1.5)[step % 3], "but by medians 1.50× slower"),
        ],
        ids=["two of three steps slower", "one of four", "one faster, two slower"],
    )
    def test_what_slows_some_steps_down_is_seen(self, in_turns_of, rng, factor, words) -> None:
        """`step_ms` said "no difference", and `tokens_per_s` 0.73."""
        quiet = [[9 + rng.random() / 50 for _ in range(30)] for _ in range(16)]
        slowed = [[factor(step) * time for step, time in enumerate(process)] for process in quiet[8:]]
        sheet = in_turns_of(quiet[:8], slowed)
        assert about(sheet, "conclusion") in ("inconclusive", "worse"), "the fastest of fewer steps are slower"
        assert about(sheet, "gate")["outcome"] == "inconclusive"
        for name in ("sentence", "gate"):
            assert words in str(about(sheet, name))
            assert "fastest" in str(about(sheet, name))
        step, _, _, tokens, _ = rows(sheet)
        assert tokens["ratio"] == pytest.approx(1 / step["ratio"])


def test_a_load_that_begins_between_two_blocks_of_turns_hides_no_slowdown(in_turns_of, monkeypatch) -> None:
    loads = [*[10.0] * 4, *[13.0] * 4]
    one, other = ([[by * load * (1 + 0.001 * (at * 5 % 8))] for at, load in enumerate(loads)] for by in (1.0, 1.06))
    assert about(in_turns_of(one, other), "gate")["outcome"] == "slower"
    monkeypatch.setattr(comparing, "blocks_of_turns", lambda replicates: [replicates])
    assert about(in_turns_of(one, other), "gate")["outcome"] == "inconclusive", "the control"


@pytest.fixture
def profile(ended: Callable[..., int], reported: Any, record: Any) -> Callable[..., int]:
    """Record a profile with these tables: "kernels-forward", rows, its columns' types."""

    def run(*tables: tuple[str, list[list[Any]], dict[str, str]], **spec: Any) -> int:
        found = [reported(name, rows_, **columns) for name, rows_, columns in tables]
        case = {"precision": spec.get("precision", "fp32")}
        return ended(spec, tables=found, measurements=[record("step_ms", case=case)])

    return run


WORK = {
    **dict.fromkeys(("phase", "range", "operator", "shapes", "name", "class"), "string"),
    "total_ms": "number",
    "calls": "number",
}
WAITS = {"class": "string", "total_ms": "number"}
LINES = {"file": "string", "line": "integer", "function": "string", "code": "string", "self_ms": "number"}


def work_of(*rows_: list[Any]) -> tuple[str, list[list[Any]], dict[str, str]]:
    """A table of the forward pass's kernels: name, class, ms and calls of each."""
    return "work", [["forward", "", row[0], "", *row] for row in rows_], WORK


FORWARD = work_of(["gemm", "matmul", 6.0, 10.0], ["softmax", "softmax", 3.0, 2.0])


class TestProfiles:
    def test_what_each_kernel_gained_and_lost(self, database: Database, profile: Callable[..., int]) -> None:
        fused = [["gemm", "matmul", 4.5, 10.0], ["flash", "attention", 1.0, 2.0]]
        sheet = compare(database, profile(FORWARD), profile(work_of(*fused), precision="bf16"))
        names = ("table", "phase", "name", "baseline_ms", "candidate_ms", "change_ms", "ratio", "baseline_calls")
        assert [tuple(row[name] for name in names) for row in rows(sheet)] == [
            ("total", "forward", "all work", 9.0, 5.5, -3.5, pytest.approx(5.5 / 9), 12.0),
            ("work", "forward", "softmax", 3.0, None, -3.0, None, 2.0),
            ("work", "forward", "gemm", 6.0, 4.5, -1.5, 0.75, 10.0),
            ("work", "forward", "flash", None, 1.0, 1.0, None, None),
        ]
        assert about(sheet, "differences") == [{"name": "precision", "baseline": "fp32", "candidate": "bf16"}]
        assert about(sheet, "alternated") is False

    def work(self, *rows_: tuple[str, str, str, str, str, float]) -> Any:
        """A table of one forward pass: range, operator, shapes, name, class, ms."""
        return ("work", [["forward", *row, 1.0] for row in rows_], WORK)

    def lines(self, *rows_: tuple[int, str, str, float], file: str = "a.py") -> tuple[Any, Any]:
        """The table of the lines of a file: line, function, code, ms; beside work that is always the same."""
        work = self.work(("", "aten::mm", "[8]", "aten::mm", "matmul", 3.0))
        return work, ("lines", [[file, *row] for row in rows_], LINES)

    def test_work_is_matched_by_what_launched_it(self, database: Database, profile: Callable[..., int]) -> None:
        one = self.work(
            ("layers.*/mlp", "aten::mm", "[8, 4]", "sgemm_128x128", "matmul", 6.0),
            ("layers.*/mlp", "triton_poi_fused_gelu_3", "[8]", "triton_poi_fused_gelu_3", "elementwise", 2.0),
            ("layers.*/softmax", "aten::_softmax", "[8, 8]", "softmax", "softmax", 3.0),
            ("head", "aten::mm", "[8, 9]", "sgemm_64x64", "matmul", 1.0),
            ("old.name", "aten::add", "[8]", "add", "elementwise", 1.0),
        )
        other = self.work(
            ("layers.*/mlp", "aten::mm", "[8, 4]", "sgemm_64x64", "matmul", 4.0),  # another algorithm
            ("layers.*/mlp", "triton_poi_fused_gelu_7", "[8]", "triton_poi_fused_gelu_7", "elementwise", 2.0),
            ("layers.*/mlp", "aten::clone", "[8, 4]", "copy", "copy", 5.0),  # an extra .contiguous()
            ("layers.*/attend", "flash", "[8, 8]", "flash", "attention", 1.0),
            ("head", "aten::mm", "[8, 10]", "sgemm_64x64", "matmul", 2.0),  # another shape
            ("new.name", "aten::add", "[8]", "add", "elementwise", 1.0),
        )
        sheet = compare(database, profile(one), profile(other))
        (whole, *found) = rows(sheet)
        assert [(row["name"], row["baseline_ms"], row["candidate_ms"], row["change_ms"]) for row in found] == [
            ("copy", None, 5.0, 5.0),
            ("softmax", 3.0, None, -3.0),
            ("sgemm_128x128 → sgemm_64x64", 6.0, 4.0, -2.0),
            ("sgemm_64x64", 1.0, 2.0, 1.0),
            ("flash", None, 1.0, 1.0),
            ("triton_poi_fused_gelu_3", 2.0, 2.0, 0.0),
            ("add", 1.0, 1.0, 0.0),
        ]
        assert found[3]["where"] == "head aten::mm [8, 9] → [8, 10]"
        assert sum(row["change_ms"] for row in found) == pytest.approx(whole["change_ms"]) == pytest.approx(2.0)
        assert about(sheet, "sentence").startswith(
            "By the profiles, work takes 2 ms longer: +5 ms copy in layers.*/mlp, −3 ms softmax in layers.*/softmax, "
            "−2 ms matmul in layers.*/mlp, +2 ms elsewhere. step_ms: inconclusive: 1 process each, "
        )

    def test_what_is_longer_in_float64_is_told(self, database: Database, profile: Callable[..., int]) -> None:
        one, other = (
            profile(
                self.work(("mlp", "aten::mm", f"{kind}[8, 4]", "gemm", "matmul", ms), ("", "add", "", "add", "", 1))
            )
            for kind, ms in (("", 2.0), ("f64", 9.0))
        )
        sentence = about(compare(database, one, other), "sentence")
        assert "work takes 7 ms longer (+7 ms in float64): +7 ms matmul in mlp. " in sentence

    @pytest.mark.parametrize(("file", "where"), [("a.py", "a.py busy"), ("b.py", "a.py → b.py busy")])
    def test_on_a_cpu_the_lines_of_the_users_code_tell_what_takes_longer(self, database, profile, file, where) -> None:
        one, other = (
            profile(*self.lines((11, "busy", "for _ in range(n):", busy), (20, "step", "x @ x", 3.0), file=at))
            for busy, at in ((2.0, "a.py"), (5.0, file))
        )
        sheet = compare(database, one, other)
        assert "a step takes 3 ms longer: +3 ms `for _ in range(n):` in busy. " in about(sheet, "sentence")
        row = next(row for row in rows(sheet) if row["table"] == "lines")
        assert (row["name"], row["where"], row["change_ms"]) == ("for _ in range(n):", where, 3.0)

    @pytest.mark.parametrize("file", ["a.py", "b.py"])
    def test_a_line_that_became_three_counts_with_its_function(self, database, profile, file) -> None:
        forward = (("h = gelu(self.up(x))", 7.0), ("h = h @ self.gate", 5.0), ("return self.down(h)", 5.0))
        one = self.lines((1, "forward", "return self.down(gelu(up(x)))", 12.0), (20, "step", "loss.backward()", 5.0))
        three = [(at, "forward", *line) for at, line in enumerate(forward, 1)]
        other = self.lines(*three, (20, "step", "loss.backward()", 9.0), file=file)
        sentence = about(compare(database, profile(*one), profile(*other)), "sentence")
        assert "a step takes 9 ms longer: +5 ms forward, +4 ms `loss.backward()` in step. " in sentence

    def test_the_rest_of_a_gpus_step_is_idle(self, database: Database, profile: Callable[..., int]) -> None:
        def tables(gemm: float, launches: float) -> tuple[Any, Any]:
            waits = [["running", gemm], ["launches", launches], ["host", 1.0]]
            return self.work(("mlp", "aten::mm", "[8]", "gemm", "matmul", gemm)), ("waits", waits, WAITS)

        sheet = compare(database, profile(*tables(4.0, 1.0)), profile(*tables(3.0, 6.0)))
        assert "a step takes 4 ms longer: +5 ms launches, −1 ms matmul in mlp. " in about(sheet, "sentence")
        assert any("One profile of each side" in note for note in sheet.notes)
        idle = {row["name"]: row["change_ms"] for row in rows(sheet) if row["table"] == "waits"}
        assert idle == {"launches": 5.0, "running": -1.0, "host": 0.0}

    def test_a_table_of_one_side_only_is_named_and_not_compared(self, database, profile) -> None:
        inference = ("classes", [["forward", "matmul", 6.0, 10.0]], CLASSES)
        training = ("classes", [["forward", "matmul", 6.0, 10.0], ["step", "matmul", 9.0, 20.0]], CLASSES)
        sheet = compare(database, profile(FORWARD, inference), profile(FORWARD, training))
        assert {row["phase"] for row in rows(sheet)} == {"forward"}
        assert "Only the candidate has classes (step)." in sheet.notes

    def test_of_scopes_that_hold_each_other_the_largest(self, database, profile) -> None:
        scopes = [[scope, "matmul", time, 10.0] for scope, time in (("forward", 3.0), ("step", 9.0), ("prefill", 1.0))]
        jobs = [profile(("classes", scopes, CLASSES)) for _ in range(2)]
        assert [it["phase"] for it in rows(compare(database, *jobs)) if it["table"] == "classes"] == ["step", "prefill"]

    def test_profiles_in_turns_are_means_of_each_sides_processes(self, database, ended, reported, record) -> None:
        times = [1.0, 10.0, 3.0, 20.0]
        tables = [
            reported("work", work_of(["gemm", "matmul", time, 1.0])[1], unit_index=unit, **WORK)
            for unit, time in enumerate(times)
        ]
        tables[3] = reported("work", work_of(["other", "matmul", 20.0, 1.0])[1], unit_index=3, **WORK)
        measured = [record("step_ms", unit_index=unit) for unit in range(4)]
        sheet = compare_sides(database, ended(IN_TURNS, units=in_turns(), tables=tables, measurements=measured))
        found = {row["name"]: (row["baseline_ms"], row["candidate_ms"], row["candidate_calls"]) for row in rows(sheet)}
        assert found["gemm"] == (2.0, 5.0, 0.5), "one of the candidate's two processes did not run it"
        assert found["other"] == (None, 10.0, 0.5)
        assert about(sheet, "alternated") is True

    def test_a_profile_that_failed_is_not_compared_by_its_kernels(self, database, ended, reported, profile) -> None:
        failed = Finish("failed", error={"code": "crashed"}, tables=[reported(FORWARD[0], FORWARD[1], **WORK)])
        sheet = compare(database, profile(FORWARD), ended(finish=failed))
        assert "baseline_ms" not in sheet.names()
        assert any("did not succeed (crashed)" in note for note in sheet.notes)


RETURNED = {"what": "string", "step": "integer", "name": "string", "value": "number", "not_finite": "string"}


def losses(*values: float | None, tokens: float = 64.0) -> list[list[Any]]:
    """What the first steps of a process returned, and the work of a step."""
    steps = enumerate(values, start=1)
    returned = [["returned", step, "loss", value, "nan" if value is None else None] for step, value in steps]
    return [*returned, ["work", None, "tokens", tokens, None]]


def test_what_the_steps_of_both_sides_returned_is_compared(database, ended, reported, record) -> None:
    sides = [unit.side for unit in in_turns()]
    tables = [
        reported(
            "values",
            losses(10.8, 10.5) if side == "baseline" else losses(10.8, 5.25, tokens=32.0),
            unit_index=unit,
            **RETURNED,
        )
        for unit, side in enumerate(sides)
    ]
    measured = [record("step_ms", unit_index=unit) for unit in range(len(sides))]
    job = ended(IN_TURNS, units=in_turns(), tables=tables, measurements=measured)
    sheet = compare_sides(database, job)
    agreement = about(sheet, "agreement")
    assert agreement["relative_difference"] == pytest.approx(0.5)
    assert agreement["sentence"] == (
        "returned numbers differ by up to 50 % (loss, step 2: 10.5 → 5.25); the work of a step is not the same: "
        "tokens 64 → 32"
    )
    assert str(about(sheet, "sentence")).endswith(agreement["sentence"])
    judged = results.compare_sides(database, job, Question(expect_equal=1e-4)).judgement
    assert (judged.conclusion, judged.gate.outcome) == ("wrong", "wrong")


def test_returned_numbers_of_two_jobs_and_of_one_that_has_none(database, ended, reported, record) -> None:
    values = [reported("values", losses(2.0, None), **RETURNED)]
    one, same, without = (ended(tables=tables, measurements=[record("step_ms")]) for tables in (values, values, []))
    found = results.compare(database, [one], [same], Question(expect_equal=0.0))
    assert found.judgement.gate.outcome == "passed"
    assert "(loss, the first 2 steps); both return nan (loss, step 2): only 1 of 2" in found.judgement.sentence
    lacking = results.compare(database, [one], [without], Question(expect_equal=0.0))
    assert lacking.judgement.gate.outcome == "missing"
    assert "the candidate has kept nothing that its step returned" in lacking.judgement.sentence
    assert results.compare(database, [without], [without]).agreement is None


def test_of_a_diagnosis_the_unchanged_step_counts_with_its_own_seed(database, ended, reported, record) -> None:
    def job(drawn: int, *of_units: float) -> int:
        spec = {"kind": "diagnosis", "seed": drawn, "step": {"kind": "benchmark", "seed": 5}}
        tables = [reported("values", losses(loss), unit_index=at, **RETURNED) for at, loss in enumerate(of_units)]
        return ended(spec, units=in_turns()[: len(of_units)], tables=tables, measurements=[record("step_ms")])

    def outcome(one: int, other: int) -> str:
        return results.compare(database, [one], [other], Question(expect_equal=1e-4)).judgement.gate.outcome

    assert outcome(job(1, 2.0, 9.0), job(2, 2.0, 7.0)) == "passed", "later units measure changes"
    assert outcome(job(1, 2.0, 9.0), job(2, 3.0, 9.0)) == "wrong"


def test_what_steps_of_other_seeds_returned_is_not_compared(database, ended, reported, record) -> None:
    jobs = []
    for seed in (3, 4):
        tables = [reported("values", losses(2.0 + seed), **RETURNED)]
        jobs.append([ended({"seed": seed}, tables=tables, measurements=[record("step_ms")])])
    found = results.compare(database, *jobs, Question(expect_equal=1e-4))
    assert (found.judgement.gate.outcome, found.judgement.conclusion) == ("not_comparable", "inconclusive")


def test_what_several_cases_of_another_precision_returned_is_compared(database, ended, reported) -> None:
    jobs = {}
    for precision, width in itertools.product(("fp32", "bf16"), (1, 2)):
        spec = {"precision": precision, "batch_size": width}
        tables = [reported("values", losses(2.0 * width, 3.0 if precision == "fp32" else 1.5), **RETURNED)]
        case = measured("step_ms", 1.0, **spec)
        jobs.setdefault(precision, []).append(ended(spec, tables=tables, measurements=[case]))
    found = results.compare(database, jobs["fp32"], jobs["bf16"])
    assert "differ by up to 50 % (loss, step 2: 3 → 1.5)" in found.agreement["sentence"]
    same = results.compare(database, jobs["fp32"], jobs["fp32"], Question(expect_equal=1e-4))
    assert same.agreement["outcome"] == "passed"


@pytest.mark.parametrize("beside", [{"candidate"}, {"baseline", "candidate"}])
def test_work_that_one_side_has_moved_to_threads_is_told(database, ended, record, beside) -> None:
    checks = [{"name": "threads", "ok": False}]
    units = [replace(it, validity={"verdict": "valid", "checks": checks * (it.side in beside)}) for it in in_turns()]
    rows_ = [record("step_ms", unit_index=unit.unit_index) for unit in units]
    sheet = compare_sides(database, ended(IN_TURNS, units=units, measurements=rows_))
    told = "in the candidate alone threads computed beside the steps"
    assert (told in str(about(sheet, "sentence"))) == (len(beside) == 1)


def test_of_more_jobs_than_verdicts_are_read_none_computes_alone(database, ended, record, monkeypatch) -> None:
    for module in (measurements, comparing):
        monkeypatch.setattr(module, "MAX_DOUBTFUL", 2)
    verdict = {"verdict": "valid", "checks": [{"name": "threads", "ok": False}]}
    units = [UnitRecord(0, "", "succeeded", validity=verdict)]
    jobs = [ended(units=units, measurements=[record("step_ms")]) for _ in range(3)]
    assert "threads" not in str(about(compare(database, jobs[:2], jobs[2]), "sentence"))
