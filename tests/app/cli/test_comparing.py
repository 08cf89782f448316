"""The commands compare, check and baseline: exit codes, and what they print."""

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from app.store.records import UnitRecord
from flopwatch import Flopwatch
from tests.builders import STEADY


@pytest.fixture
def finish(site: Any, measured: Any) -> Callable[..., None]:
    """Finish a claim as so many processes with these times would."""

    def end(claim: Any, factor: float = 1.0, state: str = "succeeded") -> None:
        found = [
            measured("step_ms", factor * time, unit_index=unit, model="tiny", seed=claim.spec["seed"])
            for unit, time in enumerate(STEADY)
        ]
        site.worker.finish(claim, state, measurements=found if state == "succeeded" else [])

    return end


@pytest.fixture
def run(site: Any, finish: Any) -> Callable[..., str]:
    """Run a job of 8 processes; returns its id."""

    def job(factor: float = 1.0, *, seed: int = 0, state: str = "succeeded") -> str:
        claim = site.worker.claim_job(site.submit(spec={"seed": seed}, priority=20)["id"])
        finish(claim, factor, state)
        return str(claim.job_id)

    return job


def ended(result: Any, code: int = 0) -> str:
    assert result.returncode == code, result.stdout + result.stderr
    return str(result.stdout + result.stderr)


def test_the_exit_code_tells_the_gates_answer(flopwatch: Any, run: Any) -> None:
    one, slower, failed = run(), run(1.2), run(state="failed")
    assert "step_ms: candidate is 1.20× slower" in ended(flopwatch("compare", one, slower))
    assert "not confirmed: worse by more than 5 %" in ended(flopwatch("compare", one, slower, "--fail-above", "5%"), 9)
    assert "passed" in ended(flopwatch("compare", one, slower, "--fail-above", "30 %", "--metric", "step_ms"))
    assert "missing" in ended(flopwatch("compare", one, failed, "--fail-above", "5%"), 6)
    itself = ended(flopwatch("compare", one, one, "--fail-above", "5%"))
    told = f"both sides are job {one}, so there is nothing to compare."
    assert itself.startswith(f"{told}\n\nGate: passed: {told}\n\n")
    for format_ in ("json", "csv", "latex", "html"):
        told = flopwatch("compare", one, slower, "--fail-above", "5%", "--format", format_)
        assert told.returncode == 9
        assert "worse by more than 5 %: step_ms: candidate is 1.20× slower, 95 % CI" in told.stderr
    told = flopwatch("compare", one, slower, "--fail-above", "30%", "--format", "json")
    assert (told.returncode, told.stderr.partition(":")[0]) == (0, "passed")


def test_a_wrong_kernel_passes_no_gate(flopwatch: Any, site: Any, measured: Any) -> None:
    """It has no times, and an error that both sides have; the right cell beside it does not save it."""
    lengths = (64, 128)

    def run(wrong: tuple[int, ...]) -> str:
        rows = []
        for length, (unit, time) in itertools.product(lengths, enumerate(STEADY)):
            case = {"implementation": "tiled", "sequence_length": length, "unit_index": unit}
            error, *timed = (0.00101, None, "wrong") if length in wrong else (0.001, time, "ok")
            rows.append(measured("output_error", error, **case))
            rows += [measured(metric, *timed, **case) for metric in ("forward_ms", "forward_backward_ms")]
        return str(site.run(measurements=rows))

    right, all_wrong, half_wrong = run(()), run(lengths), run((64,))
    ended(flopwatch("baseline", "set", "kernels", right))
    for candidate in (all_wrong, half_wrong):
        for command in (("compare", right, candidate), ("check", candidate, "--baseline", "kernels")):
            printed = ended(flopwatch(*command, "--fail-above", "10%"), 8)
            assert "wrong: the candidate's result differs from the reference: forward_backward_ms, seq" in printed
        told = flopwatch("compare", right, candidate, "--format", "json")
        assert (told.returncode, told.stderr[:44]) == (8, "wrong: a result of the candidate differs fro")
    assert "a result of the baseline and the candidate" in ended(flopwatch("compare", half_wrong, all_wrong), 8)
    ended(flopwatch("compare", half_wrong, right), 8)
    for command in (("compare", right, all_wrong), ("check", all_wrong, "--baseline", "kernels")):
        printed = ended(flopwatch(*command, "--fail-above", "10%", "--metric", "output_error"), 8)
        assert "wrong: the candidate's result differs from the reference: output_error" in printed, "errors are known"
    assert "are wrong" in ended(flopwatch("baseline", "set", "halves", all_wrong), 1)
    assert "1 of 2 cases wrong" in ended(flopwatch("baseline", "set", "halves", half_wrong))
    for name in ("kernels", "halves"):
        ended(flopwatch("baseline", "delete", name))


@pytest.mark.parametrize("limit", ["0", "0%", "-1%", "five", "5%%", "1e2", "nan"])
def test_a_limit_that_makes_no_sense(flopwatch: Any, limit: str) -> None:
    assert "is no percentage" in ended(flopwatch("compare", "1", "2", f"--fail-above={limit}"), 2)


def test_jobs_that_cannot_be_compared_are_refused(flopwatch: Any, run: Any) -> None:
    assert "give a CANDIDATE" in ended(flopwatch("compare", "main"), 2)
    assert "job's id" in ended(flopwatch("compare", run(), "main"), 2)
    assert "is none of these jobs' metrics: step_ms" in ended(flopwatch("compare", run(), run(), "--metric", "x"), 1)
    assert "no comparison: pass two jobs" in ended(flopwatch("compare", run()), 1)
    assert "There is no baseline 'nothing'" in ended(flopwatch("compare", "nothing", run()), 1)


@pytest.fixture
def swept(site: Any, finish: Any) -> Callable[..., int]:
    """Run a sweep of two points; the job of the second one is cancelled and run again. Returns the sweep's id."""

    def run_sweep(factor: float = 1.0, seeds: tuple[int, int] = (101, 102)) -> int:
        body = {"base": {"kind": "benchmark", "model": {"size": "tiny"}}, "grid": {"seed": seeds}, "priority": 30}
        sweep = int(site.http.post("/sweeps", json=body).json()["id"])
        finish(site.worker.claim(), factor)
        site.worker.finish(site.worker.claim(), "cancelled")
        assert site.http.post(f"/sweeps/{sweep}/resume").is_success
        finish(site.worker.claim(), factor)
        return sweep

    return run_sweep


def test_sweeps_are_compared_and_checked(flopwatch: Any, swept: Any) -> None:
    before, slower = swept(), swept(1.2)
    assert "candidate is worse in 2" in ended(flopwatch("compare", "--sweep", str(before), "--sweep", str(slower)))
    assert ended(flopwatch("baseline", "set", "swept", "--sweep", str(before))).startswith("baseline swept: 2 cases")
    assert "candidate is worse in 2" in ended(flopwatch("compare", "swept", "--sweep", str(slower)))
    ended(flopwatch("check", "--baseline", "swept", "--sweep", str(slower)), 9)
    ended(flopwatch("check", "--baseline", "swept", "--sweep", str(swept())), 0)
    ended(flopwatch("check", "--baseline", "swept", "--sweep", "99999"), 1)


@pytest.mark.parametrize(
    "arguments",
    [
        ("compare",),
        ("compare", "--sweep", "1"),
        ("compare", "1", "2", "--sweep", "3"),
        ("compare", "--sweep", "1", "--sweep", "2", "--sweep", "3"),
        ("check", "1", "--sweep", "2", "--baseline", "swept"),
    ],
)
def test_sides_that_make_no_pair(flopwatch: Any, arguments: tuple[str, ...]) -> None:
    assert flopwatch(*arguments).returncode == 2


def test_a_baseline_from_set_to_delete(flopwatch: Any, run: Any, site: Any) -> None:
    one, same, slower, other = run(seed=1), run(seed=1), run(1.2, seed=1), run(seed=2)
    assert ended(flopwatch("baseline", "set", "main", one)) == f"baseline main: 1 case of job {one}\n"
    ended(flopwatch("baseline", "set", "main", other))
    assert one in ended(flopwatch("baseline", "list"))
    assert len(json.loads(ended(flopwatch("baseline", "show", "main", "--json")))["cases"]) == 2
    assert "in the baseline main" in ended(flopwatch("delete", one), 1)
    assert "passed" in ended(flopwatch("check", "--baseline", "main", same))
    assert "slower" in ended(flopwatch("check", "--baseline", "main", slower), 9)
    assert "passed" in ended(flopwatch("check", "--baseline", "main", slower, "--fail-above", "25%"))
    plain = ended(flopwatch("check", "--baseline", "main", slower, "--fail-above", "20.1%"), 4)
    assert "--alternate" not in plain, "nothing of it is code of one's own"
    assert "missing" in ended(flopwatch("check", "--baseline", "main", run(seed=3)), 6)
    failed = run(seed=1, state="failed")
    assert f"(job {failed}: failed)" in ended(flopwatch("check", "--baseline", "main", failed), 6)
    other_kind = str(site.submit(spec={"kind": "memory", "seed": 1})["id"])
    ended(flopwatch("cancel", other_kind))
    both = ended(flopwatch("check", "--baseline", "main", failed, other_kind), 6)
    assert f"(job {failed}: failed)" in both, "not the job of another kind"
    assert "16 and 8 processes" in ended(flopwatch("compare", f"{one},{same}", slower))
    ended(flopwatch("baseline", "delete", "main"))
    assert "There is no baseline" in ended(flopwatch("check", "--baseline", "main"), 1)
    assert "labels are for the jobs" in ended(flopwatch("check", "1", "--baseline", "main", "--label", "a=b"), 2)
    ended(flopwatch("baseline", "set", "main"), 2)
    ended(flopwatch("baseline", "set", "main", "1", "--sweep", "1"), 2)


@pytest.fixture
def worker(site: Any, finish: Any) -> Iterator[dict[str, float]]:
    """A worker that finishes every job in the background, by `factor` as fast as the others."""
    behaviour = {"factor": 1.0}
    stop = threading.Event()

    def work() -> None:
        while not stop.wait(0.02):
            if (claim := site.worker.try_claim()) is not None:
                finish(claim, behaviour["factor"])

    thread = threading.Thread(target=work)
    thread.start()
    yield behaviour
    stop.set()
    thread.join()


def test_a_check_without_a_job_runs_the_baselines_jobs_again(site, flopwatch, run, request) -> None:
    first, second = run(seed=1), run(seed=2)
    for job in (first, second):
        ended(flopwatch("baseline", "set", "nightly", job))
    behaviour = request.getfixturevalue("worker")
    found = json.loads(flopwatch("check", "--baseline", "nightly", "--json").stdout)
    assert found["outcome"] == "passed"
    jobs = [site.job(job_id) for job_id in found["jobs"]]
    assert [job["spec"]["seed"] for job in jobs] == [1, 2]
    assert all(job["labels"] == {"check": "nightly"} for job in jobs)
    assert not {int(first), int(second)} & set(found["jobs"])
    behaviour["factor"] = 1.2
    assert "worse by more than 5 %: step_ms" in ended(flopwatch("check", "--baseline", "nightly"), 9)


def test_a_slowdown_is_confirmed_in_turns_or_not(flopwatch, site, run, measured, monkeypatch) -> None:
    """The candidate's job has met a jump of the host, which both sides of the job in turns meet."""
    one, other = run(seed=1), run(1.2, seed=2)
    told = ended(flopwatch("compare", one, other, "--fail-above", "5%"), 9)
    assert f"may have changed: flopwatch compare {one} {other} --alternate measures both in turns" in told
    assert "the same code, which cannot" in ended(flopwatch("compare", one, run(1.2, seed=1), "--fail-above", "5%"), 9)
    ended(flopwatch("compare", f"{one},{other}", other, "--alternate"), 2)
    submitted: list[Any] = []

    def in_turns(body: Any, **_: Any) -> Any:
        """Submit the job of both specs, and finish it at once."""
        site.http.post("/jobs", json={"spec": body}).raise_for_status()
        claim = site.worker.claim("compare")
        submitted.append(claim.spec)
        units = [
            UnitRecord(unit, "", "succeeded", side=("baseline", "candidate")[unit % 2])
            for unit in range(2 * claim.spec["replicates"])
        ]
        rows = [measured("step_ms", 1.2 * STEADY[unit // 2], unit_index=unit, model="tiny") for unit in range(16)]
        site.worker.finish(claim, "succeeded", measurements=rows, units=units)
        return site.job(claim.job_id)

    monkeypatch.setattr(Flopwatch, "submit", lambda _, body, **options: in_turns(body, **options))
    assert "Gate: passed" in ended(flopwatch("compare", one, other, "--alternate", "--fail-above", "5%"))
    (spec,) = submitted
    assert (spec["baseline"]["seed"], spec["candidate"]["seed"], spec["replicates"]) == (1, 2, 8)
