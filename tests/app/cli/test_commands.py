"""Commands that talk to a server."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from app.specs import KINDS
from app.states import FIRST_IN_QUEUE
from app.store.records import UnitRecord
from flopwatch import address
from flopwatch.connection import Event, parse_stream

TINY = ("benchmark", "model.size=tiny")


@pytest.fixture(autouse=True)
def _measurements(measured: Any) -> None:
    global MEASURED
    MEASURED = measured


def ended(done: subprocess.CompletedProcess[str], code: int = 0) -> str:
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr


def submitted(flopwatch: Any, *arguments: str) -> int:
    found = re.search(r"^job (\d+) queued: http://", ended(flopwatch("submit", *TINY, *arguments)))
    assert found
    return int(found[1])


def test_submit_and_show(site: Any, flopwatch: Any) -> None:
    job_id = submitted(
        flopwatch, "context_length=8", "--name", "n", "--label", "a=b", "--label", "c=d:e", "--priority", "-3",
        "--timeout-s", "2.5", "--max-attempts", "3", "--unique-key", "cli nightly",
    )  # fmt: skip
    job = site.job(job_id)
    assert (job["name"], job["labels"], job["priority"]) == ("n", {"a": "b", "c": "d:e"}, -3)
    assert (job["timeout_s"], job["max_attempts"], job["spec"]["context_length"]) == (2.5, 3, 8)
    shown = ended(flopwatch("show", str(job_id)))
    assert f"job {job_id}: benchmark, queued (n)" in shown
    assert "a=b, c=d:e" in shown
    assert re.search("^  key: +cli nightly$", shown, re.MULTILINE)
    assert json.loads(ended(flopwatch("show", str(job_id), "--json"))) == job
    assert [one["id"] for one in json.loads(ended(flopwatch("jobs", "--label", "c=d:e", "--json")))] == [job_id]


def test_fields_that_change_nothing_are_noted(site: Any, flopwatch: Any, tmp_path: Path) -> None:
    used = flopwatch("submit", *TINY, "activation_checkpointing=true", "checkpoint_layers=1")
    both = flopwatch("submit", *TINY, "checkpoint_layers=1", "compile_scope=model")
    swept = flopwatch("sweep", "estimate", "attention_layer.num_heads=1,2", "--dry-run")
    (tmp_path / "train.py").write_text("def make_step(device): return min\n")
    own = flopwatch("submit", "benchmark", "--step", f"{tmp_path}/train.py:make_step", "batch_size=8", "--dry-run")
    assert [re.findall("^note: (.*)$", done.stderr, re.MULTILINE) for done in (used, both, swept, own)] == [
        [],
        ["compile_scope, checkpoint_layers have no effect here (see `flopwatch specs benchmark`)"],
        ["attention_layer.num_heads has no effect here (see `flopwatch specs estimate`)"],
        ["batch_size has no effect here (a step of your own takes arguments.NAME=VALUE)"],
    ]
    brief = flopwatch("show", both.stdout.split()[1], "--format", "brief").stdout
    assert 'unused: ["compile_scope", "checkpoint_layers"]' in brief
    assert "unused:   compile_scope, checkpoint_layers" in flopwatch("show", both.stdout.split()[1]).stdout


def test_a_job_that_no_worker_can_run_says_so_at_once(site: Any, flopwatch: Any) -> None:
    submitted = flopwatch("submit", *TINY, "device=cuda")
    assert re.fullmatch(r"job \d+ waits: .*no .*worker.*\n", submitted.stderr)
    job_id = submitted.stdout.split()[1]
    assert f"waiting:  {site.job(int(job_id))['waiting']}" in ended(flopwatch("show", job_id))
    swept = flopwatch("sweep", *TINY, "device=cuda", "seed=1,2,3")
    assert re.fullmatch(r"3 jobs wait: .*no .*worker.*\n", swept.stderr)


def test_wait(flopwatch: Any, obedient: Any) -> None:
    done = flopwatch("submit", *TINY, "--wait")
    out = ended(done)
    assert "succeeded" in out
    assert re.search(r"^\| model +\| +context_length +\| +forward_ms +\|$", out, re.MULTILINE), out
    assert re.search(r"^\| tiny +\| +8 +\| +1.25\d* \|$", out, re.MULTILINE), out
    assert "1/2 measuring" in done.stderr
    assert "\x1b" not in out + done.stderr, "plain lines where there is no terminal"
    for command in (("submit", *TINY), ("sweep", *TINY, "seed=1,2")):
        assert "2.500 |" in ended(flopwatch(*command, "--wait", "--statistic", "max"))
        assert "is of the table" in ended(flopwatch(*command, "--statistic", "max"), 2)
        assert "'--statistic': 'p50' is not one of" in ended(flopwatch(*command, "--wait", "--statistic", "p50"), 2)


def test_results_are_the_table_and_the_reasons(site: Any, flopwatch: Any) -> None:
    found = [MEASURED("tflops", 2.5, model="tiny", context_length=8)]
    found += [MEASURED("tflops", None, "oom", model="tiny", context_length=length) for length in (16, 32)]
    job_id = site.run(measurements=found)
    shown = ended(flopwatch("show", str(job_id)))
    assert ended(flopwatch("table", "--job", str(job_id))) in shown
    assert shown.endswith("\n\ncontext_length=16/32 (2 cells): oom: out of memory\n")


DRIFT = {"name": "drift", "ok": False, "detail": "9 %"}


def test_units_and_their_tables(site: Any, flopwatch: Any, reported: Any) -> None:
    columns = {"kernel": "string", "total_ms": "number"}
    job_id = site.run(
        measurements=[MEASURED("forward_ms", 1.25, model="tiny", unit_index=1, validity="suspect")],
        tables=[
            reported("kernels forward", [["a", 2.0], ["b", None], ["c", 5.5]], **columns),
            reported("kernels forward", [["d", 3.0]], unit_index=1, **columns),
        ],
        units=[
            UnitRecord(0, "replicate 0", "succeeded", validity={"verdict": "valid", "checks": []}),
            UnitRecord(1, "replicate 1", "succeeded", validity={"verdict": "suspect", "checks": [DRIFT]}),
        ],
        validity={
            "verdict": "suspect",
            "counts": {"valid": 1, "suspect": 1},
            "checks": [
                {"name": "steady", "ok": True, "detail": "too slow", "severity": "not_judged"},
                {"name": "host_bound", "ok": False, "detail": "by far", "severity": "note"},
                *[{"name": "growth", "ok": True, "detail": "no memory grows", "severity": "note"}] * 2,
                {**DRIFT, "unit": "replicate 1"},
            ],
        },
    )
    shown = ended(flopwatch("show", str(job_id)))
    assert (
        "validity: suspect (1 valid, 1 suspect)\n    replicate 1: drift: 9 %\n    not judged: steady\n"
        "    note: host_bound: by far\n    passed: growth: no memory grows\n"
    ) in shown
    assert re.search(r"^1 +replicate 1 +succeeded +suspect$", shown, re.MULTILINE), shown
    command = f"flopwatch table --job {job_id} --name 'kernels forward'"
    assert f"`{command}`" in shown
    table = ended(flopwatch(*shlex.split(command)[1:], "--sort", "-total_ms", "--limit", "2"))
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert cells[2:] == [["0", "c", "5.500"], ["1", "d", "3.000"]]
    alone = ended(flopwatch(*shlex.split(command)[1:], "--unit", "1", "--format", "csv"))
    assert alone == "unit_index,kernel,total_ms\n1,d,3.0\n"
    assert "it has: kernels forward" in ended(flopwatch("table", "--job", str(job_id), "--name", "x"), 1)


@pytest.mark.parametrize(
    ("name", "code", "told"), [("fails", 1, "It broke."), ("is wrong", 8, "validity: wrong")], ids=["failed", "wrong"]
)
def test_wait_for_a_bad_end(flopwatch: Any, obedient: Any, name: str, code: int, told: str) -> None:
    done = flopwatch("submit", *TINY, "--wait", "--name", name)
    assert (done.returncode, told in done.stdout) == (code, True)
    assert flopwatch("submit", *TINY, "--wait", "--json", "--name", name).returncode == code
    ended(flopwatch("sweep", *TINY, "seed=1,2", "--wait", "--name", name), code)


STEP = ("submit", "benchmark", "--step")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((*STEP, "train.py"), "not of the form FILE.py:NAME"),
        ((*STEP, "train.py:other"), "train.py defines no 'other'"),
        ((*STEP, "train.py:make_step", "arguments.size=3"), "unexpected keyword argument 'size'"),
        ((*STEP, "train.py:make_step", "--code", "missing"), "--code missing: there is no such folder"),
        (
            (*STEP, "train.py:make_step", "--code", "."),
            "train.py imports 'torchgen' of its folder, and a job has loaded",
        ),
        ((*STEP, "train.py:make_step", "--wait", "--format", "brief"), "train.py imports 'beside'"),
        (("sweep", "benchmark", "--fit", "batch_size"), "not of the form key=value"),
        (("submit", "train.py"), "a script by `flopwatch run-script`"),
        (("submit", "benchmark", "train.py:make_step"), "your code goes in by --step"),
        (("rerun", "JOB", "--implementation", "missing.py:attention"), "missing.py: No such file"),
        (
            ("sweep", "benchmark", "--step", "train.py:make_step", "--fit", "arguments.size=9", "--dry-run"),
            "unexpected keyword argument 'size'",
        ),
        (("run-script", "."), ".: Is a directory"),
        (("versus", "old", ".", "--step", "train.py:make_step", "--", "benchmark"), "'old' is no file, no folder"),
        (
            ("submit", "estimate", "--step", "train.py:make_step"),
            "; for what fits, `flopwatch sweep memory --step train.py:make_step --fit arguments.NAME=UPTO`",
        ),
        (("versus", "old", "."), "Missing argument 'KIND|SPEC.json': name the kind of job, such as benchmark."),
        (("versus", "old", ".", "model.size=tiny"), "fields follow a kind: benchmark model.size=tiny"),
        (("compare", "JOB", "JOB", "--format", "xml"), "--format"),
        (("download", "JOB", "--to", "train.py"), "is a file"),
        (("why", "train.py"), "train.py names no function: write train.py:FUNCTION"),
        (("why", "train.py:make_step", "budget=20"), "budget is no field of a step: write --budget-s"),
    ],
)
def test_a_mistake_that_needs_no_server_exits_with_2(flopwatch, tmp_path, monkeypatch, words, why) -> None:
    """In one form, before anything is submitted."""
    (tmp_path / "train.py").write_text("import beside\n\n\ndef make_step(device): return min\n")
    (tmp_path / "beside.py").write_text("import torchgen\n")
    (tmp_path / "torchgen.py").touch()
    monkeypatch.chdir(tmp_path)
    job = str(submitted(flopwatch)) if "JOB" in words else ""
    refused = flopwatch(*(job if word == "JOB" else word for word in words))
    brief = "brief" in words
    told = refused.stdout if brief else refused.stderr
    assert (refused.returncode, why in told) == (2, True), told
    assert told.startswith("outcome: error\nexit_code: 2\n" if brief else "error: ")
    assert "Traceback" not in told


def test_a_table_of_an_unfinished_sweep_says_so(flopwatch: Any, site: Any) -> None:
    sweep = {"base": {"kind": "benchmark"}, "grid": {"seed": [1, 2]}, "labels": {"still": "queued"}}
    made = site.http.post("/sweeps", json=sweep).json()
    table = ("table", "--sweep", str(made["id"]))
    jobs = sorted(job["id"] for job in site.http.get("/jobs", params={"sweep": made["id"]}).json()["data"])
    queued = f"queued (jobs {jobs[0]}, {jobs[1]})"
    assert f"Not finished, and not in the table: {queued}." in ended(flopwatch(*table))
    assert json.loads(flopwatch(*table, "--format", "json").stdout)["missing"] == [queued]
    assert queued in ended(flopwatch("table", "--label", "still=queued"))
    assert queued not in ended(flopwatch("table", "--label", "still=queued", "--until", "2020-01-01"))
    unnamed = site.http.get("/tables", params={"kind": "benchmark"}).json()["missing"]
    assert not any("queued" in one for one in unnamed), "nobody asked for these jobs"
    assert f"note: {queued}" in flopwatch(*table, "--format", "brief").stdout
    assert f"jobs of sweep {made['id']} that the table lacks: 2 queued" in flopwatch(*table, "--format", "csv").stderr
    assert f"job {jobs[0]}" in ended(flopwatch("table", "--job", str(jobs[0])))


def test_a_field_inside_the_model_is_named(flopwatch: Any) -> None:
    given = ended(flopwatch("submit", "benchmark", "model=tiny"), 1)
    assert '/spec/model: Input should be an object; got "tiny"; did you mean model.size=tiny?' in given
    meant = "/size: Unknown field; did you mean model.size?"
    assert f"/spec{meant}" in ended(flopwatch("submit", "benchmark", "size=tiny"), 1)
    assert f"/grid{meant}" in ended(flopwatch("sweep", "benchmark", "size=tiny,small"), 1)
    assert meant in ended(flopwatch("run", "benchmark", "size=tiny"), 2)


def test_presets(site: Any, flopwatch: Any) -> None:
    submit = ("submit", "attention", "--json", "--preset", "cpu")
    spec = json.loads(ended(flopwatch(*submit, "sequence_lengths=128", "implementations=eager,tiled")))["spec"]
    assert (spec["sequence_lengths"], spec["implementations"]) == ([128], ["eager", "tiled"]), "what is given"
    assert (spec["num_heads"], spec["head_dims"], spec["mode"]) == (4, [32], "forward"), "what the preset says"
    done = flopwatch("sweep", "attention", "--json", "--preset", "cpu", "sequence_lengths=128,256", "num_heads=2")
    sweep = json.loads(ended(done))
    assert sweep["grid"] == {"sequence_lengths": [[128], [256]]}
    assert (sweep["base"]["num_heads"], sweep["base"]["head_dims"]) == (2, [32])
    errors = ended(flopwatch("submit", "attention", "--preset", "cpuu"), 1)
    assert "no preset 'cpuu'; its presets: leaderboard, flash_benchmarking, classic, cpu" in errors
    assert "did you mean attention? known kinds: attention" in ended(flopwatch("submit", "atention"), 1)


def test_a_dry_run_stores_nothing_and_says_what_earlier_jobs_took(serve: Any, flopwatch: Any, tmp_path: Path) -> None:
    with serve(tmp_path) as site:

        def run(*arguments: str) -> subprocess.CompletedProcess[str]:
            return flopwatch(*arguments, "--dry-run", FLOPWATCH_URL=site.url)

        nobody = "no worker is connected: the jobs would wait for one\n"
        grid = ("sweep", *TINY, "context_length=8,16", "seed=1,2", "--exclude", "context_length=16,seed=2")
        done = run(*grid, "--wait")
        assert ended(done) == f"3 jobs\nno finished job of this kind and model yet\n{nobody}"
        assert "nothing was submitted" in done.stderr
        for seconds in (10, 20, 90):
            _took(site, seconds)
        tiny = "the last 3 jobs of this kind and model took 10 s to 1 min 30 s, 20 s in the median\n"
        assert ended(run("submit", "benchmark", "model.size=tiny")) == f"1 job\n{tiny}{nobody}"
        assert "no finished job" in ended(run("submit", "benchmark", "model.size=small")), "tiny says nothing of it"
        assert "no finished job" in ended(run("submit", "benchmark")), "its model is small by default"
        found = json.loads(ended(run(*grid, "--json")))
        assert (found["jobs"], found["median_s"], found["rests_on"]) == (3, 20.0, [3, 2, 1])
        search = ("sweep", "benchmark", "model.size=tiny", "seed=1,2", "--fit", "batch_size=64", "--multiple-of", "8")
        assert ended(run(*search)) == f"2 searches, one job at a time each, at most 14 jobs in all\n{tiny}{nobody}"
        without_grid = [word for word in search if word != "seed=1,2"]
        assert ended(run(*without_grid)).startswith("1 search, one job at a time")
        assert "/spec/context_lenght: Unknown field" in ended(run("submit", *TINY, "context_lenght=8"), 1)
        site.worker.register()
        assert "--multiple-of: is for a search" in ended(run("sweep", *TINY, "seed=1,2", "--multiple-of", "8"), 2)
        gpu = "no connected worker has a GPU (device=cuda): the jobs would wait"
        assert gpu in ended(run("submit", *TINY, "device=cuda"))
        assert "would wait" not in ended(run("submit", *TINY))
        assert "No worker has the attention" in ended(run("sweep", *TINY, "attention=nobodys", "seed=1,2"), 1)
        assert (len(site.http.get("/jobs").json()["data"]), site.http.get("/sweeps").json()["data"]) == (3, [])


def _took(site: Any, seconds: int, **spec: Any) -> None:
    """Run a job that takes so long."""
    _as_if_run(site, site.run(spec=spec), seconds)


def _as_if_run(site: Any, job_id: int, seconds: int) -> None:
    with site.services.database.write() as connection:
        connection.exec_driver_sql(
            "update job set state = 'succeeded', started_at = '2026-01-01 00:00:00', finished_at = ? where id = ?",
            (f"2026-01-01 00:{seconds // 60:02}:{seconds % 60:02}", job_id),
        )


def test_a_dry_run_of_ones_own_step_submits_nothing(fresh_site: Any, flopwatch: Any, tmp_path: Path) -> None:
    """And speaks of earlier jobs of the same step only."""
    file = tmp_path / "train.py"
    file.write_text("def make_step(device, width=1):\n    return lambda: 1\n")

    def run(*fields: str) -> subprocess.CompletedProcess[str]:
        step = ("--step", f"{file}:make_step", "--dry-run")
        return flopwatch("submit", "benchmark", *fields, *step, FLOPWATCH_URL=fresh_site.url)

    _took(fresh_site, 90)
    assert "1 job\nno finished job of this code yet\n" in ended(run())
    assert "unexpected keyword argument 'widht'" in ended(run("arguments.widht=1"), 2)
    assert fresh_site.rows()["job"] == 1
    submitted = ("submit", "benchmark", "arguments.width=2", "--step", f"{file}:make_step", "--json")
    job = json.loads(ended(flopwatch(*submitted, FLOPWATCH_URL=fresh_site.url)))
    _as_if_run(fresh_site, job["id"], 40)
    file.write_text("def make_step(device, width=1):\n    return lambda: 2\n")
    assert "one job of this code took 40 s" in ended(run("arguments.width=2"))
    ours = flopwatch("submit", "benchmark", "model.size=tiny", "--dry-run", FLOPWATCH_URL=fresh_site.url)
    assert "one job of this kind and model took 1 min 30 s" in ended(ours), "that of the step does not speak for it"
    assert "no finished job of this code" in ended(run("arguments.width=3"))


def test_label(site: Any, flopwatch: Any) -> None:
    job_id = site.submit(name="old", labels={"gone": "x", "kept": "y"})["id"]
    done = flopwatch(
        "label", str(job_id), "new=z", "--remove", "gone", "--remove", "never", "--name", "", "--note", "No gain."
    )
    assert (done.stderr, done.returncode) == (f"job {job_id} has no label 'never'\n", 0)
    assert "kept=y, new=z" in done.stdout
    assert "No gain." in done.stdout
    job = site.job(job_id)
    assert (job["name"], job["labels"], job["note"]) == (None, {"kept": "y", "new": "z"}, "No gain.")
    assert flopwatch("label", str(job_id)).returncode == 2


def test_retry_goes_on_after_a_refusal(site: Any, flopwatch: Any) -> None:
    done, first, last = (submitted(flopwatch, "--priority", "50", "--max-attempts", "1") for _ in range(3))
    site.worker.finish(site.worker.claim_job(done))
    site.worker.finish(site.worker.claim_job(first), "failed", log="what failed\n")
    ended(flopwatch("cancel", str(last)))
    retried = flopwatch("retry", str(first), str(done), "99999", str(last))
    assert retried.returncode == 1
    assert retried.stdout.splitlines() == [f"job {first} queued for attempt 2", f"job {last} queued for attempt 1"]
    assert re.findall(r"^error: job (\d+): ", retried.stderr, re.MULTILINE) == [str(done), "99999"]
    site.worker.finish(site.worker.claim_job(first), log="what succeeded\n")
    assert ended(flopwatch("logs", str(first))) == "what succeeded\n"
    assert ended(flopwatch("logs", str(first), "--attempt", "1")) == "what failed\n"
    assert "no attempt 3" in ended(flopwatch("logs", str(first), "--attempt", "3"), 1)
    assert ended(flopwatch("logs", str(first), "--attempt", "1", "--follow"), 2)


def test_pause_and_resume(site: Any, flopwatch: Any) -> None:
    assert ended(flopwatch("pause", "--kind", "kernel")) == "paused: kernel\n"
    assert ended(flopwatch("pause", "--kind", "benchmark", "--kind", "kernel")) == "paused: benchmark, kernel\n"
    assert "its kind is paused: `flopwatch resume --kind benchmark`" in flopwatch("submit", *TINY).stderr
    assert "Paused: benchmark, kernel." in site.http.get("/ui").text
    assert ended(flopwatch("resume", "--kind", "benchmark")) == "paused: kernel\n"
    assert "unknown kind" in ended(flopwatch("pause", "--kind", "benchmak"), 1).lower()
    assert ended(flopwatch("pause")) == "paused: all kinds\n"
    assert ended(flopwatch("pause", "--kind", "kernel")) == "paused: all kinds\n"
    assert "`flopwatch resume` without --kind" in ended(flopwatch("resume", "--kind", "kernel"), 1)
    assert json.loads(ended(flopwatch("resume", "--json"))) == {"kinds": []}
    assert ended(flopwatch("resume")) == "nothing is paused any more\n"


def test_time_limits(site: Any, flopwatch: Any) -> None:
    ids = [submitted(flopwatch, *arguments) for arguments in ((), ("--timeout-s", "none"), ("--timeout-s", "1e3"))]
    assert [site.job(job_id)["timeout_s"] for job_id in ids] == [3600, None, 1000]
    shown = [ended(flopwatch("show", str(job_id))) for job_id in ids[1:]]
    assert [re.findall(r"^  timeout: +(.*)$", text, re.MULTILINE) for text in shown] == [["none"], ["16 min 40 s"]]
    for senseless in ("soon", "nan", "0", "None"):
        assert "/timeout_s" in ended(flopwatch("submit", *TINY, "--timeout-s", senseless), 1)


def test_cancel_and_delete_by_filter(site: Any, flopwatch: Any) -> None:
    done, *others = (submitted(flopwatch, "--priority", "50", "--label", "bulk=x") for _ in range(3))
    site.worker.finish(site.worker.claim_job(done))
    assert ended(flopwatch("cancel", "--label", "bulk=x", "--state", "queued")) == (
        "jobs cancelled: 2; being cancelled: 0\n"
    )
    assert [site.job(job_id)["state"] for job_id in (done, *others)] == ["succeeded", "cancelled", "cancelled"]
    last = submitted(flopwatch, "--label", "bulk=x")
    assert ended(flopwatch("delete", "--label", "bulk=x", "--kind", "benchmark")) == (
        "jobs deleted: 3; queued or running, so not deleted: 1\n"
    )
    refused = flopwatch("delete", str(last), "99999")
    assert refused.returncode == 1
    assert re.findall(r"^error: job (\d+): ", refused.stderr, re.MULTILINE) == [str(last), "99999"]
    ended(flopwatch("cancel", str(last)))
    assert ended(flopwatch("delete", str(last))) == f"job {last} deleted\n"
    for command in ("cancel", "delete"):
        assert "at least one of" in ended(flopwatch(command), 2), "never all by accident"
        assert "not both" in ended(flopwatch(command, "1", "--state", "failed"), 2)
        assert "state" in ended(flopwatch(command, "--state", "odd"), 1)


def test_jobs(site: Any, flopwatch: Any) -> None:
    ids = [submitted(flopwatch, "--label", f"list={n}") for n in range(3)]
    site.http.post(f"/jobs/{ids[0]}/cancel")
    lines = ended(flopwatch("jobs")).splitlines()
    assert lines[0].split()[:4] == ["id", "kind", "state", "case"]
    assert "tiny, context_length=" in lines[1]
    assert [int(line.split()[0]) for line in lines[1:4]] == ids[::-1]
    found = json.loads(ended(flopwatch("jobs", "--label", "list=1", "--json")))
    assert [job["id"] for job in found] == [ids[1]]
    limited = flopwatch("jobs", "--state", "queued", "--limit", "1", "--json")
    assert [job["id"] for job in json.loads(limited.stdout)] == [ids[2]]
    assert limited.stderr == "showing the first 1; use --limit for more\n"
    assert flopwatch("jobs", "--label", "list=1", "--limit", "1").stderr == ""
    assert json.loads(ended(flopwatch("jobs", "--label", "list=1", "--json", "--since", "2999-01-01"))) == []


@pytest.mark.parametrize("command", ["jobs", "table", "cancel", "delete"])
def test_an_unknown_kind_is_refused(site: Any, flopwatch: Any, command: str) -> None:
    error = ended(flopwatch(command, "--kind", "benchmak"), 1)
    assert error == f"error: --kind benchmak: no job is of this kind; known kinds: {', '.join(sorted(KINDS))}\n"
    ended(flopwatch(command, "--kind", "benchmark", "--label", "nobody=has"))


def test_jobs_say_what_they_measure_and_where_they_stand(site: Any, flopwatch: Any) -> None:
    done = submitted(flopwatch, "--priority", "60", "--label", "stand=yes", "context_length=8")
    site.worker.finish(site.worker.claim_job(done), validity={"verdict": "suspect", "checks": []})
    waiting = [submitted(flopwatch, *extra, "--label", "stand=yes") for extra in ((), ("--priority", "40"))]
    stuck = flopwatch("submit", *TINY, "device=cuda", "--label", "stand=yes").stdout.split()[1]
    listed = ended(flopwatch("jobs", "--label", "stand=yes")).splitlines()
    head, *rows, reason = [re.split(r"  +", line.strip()) for line in listed]
    found = {int(row[0]): dict(zip(head, row, strict=False)) for row in rows}
    assert found[done]["case"] == "tiny, context_length=8"
    assert (found[done]["verdict"], found[done]["place"]) == ("suspect", "–")
    # Other tests' jobs may be queued, too, before both or after both.
    first, second = (int(found[job_id]["place"]) for job_id in reversed(waiting))
    assert first < second
    assert found[waiting[1]]["priority"] == "40"
    assert reason == [f"jobs {stuck}, {waiting[1]}, {waiting[0]} wait: {site.job(int(stuck))['waiting']}"]
    assert f"place:    {first} in the queue" in ended(flopwatch("show", str(waiting[1])))


def test_the_first_job_waits_for_free_devices(fresh_site: Any, flopwatch: Any) -> None:
    first, second = (fresh_site.submit()["id"] for _ in range(2))

    def shown(job_id: int) -> str:
        return ended(flopwatch("show", str(job_id), FLOPWATCH_URL=fresh_site.url))

    assert "waiting:  no worker is connected" in shown(first), "the reason that is known"
    fresh_site.worker.register()
    assert f"\n  waiting:  {FIRST_IN_QUEUE}\n" in shown(first)
    assert FIRST_IN_QUEUE in fresh_site.http.get(f"/ui/jobs/{first}").text
    assert "waiting:" not in shown(second)
    fresh_site.worker.claim_job(first)
    assert "waiting:" not in shown(first)


def test_a_spec_from_a_file_and_fields(site: Any, flopwatch: Any, tmp_path: Path) -> None:
    file = tmp_path / "spec.json"
    file.write_text('{"kind": "benchmark", "model": {"size": "tiny"}, "context_length": 8}')
    job = json.loads(ended(flopwatch("submit", str(file), "context_length=16", "model.num_layers=1", "--json")))
    spec = job["spec"]
    assert (spec["kind"], spec["context_length"], spec["model"]["size"]) == ("benchmark", 16, "tiny")
    assert spec["model"]["num_layers"] == 1
    assert json.loads(ended(flopwatch("sweep", str(file), "seed=1,2", "--json")))["base"]["context_length"] == 8
    for content, words in [('{"spec": {"kind": "ddp"}}', "body of a job"), ("{", "not JSON"), ("[]", "JSON object")]:
        file.write_text(content)
        assert words in ended(flopwatch("submit", str(file)), 2)
    file.write_text('{"model": {"size": "tiny"}}')
    assert "/spec/kind" in ended(flopwatch("submit", str(file)), 1)
    assert "no kind has such a name" in ended(flopwatch("submit", str(tmp_path / "none.json")), 2)
    file.write_text('{"kind": "benchmark"}')
    assert "--preset" in ended(flopwatch("submit", str(file), "--preset", "xl"), 2)


def test_rerun(site: Any, flopwatch: Any) -> None:
    job_id = submitted(flopwatch, "--label", "a=rerun", "--priority", "7")
    again = json.loads(ended(flopwatch("rerun", str(job_id), "precision=bf16", "model.num_layers=1", "--json")))
    former = site.job(job_id)
    assert again["id"] > job_id
    assert (again["labels"], again["priority"]) == ({"a": "rerun"}, 7)
    assert again["spec"]["model"].pop("num_layers") == 1
    assert former["spec"]["model"].pop("num_layers") is None
    assert again["spec"] == {**former["spec"], "precision": "bf16"}
    assert "did you mean precision?" in ended(flopwatch("rerun", str(job_id), "precison=bf16"), 1)
    assert "There is no job 99999" in ended(flopwatch("rerun", "99999"), 1)
    lists = json.loads(ended(flopwatch("submit", "attention", "--preset", "cpu", "--json")))
    more = json.loads(ended(flopwatch("rerun", str(lists["id"]), "sequence_lengths=128,256", "--json")))
    assert more["spec"] == {**lists["spec"], "sequence_lengths": [128, 256]}


def test_sweeps_and_their_resumption(site: Any, flopwatch: Any) -> None:
    sweep_id = ended(flopwatch("sweep", *TINY, "seed=1,2", "context_length=8,16,32", "--name", "grid")).split()[1]
    listed = ended(flopwatch("sweeps", "--limit", "1")).splitlines()
    assert listed[0].split() == ["id", "kind", "grid", "jobs", "age", "name"]
    assert re.fullmatch(rf"{sweep_id} +benchmark +2 seed × 3 context_length +6 queued +\d+ s ago +grid", listed[1])
    assert json.loads(ended(flopwatch("sweeps", "--json")))[0]["id"] == int(sweep_id)
    ended(flopwatch("cancel", "--sweep", sweep_id))
    assert ended(flopwatch("retry", "--sweep", sweep_id)) == f"sweep {sweep_id}: 6 queued\n"
    assert "not both" in ended(flopwatch("retry", "1", "--sweep", sweep_id), 2)
    assert "not both" in ended(flopwatch("retry"), 2)


def test_workers(serve: Any, flopwatch: Any, tmp_path: Path) -> None:
    with serve(tmp_path) as site:
        here = {"FLOPWATCH_URL": site.url}
        assert "start one with `flopwatch worker`" in flopwatch("workers", **here).stderr
        site.worker.register()
        job_id = site.submit()["id"]
        site.worker.claim_job(job_id)
        rows = ended(flopwatch("workers", **here)).splitlines()
        assert re.fullmatch(rf"test-worker +active +1x test CPU +job {job_id} +\d+ s ago +– +2.13", rows[1])
        has = [{"type": "cuda", "name": "NVIDIA H200"}] * 2
        site.services.registration.register_worker("gpus", "host", 1, [], [], has, {})
        site.services.registration.register_worker("cpus", "host", 1, [], [], [{"type": "cpu", "count": 8}], {})
        rows = ended(flopwatch("workers", **here))
        assert re.search(r"^gpus +active +2x NVIDIA H200 ", rows, re.MULTILINE)
        assert re.search(r"^cpus +active +8 CPUs ", rows, re.MULTILINE)
        site.services.registration.set_worker_state(site.worker.id, "stopped")
        left = flopwatch("workers", **here)
        assert "1 stopped or lost workers hidden (--all shows them)" in left.stderr
        assert "test-worker" not in left.stdout
        assert "test-worker" in ended(flopwatch("workers", "--all", **here))


def test_options_choose_the_server(site: Any, flopwatch: Any, tmp_path: Path) -> None:
    nowhere = {"FLOPWATCH_URL": "http://127.0.0.1:1"}
    for arguments in (("jobs", "--url", site.url), ("--url", site.url, "jobs"), ("specs", "--url", site.url)):
        ended(flopwatch(*arguments, **nowhere))
    left = tmp_path / "left"
    left.mkdir()
    nobody = flopwatch("jobs", "--data-dir", str(left), FLOPWATCH_PORT="1")  # the usual port may be somebody's
    assert "Cannot talk to http://127.0.0.1:1" in ended(nobody, 1)
    address.leave(left, site.url)
    for arguments in (("jobs", "--data-dir", str(left)), ("--data-dir", str(left), "jobs")):
        ended(flopwatch(*arguments, **nowhere))
    assert "--url" not in ended(flopwatch("jobs", **nowhere), 1).replace("FLOPWATCH_URL, or --url", "")


def test_an_unknown_setting_is_named(site: Any, flopwatch: Any) -> None:
    specs = flopwatch("specs", FLOPWATCH_DATADIR="/tmp", FLOPWATCH_ZEBRA="1", flopwatch_port="80")
    assert specs.returncode == 0
    assert specs.stderr.splitlines() == [
        "warning: FLOPWATCH_DATADIR is no setting, and nothing reads it: did you mean FLOPWATCH_DATA_DIR?",
        "warning: FLOPWATCH_ZEBRA is no setting, and nothing reads it",
    ]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_printed_defaults_are_accepted(site: Any, flopwatch: Any, kind: str) -> None:
    lines = ended(flopwatch("specs", kind)).partition("\n\n")[0].splitlines()
    column = lines[0].index("default")
    described = lines[0].index("description")
    fields = [f"{line[:column].strip()}={line[column:described].strip()}" for line in lines[1:]]
    assert fields
    job = json.loads(ended(flopwatch("submit", kind, *fields, "--json")))
    expected = KINDS[kind].example().model_dump(mode="json")
    if KINDS[kind].holds_specs:
        assert (expected["seed"], type(job["spec"]["seed"])) == (None, int), "null: drawn at submission"
        expected["seed"] = job["spec"]["seed"]
    assert job["spec"] == expected


def test_waiting_has_a_limit_and_an_exit_code_of_its_own(flopwatch: Any) -> None:
    for command in (["submit", *TINY], ["sweep", *TINY, "seed=1,2"]):
        late = flopwatch(*command, "--wait-at-most", "0.3")
        assert late.returncode == 75, late.stderr
        ends = r"job \d+ has not started: no worker is connected.*; |sweep \d+ is still running; stop it with "
        assert re.search(rf"not done in time: ({ends})`flopwatch cancel", late.stderr)
        assert "waits: no worker is connected" in late.stderr or "wait: no worker is connected" in late.stderr


def test_a_search_prints_what_fits(flopwatch: Any, obedient: Any) -> None:
    done = flopwatch("sweep", *TINY, "context_length=8", "--fit", "context_length=32", "--multiple-of", "8", "--wait")
    assert re.search(r"^context_length=32 fits \(job \d+\)\. Every value up to 32", ended(done), re.MULTILINE)
    sweep = re.search(r"sweep (\d+) searches by 1 job at a time, context_length 8, 16 … up to 32, then", done.stderr)
    assert sweep
    shown = ended(flopwatch("sweeps", sweep[1]))
    assert "largest context_length up to 32" in shown
    assert "context_length=32 fits" in shown
    assert "is no whole number" in ended(flopwatch("sweep", *TINY, "--fit", "context_length=many"), 2)


def test_sweep_and_table(flopwatch: Any, obedient: Any) -> None:
    done = flopwatch(
        "sweep", *TINY, "context_length=8,16", "seed=1,2", "--exclude", "context_length=16,seed=2", "--wait"
    )
    out = ended(done)
    assert "3 succeeded" in out
    assert "forward_ms" in out
    sweep = re.search(r"sweep (\d+) with 3 jobs", done.stderr)
    assert sweep
    table = ended(flopwatch("table", "--sweep", sweep[1], "--columns", "forward_ms", "--format", "csv"))
    assert len(table.splitlines()) == 4
    rows = json.loads(ended(flopwatch("table", "--sweep", sweep[1], "--format", "json")))["rows"]
    assert [row["forward_ms"] for row in rows] == [1.25] * 3
    chosen = ("table", "--sweep", sweep[1])
    named = ("--caption", "Steps", "--latex-label", "tab:steps", "--limit", "1", "--links", "--format", "latex")
    latex = ended(flopwatch(*chosen, *named, "--best", "--relative-to", "context_length=8"))
    assert "\\caption{Steps}\n\\label{tab:steps}" in latex
    assert r" & \textbf{1.250} & reference " in latex
    assert latex.count("/ui/jobs/") == 1
    assert '"forward_ms, context_length=8"' in ended(flopwatch(*chosen, "--pivot", "context_length", "--format", "csv"))
    assert ended(flopwatch(*chosen, "--label", "no=job", "--format", "csv")).strip() == ""
    assert "must be a span such as" in ended(flopwatch(*chosen, "--since", "yesterday"), 1)


def test_logs(site: Any, flopwatch: Any, start: Any) -> None:
    job_id = submitted(flopwatch, "--priority", "50")
    claim = site.worker.claim_job(job_id)
    following = start("logs", str(job_id), "--follow", FLOPWATCH_URL=site.url)
    for number in range(3):
        site.worker.report(claim, "log", text=f"line {number}\n")
        assert following.stdout.readline() == f"line {number}\n"
    site.worker.finish(claim, log="everything\n")
    assert (following.wait(20), following.stdout.read()) == (0, "")
    assert ended(flopwatch("logs", str(job_id))) == "everything\n"
    assert ended(flopwatch("logs", str(job_id), "--follow")) == "everything\n"


def test_interrupted_wait_leaves_the_job(site: Any, flopwatch: Any, start: Any) -> None:
    waiting = start("submit", *TINY, "--wait", FLOPWATCH_URL=site.url)
    job_id = int(waiting.stderr.readline().split()[1])
    while (line := waiting.stderr.readline()) != "queued\n":
        assert "wait" in line
    waiting.send_signal(2)
    assert waiting.wait(20) == 130
    assert f"flopwatch cancel {job_id}" in waiting.stderr.read()
    assert site.job(job_id)["state"] == "queued"


def test_a_job_without_files_says_so(site: Any, flopwatch: Any) -> None:
    job_id = site.submit()["id"]
    done = flopwatch("download", str(job_id))
    assert (ended(done), done.stderr) == ("", f"job {job_id} has no files so far: it is queued\n")


def test_download(site: Any, flopwatch: Any, tmp_path: Path) -> None:
    job_id = site.run(artifacts=[site.stored(b"0123456789", "naïve (2).txt")])
    folder = tmp_path / "new" / "folder"
    told = ended(flopwatch("download", str(job_id), "naïve (2).txt", "--to", str(folder)))
    assert told == f"{folder}/naïve (2).txt: 10 bytes\n"
    assert (folder / "naïve (2).txt").read_bytes() == b"0123456789"
    assert "it has: naïve (2).txt" in ended(flopwatch("download", str(job_id), "other"), 1)


def test_specs(flopwatch: Any) -> None:
    assert re.search(r"^model\.size +small ", ended(flopwatch("specs", "benchmark")), re.MULTILINE)
    presets = ended(flopwatch("specs", "attention"))
    assert re.search(r"^leaderboard +do_bench=true implementations=triton,flex,", presets, re.MULTILINE)
    assert re.search(r"^candidate\.precision +bf16", ended(flopwatch("specs", "compare")), re.MULTILINE)
    assert json.loads(ended(flopwatch("specs", "benchmark", "--json")))[0]["kind"] == "benchmark"
    assert "no kind 'nothing'" in ended(flopwatch("specs", "nothing"), 1)


def test_parsing_a_stream() -> None:
    lines = [": keep-alive", "", "id: 1", "event: log", 'data: {"text": "a: b"}', "", "data: {}", "", ""]
    first, second = ("1", Event("log", {"text": "a: b"})), ("0", Event("message", {}))
    assert list(parse_stream(iter(lines))) == [("", None), first, second], "a sign of life, and no event"


def test_help_is_quick_and_imports_little() -> None:
    code = (
        "import sys; sys.argv = ['flopwatch', '--help']\n"
        "from app.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(*(m for m in ('pydantic', 'fastapi', 'sqlalchemy', 'httpx', 'pandas', 'torch') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "submit" in done.stdout
    assert done.stdout.splitlines()[-1] == "", "nothing slow is imported"
