"""Profiling under nsys and ncu. Executables of tests/plugins/profilers.py stand in for them, except on a GPU."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from app.specs.profile import ProfileSpec
from kernels import device_events
from tests.plugins.profilers import NO_PERMISSION, install
from tests.workers.reporting import Report
from workers import tools
from workers.jobs._base import Unit, Wrapping
from workers.jobs._training import building
from workers.jobs.profile import RUNNER, nsight
from workers.measure.memory import OutOfMemory
from workers.outcome import InvalidEnvironment, Unsupported

MODEL = {"d_model": 16, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": 61}
SMALL = {"model": MODEL, "batch_size": 1, "context_length": 8, "warmup_steps": 1, "profile_steps": 2}
SPLIT, COMBINE = "flash_fwd_splitkv_kernel", "flash_fwd_splitkv_combine_kernel"


def spec_of(**fields: Any) -> ProfileSpec:
    return ProfileSpec.model_validate_json(json.dumps({**SMALL, **fields}))


@pytest.fixture(autouse=True)
def only_stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tool of this host is found unless a test installs one."""
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path / "path"), "/usr/bin", "/bin"]))
    monkeypatch.setattr(tools, "FOLDERS", dict.fromkeys(tools.FOLDERS, ()))


def planned(tmp_path: Path, tool: str, mode: str = "works", **fields: Any) -> tuple[ProfileSpec, Unit]:
    """Install a stand-in; returns a spec that asks for it, and the unit that it gets."""
    install(tmp_path / "path", tool, mode)
    spec = spec_of(**{tool: True if tool == "nsys" else {"kernels": "flash|softmax"}, **fields})
    (unit,) = nsight.units(spec, "tiny")
    return spec, unit


def wrapped(unit: Unit, scratch: Path) -> tuple[str, int]:
    """Run a program that does nothing under the unit's tool, as the agent would; the output and the exit code."""
    command = [word.replace("{scratch}", str(scratch)) for word in unit.wrap]
    done = subprocess.run([*command, "true"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return done.stdout, done.returncode


class TestPlan:
    def test_each_tool_has_a_unit_of_its_own(self, tmp_path: Path) -> None:
        nsys, ncu = (install(tmp_path / "path", name) for name in ("nsys", "ncu"))
        nsys_unit, ncu_unit = nsight.units(
            spec_of(nsys=True, ncu={"kernels": "flash", "set": "full", "launches": 7}), "tiny"
        )
        assert [(unit.title, unit.start, unit.wrap[0]) for unit in (nsys_unit, ncu_unit)] == [
            ("tiny, under nsys", "exec", str(nsys)),
            ("tiny, under ncu", "exec", str(ncu)),
        ]
        assert nsys_unit.params == {"tool": "nsys", "path": str(nsys), "version": "2024.6.2.225"}
        assert {"--capture-range=cudaProfilerApi", "--capture-range-end=stop", "--python-backtrace=cuda"} <= {
            *nsys_unit.wrap
        }
        options = dict(zip(ncu_unit.wrap, ncu_unit.wrap[1:], strict=False))
        assert options["--kernel-name"] == "regex:flash"
        assert (options["--set"], options["--launch-count"], options["--clock-control"]) == ("full", "7", "none")
        assert options["--profile-from-start"] == "off"
        assert options["--export"] == "{scratch}/report"

    @pytest.mark.parametrize("tool", ["nsys", "ncu"])
    def test_a_tool_that_this_host_lacks_is_unsupported(self, tmp_path: Path, tool: str) -> None:
        with pytest.raises(Unsupported, match=f"{tool}: this worker has no Nsight"):
            planned(tmp_path, tool, "broken")


class TestRun:
    def test_the_profiled_steps_have_names_and_no_measurement(self, tmp_path, monkeypatch) -> None:
        spec, unit = planned(tmp_path, "ncu")
        report, calls = Report(tmp_path), []
        monkeypatch.setattr(device_events, "synchronize", lambda: calls.append("synchronize"))
        monkeypatch.setattr(torch.cuda.profiler, "start", lambda: calls.append("start"))
        monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: calls.append("stop"))
        tool_on = nsight.tool_on
        monkeypatch.setattr(nsight, "tool_on", lambda _: tool_on(torch.device("cuda")))
        with torch.profiler.profile() as profiler:
            nsight.run(spec, unit, report)
        names = [event.name for event in sorted(profiler.events(), key=lambda event: event.time_range.start)]
        steps = [name for name in names if name in ("warmup", "step_1", "step_2", "step_3")]
        assert steps == ["warmup", "step_1", "step_2"]
        parts = ("forward", "layers.0", "layers.1", "scores", "softmax", "values", "backward", "optimizer")
        assert {name: names.count(name) for name in parts} == {
            **dict.fromkeys(parts, 3),
            **dict.fromkeys(("scores", "softmax", "values"), 6),
        }
        assert calls == ["synchronize", "start", "synchronize", "stop"]
        assert report.rows == []
        assert report.tables == {}
        assert json.loads((tmp_path / nsight.PHASES).read_text()) == ["forward", "backward", "optimizer"]
        assert (tmp_path / nsight.STARTED).exists()
        assert report.fingerprint["software"]["ncu"] == "2025.3.1.0"
        assert report.steps == [(1, 3, "warming up"), (2, 3, "under the profiler"), (3, 3, "under the profiler")]

    def test_too_little_memory_is_no_failure(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        spec, unit = planned(tmp_path, "ncu", "silent")

        def build(*_: Any) -> Any:
            raise OutOfMemory("out of memory in making the model")

        monkeypatch.setattr(building, "build", build)
        report = Report(tmp_path)
        nsight.run(spec, unit, report)
        output, _ = wrapped(unit, tmp_path)
        assert nsight.error_of(spec, unit, tmp_path, output, succeeded=True) is None
        nsight.collect(spec, unit, tmp_path, report)
        (check,) = report.verdict["checks"]
        assert "out of memory in making the model" in check["detail"]
        assert (report.rows, report.tables, report.files) == ([], {}, {})


class TestNcu:
    def test_counters_are_tables_and_measurements_of_each_kernel(self, tmp_path: Path) -> None:
        spec, unit = planned(tmp_path, "ncu")
        output, code = wrapped(unit, tmp_path)
        assert (code, nsight.error_of(spec, unit, tmp_path, output, succeeded=True)) == (0, None)
        report = Report(tmp_path)
        nsight.collect(spec, unit, tmp_path, report)
        assert report.files == {"report.ncu-rep": tmp_path / "report.ncu-rep"}
        launches = report.table_rows("ncu-launches")
        assert [(row["function"], row["grid"], row["registers_per_thread"]) for row in launches] == [
            (SPLIT, "(8, 2, 8)", 254.0),
            (COMBINE, "(512, 1, 1)", 54.0),
        ]
        first = launches[0]
        assert first["duration_us"] == pytest.approx(7.584)
        assert first["shared_memory_kib"] == 73.0
        assert (first["sm_throughput_percent"], first["achieved_occupancy_percent"]) == (13.39, 6.23)
        measured = {(row["phase"], row["metric"]): (row["unit"], row["median"]) for row in report.rows}
        assert measured[SPLIT, "dram_throughput_percent"] == ("%", 1.64)
        assert measured[COMBINE, "dram_throughput_percent"] == ("%", 8.01)
        assert measured[COMBINE, "theoretical_occupancy_percent"] == ("%", 56.25)

    def test_launches_of_one_kernel_are_samples(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        metrics = [
            {"launch__registers_per_thread": text, "sm__throughput.avg.pct_of_peak_sustained_elapsed": "1"}
            for text in ("1,024", "n/a", "5.12e+02")
        ]
        launches = [nsight.Launch(number, "kernel", "", "", figures) for number, figures in enumerate(metrics)]
        monkeypatch.setattr(nsight, "ncu_launches", lambda _: launches)
        by_metric = {row["metric"]: row for row in collected(tmp_path, "ncu").rows}
        registers = by_metric["registers_per_thread"]
        assert (registers["phase"], registers["n"], registers["median"]) == ("kernel", 2, 768.0)
        assert by_metric["sm_throughput_percent"]["n"] == 3

    def test_what_a_set_lacks_is_unknown_with_the_reason(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        absent = nsight.Counter("branches", "branches", "sm__branches.sum")
        monkeypatch.setattr(nsight, "COUNTERS", (*nsight.COUNTERS, absent))
        rows = [row for row in collected(tmp_path, "ncu").rows if row["metric"] == "branches"]
        assert [(row["outcome"], row["median"]) for row in rows] == [("unknown", None)] * 2
        assert "the set 'basic' of Nsight Compute does not hold sm__branches.sum" in rows[0]["reason"]

    @pytest.mark.parametrize(
        ("mode", "words"),
        [
            ("empty", "no kernel's name matches 'flash|softmax' (/spec/ncu/kernels): its report is empty"),
            ("unreadable", "Failed to open the report: it was written by a newer version."),
            ("no_counters", "could read no counter of the 2 launches"),
        ],
    )
    def test_half_a_report_is_no_result(self, tmp_path: Path, mode: str, words: str) -> None:
        report = Report(tmp_path)
        with pytest.raises(InvalidEnvironment) as raised:
            collected(tmp_path, "ncu", mode, report=report)
        assert words in str(raised.value)
        assert (report.rows, report.tables, report.files) == ([], {}, {})

    @pytest.mark.parametrize(
        ("kernel", "function"),
        [
            (
                "void at::vectorized_elementwise_kernel<8, at::Fill<c10::BFloat16>>(int, T2, T3)",
                "vectorized_elementwise_kernel",
            ),
            ("void (anonymous namespace)::softmax_warp_forward<float, float>(T1 *, int)", "softmax_warp_forward"),
            ("void at::f<at::op::operator ()(at::It &)::[lambda(float) (instance 1)]>(T3)", "f"),
            ("nvjet_hsh_64x8_64x16_4x1_v_bz_TNT", "nvjet_hsh_64x8_64x16_4x1_v_bz_TNT"),
            ("", ""),
        ],
    )
    def test_functions_have_their_plain_names(self, kernel: str, function: str) -> None:
        assert nsight.function_of(kernel) == function


class TestNsys:
    def test_kernels_are_a_table_whole_and_by_range(self, tmp_path: Path) -> None:
        report = collected(tmp_path, "nsys")
        assert report.files == {"report.nsys-rep": tmp_path / "report.nsys-rep"}
        table = report.tables["nsys-kernels"]
        units = {column["name"]: column["unit"] for column in table["columns"]}
        assert (units["total_ms"], units["mean_us"], units["share_percent"]) == ("ms", "µs", "%")
        rows = report.table_rows("nsys-kernels")
        assert [(row["range"], row["calls"], row["total_ms"], row["name"]) for row in rows] == [
            (None, 6, 1.5, "void cutlass::Kernel2<gemm>(T1::Params)"),
            (None, 12, 0.5, "rows_kernel"),
            ("forward", 2, 0.5, "void cutlass::Kernel2<gemm>(T1::Params)"),
        ]
        assert rows[0]["mean_us"] == 250.0
        (check,) = report.verdict["checks"]
        assert (check["name"], check["severity"]) == ("nsys_optimizer", "note")
        assert "no range named optimizer" in check["detail"]
        assert report.rows == [], "no time under a profiler is a measurement"

    @pytest.mark.parametrize(
        ("mode", "words"),
        [("empty", "saw no kernel in the profiled steps"), ("other_columns", "2024.6.2.225 tells no Instances")],
    )
    def test_an_empty_report_is_no_result(self, tmp_path: Path, mode: str, words: str) -> None:
        report = Report(tmp_path)
        with pytest.raises(InvalidEnvironment, match=words):
            collected(tmp_path, "nsys", mode, report=report)
        assert (report.tables, report.files) == ({}, {})


class TestErrors:
    """What a tool tells, whatever its exit code says."""

    @pytest.mark.parametrize("mode", ["permission", "permission_exit"])
    @pytest.mark.parametrize("succeeded", [True, False])
    def test_unreadable_counters(self, tmp_path: Path, mode: str, succeeded: bool) -> None:
        spec, unit = planned(tmp_path, "ncu", mode)
        output, _ = wrapped(unit, tmp_path)
        assert isinstance(RUNNER, Wrapping)
        error = RUNNER.wrapper_error(spec, unit, tmp_path, output, succeeded=succeeded)
        assert error == f"Nsight Compute could not measure: {NO_PERMISSION}"

    def test_a_filter_without_match_names_the_kernels(self, tmp_path: Path) -> None:
        spec, unit = planned(tmp_path, "ncu", ncu={"kernels": "flush"})
        output, code = wrapped(unit, tmp_path)
        assert code == 0
        error = nsight.error_of(spec, unit, tmp_path, output, succeeded=True)
        assert "no kernel's name matches 'flush' (/spec/ncu/kernels)" in error
        assert error.endswith("Available Kernels: 1. flash_fwd_splitkv_kernel 2. reduce_kernel")

    @pytest.mark.parametrize(
        ("tool", "output", "why", "last"),
        [
            ("nsys", None, "wrote no report", "No reports were generated"),
            ("ncu", None, "wrote no report", "==PROF== Connected"),
            ("nsys", "unrecognised option '--x'\n", "did not get to run the steps", "unrecognised option '--x'"),
        ],
    )
    def test_a_report_that_is_missing(self, tmp_path, tool, output, why, last) -> None:
        spec, unit = planned(tmp_path, tool, "silent")
        said = output or wrapped(unit, tmp_path)[0]
        error = str(nsight.error_of(spec, unit, tmp_path, said, succeeded=output is None))
        assert why in error
        assert f"its last words are: {last}" in error

    def test_a_unit_that_fails_by_itself_is_not_the_tools_fault(self, tmp_path: Path) -> None:
        spec, unit = planned(tmp_path, "ncu")
        (tmp_path / nsight.STARTED).touch()
        output = "==PROF== Connected\nRuntimeError\n==ERROR== The application returned an error code (1).\n"
        assert nsight.error_of(spec, unit, tmp_path, output, succeeded=False) is None


def collected(tmp_path: Path, tool: str, mode: str = "works", *, report: Report | None = None) -> Report:
    """Run a stand-in and collect what it has written."""
    spec, unit = planned(tmp_path, tool, mode)
    wrapped(unit, tmp_path)
    (tmp_path / nsight.PHASES).write_text('["forward", "backward", "optimizer"]')
    report = report or Report(tmp_path)
    nsight.collect(spec, unit, tmp_path, report)
    return report


JOB = """
import json, sys
from pathlib import Path

from app.settings import Settings
from app.specs import spec_adapter
from app.store.files.artifacts import ArtifactFiles
from app.store.database.engine import open_database
from app.store.queue.transitions import Queue
from app.store.reading.queries import Reading
from app.store.records import NewJob, Offer
from app.results import list_tables, result_table
from workers.agent.agent import capabilities
from workers.devices.discovery import discover
from workers.devices.locks import HeldDevices
from workers.agent.job_run import JobRun
from workers.jobs import RUNNERS
from workers.jobs.profile import nsight
from workers.processes.launch import Launcher

folder, spec = Path(sys.argv[1]), spec_adapter.validate_json(sys.argv[2])
settings = Settings(data_dir=folder)
database = open_database(settings)
queue, reading = Queue(database), Reading(database)
# The job's first unit, torch's own profiler, is the test of others.
type(RUNNERS["profile"]).plan = lambda _self, spec: nsight.units(spec, "the job")
queue.submit(NewJob(spec))
names = capabilities(allow_code=False)
claim = queue.claim("worker", Offer(frozenset(RUNNERS), names, total_gpus=1, free_gpus=1, idle=True))
launcher = Launcher()
run = JobRun(claim, HeldDevices(gpus=discover().gpus[:1]), queue=queue, artifacts=ArtifactFiles(settings.artifacts_dir),
             launcher=launcher, settings=settings, scratch=folder / "scratch", neighbours=[], on_end=lambda: None)
run.start()
run.join()
launcher.close()
job, _ = reading.job(claim.job_id)
print(json.dumps({
    "state": job["state"], "error": job["error"],
    "tables": {table["name"]: table["rows"] for table in list_tables(database, claim.job_id)},
    "artifacts": [artifact["name"] for artifact in reading.artifacts(claim.job_id)],
    "functions": [] if job["error"] else result_table(database, claim.job_id, "ncu-launches").column("function"),
    "measurements": len(reading.measurements(claim.job_id)["rows"]),
    "log": reading.log(claim.job_id),
}))
"""


def job_of(folder: Path, **fields: Any) -> dict[str, Any]:
    """Run the units under tools of such a job, as an agent does, and return what it left."""
    plugins, root = Path(__file__).parents[3] / "plugins", Path(__file__).parents[4]
    path = os.pathsep.join([str(root), str(plugins), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", JOB, str(folder / "data"), spec_of(**fields).model_dump_json()],
        env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.long
def test_a_job_under_ncu_from_its_claim_to_its_end(tmp_path: Path) -> None:
    install(tmp_path / "path", "ncu")
    job = job_of(tmp_path, ncu={"launches": 2})
    assert (job["state"], job["error"]) == ("succeeded", None), job["log"]
    assert job["artifacts"] == ["report.ncu-rep"]
    assert job["functions"] == [SPLIT, COMBINE]
    assert job["measurements"] == 2 * len(nsight.COUNTERS)
    assert "==PROF== Connected to process" in job["log"]


@pytest.mark.gpu
@pytest.mark.alone  # ncu needs the counters that profilers of other tests hold
class TestOnAGpu:
    @pytest.fixture(autouse=True)
    def _real(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.undo()
        if tools.find("ncu") is None:
            pytest.skip("this host has no ncu")

    @pytest.mark.parametrize(
        ("attention", "kernels"), [("sdpa_flash", "flash"), ("triton", "forward_kernel|queries_kernel|keys_kernel")]
    )
    def test_ncu_counts_what_attentions_kernels_do(self, tmp_path: Path, attention: str, kernels: str) -> None:
        model = {**MODEL, "d_model": 128, "num_heads": 2}
        fields = {"model": model, "context_length": 256, "precision": "bf16", "attention": attention}
        job = job_of(tmp_path, **fields, ncu={"kernels": kernels, "launches": 3})
        assert (job["state"], job["error"]) == ("succeeded", None), job["log"]
        assert job["artifacts"] == ["report.ncu-rep"]
        assert len(job["functions"]) == 3
        assert all(re.search(kernels, function) for function in job["functions"])
        kernels_measured, rest = divmod(job["measurements"], len(nsight.COUNTERS))
        assert rest == 0
        assert 1 <= kernels_measured <= 3
