"""The short document of `--format brief`, and `--keep-if better`."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.cli.brief import HEADLINE, MOST_LINES, Brief, of_comparison
from app.store.records import UnitRecord
from flopwatch import Flopwatch
from tests.app.conftest import TINY
from tests.builders import STEADY

ALWAYS = {"outcome", "exit_code", "sentence", "row", "note", "more", "left_out"}
RETURNED = {"what": "string", "step": "integer", "name": "string", "value": "number", "not_finite": "string"}


def read(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return a document as text by its keys; the values of a key that comes several times as a list."""
    assert done.stderr == "", "neither progress nor notes"
    assert "\x1b" not in done.stdout
    lines = done.stdout.splitlines()
    assert len(lines) <= MOST_LINES
    document: dict[str, Any] = {}
    for line in lines:
        key, _, value = line.partition(": ")
        document.setdefault(key, []).append(value)
    assert document["exit_code"] == [str(done.returncode)]
    return {key: values[0] if len(values) == 1 else values for key, values in document.items()}


def test_a_comparison_shows_all_that_was_tested() -> None:
    copies = {"metric": "copy_ms", "finding": "no_difference", "p_adjusted": 0.6, "ratio": 1.0}
    tested = [copies, {**copies, "metric": "product_ms", "ratio": 1.01}]
    others = [{**copies, "metric": name, "finding": "differs", "p_adjusted": None} for name in ("x_ms", "y_ms")]
    side = {"kind": "ceiling", "jobs": [1]}
    compared = {
        "columns": [{"name": name} for name in ("metric", *HEADLINE[1:])],
        "rows": [dict.fromkeys(HEADLINE) | row for row in (*others, *tested)],
        "headline": "copy_ms",
    }
    facts = {"conclusion": "worse", "alternated": True, "agreement": None, "notes": []}
    document = of_comparison({**compared, **facts, "baseline": side, "candidate": side}, None, "worse", 0)
    assert [row["metric"] for row in document.row] == ["copy_ms", "product_ms", "x_ms", "y_ms"]
    assert document.facts["ratio"] is None, "it would be that of copies alone"
    once = [{**row, "p_adjusted": None, "case": row["metric"]} for row in compared["rows"]]  # single processes
    compared |= {"columns": [{"name": "case"}, *compared["columns"]], "rows": once}
    document = of_comparison({**compared, **facts, "baseline": side, "candidate": side}, None, "inconclusive", 0)
    assert document.facts["ratio"] is None


Turns = Callable[..., int]


@pytest.fixture
def turns(site: Any, measured: Any, reported: Any) -> Turns:
    """Run a job of kind compare whose candidate takes `factor` of the time; returns its id."""

    def run(factor, *, loss=2.0, later=(), tokens=64, lost=False, side=TINY) -> int:
        spec = {"kind": "compare", "baseline": side, "candidate": side}
        site.http.post("/jobs", json={"spec": spec, "priority": 20}).raise_for_status()
        claim = site.worker.claim("compare")
        units = [UnitRecord(unit, "", "succeeded", side=("baseline", "candidate")[unit % 2]) for unit in range(16)]
        rows, tables = [], []
        for unit in range(16):
            is_candidate = unit % 2 == 1
            time = STEADY[unit // 2] * (factor if is_candidate else 1.0)
            rows.append(measured("step_ms", time, unit_index=unit, model="tiny", context_length=8))
            if not (is_candidate and lost):
                rows.append(measured("step_ms", time, unit_index=unit, model="tiny", context_length=16))
            if loss is not None:
                values = [
                    ["returned", 1, "loss", loss if is_candidate else 2.0, None],
                    *(
                        ["returned", step, "loss", value, None]
                        for step, value in zip((80, 100), later if is_candidate else (1.9, 1.8), strict=False)
                        if later and value is not None
                    ),
                    ["steps", None, "steps", 100.0 if later else 1.0, None],
                    ["work", None, "tokens", float(tokens if is_candidate else 64), None],
                ]
                tables.append(reported("values", values, unit, **RETURNED))
        site.worker.finish(claim, "succeeded", measurements=rows, units=units, tables=tables)
        return int(claim.job_id)

    return run


@pytest.mark.parametrize(
    ("factor", "options", "outcome", "code"),
    [
        (0.8, {}, "better", 0),
        (0.8, {"loss": 2.002}, "wrong", 8),
        (0.8, {"loss": None}, "missing", 6),
        (0.8, {"tokens": 32}, "invalid", 5),
        (0.8, {"lost": True}, "missing", 6),
        (1.0, {}, "not_better", 10),
        (1.03, {}, "not_better", 10),
        (1.2, {}, "slower", 3),
    ],
)
def test_only_what_is_better_is_kept(flopwatch, turns, factor, options, outcome, code) -> None:
    job = str(turns(factor, **options))
    found = flopwatch("compare", job, "--keep-if", "better", "--json")
    document = json.loads(found.stdout)
    assert (document["outcome"], found.returncode, document["exit_code"]) == (outcome, code, code), document
    assert read(flopwatch("compare", job, "--keep-if", "better", "--format", "brief"))["outcome"] == outcome
    usual = flopwatch("compare", job, "--keep-if", "better")
    assert (usual.returncode, usual.stdout.splitlines()[-1]) == (code, document["sentence"]), "in the usual form, too"
    assert flopwatch("compare", job).returncode == 0, "the control: without the option no code tells"


@pytest.mark.parametrize(
    ("later", "outcome", "code"), [([1.9, 1.8], "better", 0), ([1.95, 1.95], "wrong", 8), ([1.9, None], "missing", 6)]
)
def test_steps_after_the_first_ones_are_asked_for_too(flopwatch, turns, later, outcome, code) -> None:
    job = str(turns(0.01, later=later))
    document = read(flopwatch("compare", job, "--keep-if", "better", "--format", "brief"))
    assert (document["outcome"], document["exit_code"]) == (outcome, str(code))
    assert read(flopwatch("compare", job, "--format", "brief"))["conclusion"] == (
        "better" if outcome != "wrong" else "inconclusive"
    )
    assert flopwatch("compare", job, "--fail-above", "5%").returncode == (4 if outcome == "wrong" else 0)


def test_a_tolerance_and_a_limit_of_ones_own(flopwatch: Any, turns: Turns) -> None:
    rounded = str(turns(0.8, loss=2.002))
    ask = ("--keep-if", "better", "--format", "brief")
    assert read(flopwatch("compare", rounded, *ask, "--expect-equal", "0.01"))["outcome"] == "better"
    attention = {"kind": "attention", "implementations": ["eager"]}
    # A job of this kind compares its results itself, so nothing that a step returns is missing.
    assert read(flopwatch("compare", str(turns(0.8, loss=None, side=attention)), *ask))["outcome"] == "better"
    assert read(flopwatch("compare", str(turns(1.03)), *ask, "--fail-above", "1%"))["outcome"] == "slower"


@pytest.mark.parametrize(
    ("lengths", "state", "outcome"),
    [([8], "succeeded", "oom"), ([8, 16], "succeeded", "succeeded"), ([8], "failed", "failed")],
)
def test_a_job_whose_only_case_lacks_memory_says_so(flopwatch, site, measured, lengths, state, outcome) -> None:
    cases = [{"model": "tiny", "context_length": length, "arguments.top_n": 2} for length in lengths]
    rows = [measured("forward_ms", 1.0, **cases[0]), *(measured("step_ms", None, "oom", **case) for case in cases)]
    job_id = site.run(state, measurements=rows)
    assert read(flopwatch("show", str(job_id), "--format", "brief"))["outcome"] == outcome
    rows = read(flopwatch("table", "--job", str(job_id), "--rows", "arguments.top_n", "--format", "brief"))["row"]
    row = json.loads(rows if len(lengths) == 1 else rows[0])
    assert (row["step_ms"], row["forward_ms"], row["arguments.top_n"]) == ("oom", 1.0, 2), "no number is left out"
    assert row.get("partial", False) is (state == "failed")
    assert not {"step_ms_outcome", "step_ms_n"} & row.keys()
    listed = next(line.split() for line in flopwatch("jobs").stdout.splitlines() if line.startswith(f"{job_id} "))
    assert listed[2] == outcome
    told = flopwatch("show", str(job_id)).stdout.splitlines()[0]
    assert told == f"job {job_id}: benchmark, {state}{' with outcome oom' if outcome == 'oom' else ''}"


def test_what_was_not_measured_in_turns_is_not_kept(flopwatch: Any, site: Any, measured: Any, reported: Any) -> None:
    jobs = []
    for factor in (1.0, 0.8):
        table = [reported("values", [["returned", 1, "loss", 2.0, None]], **RETURNED)]
        rows = [measured("step_ms", factor * time, unit_index=unit, model="t") for unit, time in enumerate(STEADY)]
        jobs.append(str(site.run(measurements=rows, tables=table)))
    document = read(flopwatch("compare", *jobs, "--keep-if", "better", "--format", "brief"))
    assert (document["outcome"], document["in_turns"]) == ("not_confirmed", "false")
    assert document["baseline"] == f"[{jobs[0]}]"
    assert "--alternate" in document["sentence"]


def test_a_comparison_in_short(flopwatch: Any, turns: Turns) -> None:
    job = turns(0.8)
    document = read(flopwatch("compare", str(job), "--format", "brief"))
    assert document["outcome"] == document["conclusion"] == "better"
    assert "candidate is better in 2" in document["sentence"]
    rows = [json.loads(row) for row in document["row"]]
    assert [row["context_length"] for row in rows] == [8, 16]
    assert {row["finding"] for row in rows} == {"better"}
    assert rows[0]["ratio_low"] < rows[0]["ratio"] < rows[0]["ratio_high"] < 1
    assert document["more"] == [f"flopwatch compare {job}", f"flopwatch show {job} --format brief"]
    one = json.loads(flopwatch("compare", str(turns(0.8, lost=True)), "--json").stdout)
    assert {"ratio", "ratio_low", "ratio_high", "better", "metric", "job"} | ALWAYS <= one.keys()


def test_submit_show_and_table_have_the_same_document(site: Any, flopwatch: Any, obedient: Any) -> None:
    shapes = ("model.size=tiny", "context_length=8")
    document = read(flopwatch("submit", "benchmark", *shapes, "--wait", "--format", "brief"))
    job = document["job"]
    assert (document["outcome"], document["kind"]) == ("succeeded", "benchmark")
    assert json.loads(document["row"])["forward_ms"] == 1.25
    assert read(flopwatch("show", job, "--format", "brief")) == document
    assert json.loads(read(flopwatch("table", "--job", job, "--format", "brief"))["row"])["forward_ms"] == 1.25
    failed = read(flopwatch("submit", "benchmark", *shapes, "--name", "fails", "--wait", "--format=brief"))
    assert (failed["outcome"], failed["exit_code"]) == ("failed", "1")
    assert "It broke." in failed["sentence"]
    assert f"flopwatch logs {failed['job']}" in failed["more"]
    wrong = read(flopwatch("submit", "benchmark", *shapes, "--name", "is wrong", "--wait", "--format=brief"))
    assert (wrong["outcome"], wrong["exit_code"]) == ("wrong", "8")
    assert [read(flopwatch("show", one["job"], "--format", "brief")) for one in (failed, wrong)] == [failed, wrong]
    assert json.loads(flopwatch("show", job, "--format", "brief", "--json").stdout).keys() >= ALWAYS


def test_a_wait_that_ends_too_soon_names_the_job(site: Any, flopwatch: Any) -> None:
    document = read(flopwatch("submit", "benchmark", "--wait-at-most", "0.1", "--format", "brief"))
    assert (document["outcome"], document["exit_code"]) == ("queued", "75")
    job = document["job"]
    assert document["more"] == [f"flopwatch show {job} --format brief", f"flopwatch cancel {job}"]
    shown = read(flopwatch("show", job, "--format", "brief"))
    assert (shown["outcome"], shown["exit_code"]) == ("queued", "0"), "it has not waited"


def test_a_check_that_is_not_done_in_time(site: Any, flopwatch: Any, measured: Any) -> None:
    flopwatch("baseline", "set", "slow", str(site.run(measurements=[measured("step_ms", 1.0, model="v")])))
    again = ("check", "--baseline", "slow", "--timeout-s", "0.1")
    document = read(flopwatch(*again, "--format", "brief"))
    assert (document["outcome"], document["exit_code"]) == ("running", "75")
    assert "it keeps running" in document["sentence"]
    assert flopwatch(*again).returncode == 75
    flopwatch("baseline", "delete", "slow")


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("show", "987654"), 1, "There is no job 987654"),
        (("show", "none"), 2, "'ID'"),
        (("submit", "benchmark", "modl=1"), 1, "did you mean model?"),
        (("table", "--name", "lines"), 2, "give one --job"),
        (("check", "--baseline", "nobodys"), 1, "nobodys"),
    ],
)
def test_errors_have_the_form_too(flopwatch: Any, words: tuple[str, ...], code: int, told: str) -> None:
    document = read(flopwatch(*words, "--format", "brief"))
    assert (document["outcome"], document["exit_code"]) == ("error", str(code))
    assert told in document["sentence"]
    if code == 2:
        assert "outcome" not in flopwatch(*words).stdout, "the control"


def test_a_long_document_is_cut_and_says_so() -> None:
    lines = Brief("ok", "x", row=[{"n": n, "t": 1 / 3} for n in range(200)], note=["n"] * 70, more=["m"] * 3).lines()
    assert len(lines) == MOST_LINES
    written = sum(line.split(":")[0] in ("row", "note", "more") for line in lines)
    assert (lines[-1], lines.count("more: m")) == (f"left_out: {273 - written}", 3)
    assert 'row: {"n": 0, "t": 0.33333}' in lines
    assert "left_out: 0" not in Brief("ok").lines()
    assert Brief("error", "a\nb: c").lines()[2] == "sentence: a\\nb: c", "a text has no line of its own"


def test_versus_keeps_what_is_better(site: Any, flopwatch: Any, turns: Turns, tmp_path: Path, monkeypatch: Any) -> None:
    """The comparison that it has submitted is played by one that has ended."""
    old, new = tmp_path / "old.py", tmp_path / "new.py"
    old.write_text("def make_step(device):\n    return lambda: 1\n")
    new.write_text("def make_step(device):\n    return lambda: 1.0\n")
    code = ("--step", f"{old}:make_step", "--keep-if", "better")
    versions = (str(old), str(new), *code)
    for factor, outcome, exit_code in ((0.8, "better", 0), (1.0, "not_better", 10)):
        job = site.job(turns(factor))
        monkeypatch.setattr(Flopwatch, "versus", lambda *_, its=job, **__: its)
        document = read(flopwatch("versus", *versions, "--format", "brief", "--", "benchmark"))
        assert (document["outcome"], document["exit_code"]) == (outcome, str(exit_code))
        told = json.loads(flopwatch("versus", *versions, "--json", "--", "benchmark").stdout)
        assert told == json.loads(flopwatch("compare", str(job["id"]), "--keep-if", "better", "--json").stdout)
        assert flopwatch("versus", *versions, "--", "benchmark").returncode == exit_code
        gated = flopwatch("versus", *versions[:-2], "--fail-above", "5%", "--", "benchmark")
        assert (gated.stdout.count("Gate: passed"), gated.stderr.count("passed")) == (1, 0), "once, with the table"
    monkeypatch.undo()
    same = read(flopwatch("versus", str(old), str(old), *code, "--format", "brief", "--", "benchmark"))
    assert (same["outcome"], same["exit_code"]) == ("error", "1")
    assert "old.py, so there is nothing to compare: save your change there" in same["sentence"]
