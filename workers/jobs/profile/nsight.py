"""Runs training steps under Nsight Systems (nsys) or Nsight Compute (ncu), and reads their reports.

CUPTI takes one subscriber, so each tool has a unit of its own, without torch's profiler. A tool slows the steps down
and ncu runs each kernel many times: the times of such a unit say nothing about speed, and none is reported.

The unit warms up, then turns the tool on (cudaProfilerStart) for the profiled steps only. Parts of the work have NVTX
ranges: `step_1`, `forward`, `layers.0`, `scores`, … The tool writes its report after the unit has ended; `collect`, in
another process, asks the tool for the report's figures as CSV.
"""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from app.specs.profile import NcuSpec, ProfileSpec
from workers import tools
from workers.jobs import _reference
from workers.jobs._base import Unit
from workers.jobs._training import building
from workers.jobs._values import Metric, Values
from workers.measure.check import Check
from workers.measure.errors import NotMeasured
from workers.measure.table import Column, Scalar
from workers.measure.warmup import min_calls
from workers.outcome import InvalidEnvironment, Unsupported
from workers.reporter import Reporter
from workers.torch_host import choose_device

if TYPE_CHECKING:
    import torch

    from workers.jobs._training.building import Training

NAMES = {"nsys": "Nsight Systems", "ncu": "Nsight Compute"}
REPORTS = {"nsys": "report.nsys-rep", "ncu": "report.ncu-rep"}
"""The file that each tool writes to its unit's scratch folder, which is also the artifact's name."""
NOT_MEASURED = "not-measured.txt"
"""File in the scratch folder that says why a unit ran no steps."""
STARTED = "started"
"""File in the scratch folder of a unit that its tool has started."""
PHASES = "phases.json"
"""File in the scratch folder with the names of the phases of the steps that ran."""
WITH_SOURCE = ("detailed", "full")
"""Sets of ncu whose report shows instructions. For the others, the kernels' code would be 99 % of the file."""
ANSWER_S = 600.0
"""Seconds in which a tool must print the figures of its report. A report of many launches takes a minute."""
LAST_WORDS = 1000
"""Largest number of characters of a tool's output in an error."""
NCU_ERROR = re.compile(r"^==ERROR== (?!The application returned an error code)(.*\S)", re.MULTILINE)
NOTHING_PROFILED = re.compile(
    r"^==WARNING== (No kernels were profiled\..*(?:\n(?:Available Kernels:|\d+\. ).*)*)", re.MULTILINE
)
MAX_PHASE = 400
"""Most characters of a kernel's name that become a measurement's phase."""
NSYS_COLUMNS = (
    ("Name", Column("name", "string"), 1.0),
    ("Total Time (ns)", Column("total_ms", "number", "ms"), 1e-6),
    ("Time (%)", Column("share_percent", "number", "%"), 1.0),
    ("Instances", Column("calls", "integer", "calls"), 1.0),
    ("Avg (ns)", Column("mean_us", "number", "µs"), 1e-3),
    ("Med (ns)", Column("median_us", "number", "µs"), 1e-3),
    ("Min (ns)", Column("min_us", "number", "µs"), 1e-3),
    ("Max (ns)", Column("max_us", "number", "µs"), 1e-3),
    ("StdDev (ns)", Column("std_us", "number", "µs"), 1e-3),
)
"""Columns of `nsys stats --report cuda_gpu_kern_sum`, our columns, and the factor from its unit to ours."""


@dataclass(frozen=True)
class Counter:
    """A figure of ncu that becomes a measurement of each kernel."""

    name: str
    unit: str
    source: str
    """The metric's name in ncu."""
    factor: float = 1.0
    read: bool = True
    """True if the GPU measures it; False if it follows from the launch alone."""


COUNTERS = (
    Counter("sm_throughput_percent", "%", "sm__throughput.avg.pct_of_peak_sustained_elapsed"),
    Counter("memory_throughput_percent", "%", "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed"),
    Counter("dram_throughput_percent", "%", "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed"),
    Counter("l2_throughput_percent", "%", "lts__throughput.avg.pct_of_peak_sustained_elapsed"),
    Counter("tensor_pipe_percent", "%", "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"),
    Counter("achieved_occupancy_percent", "%", "sm__warps_active.avg.pct_of_peak_sustained_active"),
    Counter("theoretical_occupancy_percent", "%", "sm__maximum_warps_per_active_cycle_pct", read=False),
    Counter("registers_per_thread", "registers", "launch__registers_per_thread", read=False),
    Counter("shared_memory_kib", "KiB", "launch__shared_mem_per_block_allocated", 1 / 1024, read=False),
    Counter("waves_per_sm", "waves", "launch__waves_per_multiprocessor", read=False),
)
"""Throughputs are shares of the peak that the unit of hardware can sustain. Times are left out: they are of kernels
that ran alone, with cold caches."""
DURATION = Counter("duration_us", "µs", "gpu__time_duration.sum", 1e-3)


def units(spec: ProfileSpec, title: str) -> list[Unit]:
    """Return one unit for each Nsight tool that the spec asks for. Raises Unsupported: this host lacks the tool."""
    planned = []
    if spec.nsys:
        planned.append(_unit("nsys", title, nsys_options()))
    if spec.ncu is not None:
        planned.append(_unit("ncu", title, ncu_options(spec.ncu)))
    return planned


def _unit(name: str, title: str, options: Sequence[str]) -> Unit:
    tool = tools.find(name)
    if tool is None:
        folders = ", ".join(tools.FOLDERS[name])
        raise Unsupported(f"{name}: this worker has no {NAMES[name]} that runs, neither on PATH nor in {folders}")
    params = {"tool": name, "path": tool.path, "version": tool.version}
    return Unit(f"{title}, under {name}", params=params, start="exec", wrap=(tool.path, *options))


def nsys_options() -> list[str]:
    """Return the options of nsys, before the program's own command line."""
    return [
        "profile",
        "--output={scratch}/report",
        "--force-overwrite=true",
        "--trace=cuda,nvtx",
        "--pytorch=autograd-nvtx",
        # Python's stack is taken where CUDA's is.
        "--cudabacktrace=all",
        "--python-backtrace=cuda",
        "--cuda-graph-trace=node",
        "--capture-range=cudaProfilerApi",
        # Without this, nsys would end the unit with the range.
        "--capture-range-end=stop",
    ]


def ncu_options(spec: NcuSpec) -> list[str]:
    """Return the options of ncu, before the program's own command line."""
    chosen = [] if spec.kernels is None else ["--kernel-name", f"regex:{spec.kernels}"]
    return [
        *("--export", "{scratch}/report", "--force-overwrite"),
        *("--target-processes", "application-only"),
        *("--profile-from-start", "off"),
        # Locking clocks needs rights that a job has not, and changes the device for others.
        *("--clock-control", "none"),
        *("--set", spec.set),
        *("--import-sass", "yes" if spec.set in WITH_SOURCE else "no"),
        *("--launch-count", str(spec.launches)),
        *chosen,
    ]


def tool_of(unit: Unit) -> str | None:
    """Return the Nsight tool that a unit runs under: "nsys" or "ncu"; None if it runs under none."""
    tool: str | None = unit.params.get("tool")
    return tool


def run(spec: ProfileSpec, unit: Unit, report: Reporter) -> None:
    """Run the steps that the Nsight tool watches. Their times are no measurements.

    If there is no memory for them, or a part of the model is wrong, the unit succeeds and leaves a note: that is a
    result, which the job's first unit reports.
    """
    from workers.measure import environment

    (report.scratch / STARTED).touch()
    device, build_model = building.prepare(spec)
    facts = environment.fingerprint(device)
    report.environment({**facts, "software": {**facts["software"], unit.params["tool"]: unit.params["version"]}})
    with building.known_errors():
        try:
            _reference.check_parts(spec, device)
            training = building.build(spec, device, build_model)
            _run_steps(training, spec, report)
            (report.scratch / PHASES).write_text(json.dumps(["graph"] if spec.cuda_graph else training.phases))
        except NotMeasured as error:
            (report.scratch / NOT_MEASURED).write_text(str(error))


def _run_steps(training: Training, spec: ProfileSpec, report: Reporter) -> None:
    """Run the warm-up, and then the profiled steps with the tool on."""
    from kernels.ranges import record_ranges
    from workers.measure.memory import translate_oom
    from workers.measure.ranges import Ranges, named_layers
    from workers.measure.timing import StepPosition, run_step

    # Under a tool it makes no sense to wait until times are steady.
    warmup = min_calls(spec.warmup_steps)
    total, where, ranges = warmup + spec.profile_steps, StepPosition(), Ranges()

    def step(number: int, what: str) -> None:
        where.preparation_begins()
        training.step.prepare()
        run_step(training.step.phases, [where, ranges])
        report.progress(number, total, what)

    # A compiler would break its graph at the hooks that name layers.
    named = record_ranges() if spec.compile or training.own else named_layers(training.model)
    with translate_oom(where), named:
        for number in range(1, warmup + 1):
            step(number, "warming up")
        ranges.counting = True
        with tool_on(training.device):
            for number in range(warmup + 1, total + 1):
                step(number, "under the profiler")


@contextmanager
def tool_on(device: torch.device) -> Iterator[None]:
    """Let an Nsight tool record the work inside the context, and only that."""
    import torch

    from kernels.device_events import synchronize

    if device.type != "cuda":  # without CUDA there is nothing to turn on
        yield
        return
    synchronize()
    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    yield
    synchronize()
    torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


def error_of(spec: ProfileSpec, unit: Unit, scratch: Path, output: str, *, succeeded: bool) -> str | None:
    """Return the error message that a tool printed; None if it printed none. See `Wrapping.wrapper_error`.

    Tools often exit with 0 when they could read nothing, and the program under them continues or fails on its own.
    """
    tool = tool_of(unit)
    if tool is None or (scratch / NOT_MEASURED).exists():
        return None
    if tool == "ncu" and (errors := list(dict.fromkeys(NCU_ERROR.findall(output)))):
        return f"{NAMES[tool]} could not measure: {' '.join(errors)[:LAST_WORDS]}"
    words = output[-LAST_WORDS:].strip()
    ending = f"its last words are: {words}" if words else "said nothing"
    if not succeeded:
        # An older tool refuses options that it does not know.
        started = (scratch / STARTED).exists()
        return None if started else f"{NAMES[tool]} did not get to run the steps, and {ending}"
    if (scratch / REPORTS[tool]).exists():
        return None
    if spec.ncu is not None and (nothing := NOTHING_PROFILED.search(output)):
        return f"{_no_kernel(spec.ncu)}: {' '.join(nothing[1].split())[:LAST_WORDS]}"
    return f"{NAMES[tool]} wrote no report, and {ending}"


def _no_kernel(spec: NcuSpec) -> str:
    why = "no kernel ran" if spec.kernels is None else f"no kernel's name matches {spec.kernels!r} (/spec/ncu/kernels)"
    return f"{NAMES['ncu']} measured nothing: in the profiled steps {why}"


def collect(spec: ProfileSpec, unit: Unit, scratch: Path, report: Reporter) -> None:
    """Report the Nsight tool's report as an artifact, and its figures as tables and measurements. Raises
    InvalidEnvironment: the report has no figures, or cannot be read."""
    tool = unit.params["tool"]
    if (why_not := scratch / NOT_MEASURED).exists():
        _note(report, Check("profiled", False, why_not.read_text(), "note"))
        return
    if tool == "nsys":
        _collect_nsys(unit, scratch, report)
    else:
        _collect_ncu(spec, unit, scratch, report)
    file = scratch / REPORTS[tool]
    report.artifact(file, name=file.name, kind="report", media_type="application/octet-stream")


def _note(report: Reporter, *checks: Check) -> None:
    from workers.measure.validity import verdict

    report.validity(verdict(checks))


def _ask(command: Sequence[str]) -> str:
    """Return what a tool prints. Raises InvalidEnvironment: the tool failed; the message has its output."""
    try:
        answer = subprocess.run(command, capture_output=True, timeout=ANSWER_S, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError) as error:
        raise InvalidEnvironment(f"the report cannot be read: {error}") from error
    printed = answer.stdout.decode(errors="replace")
    if answer.returncode != 0:
        words = (printed + answer.stderr.decode(errors="replace"))[-LAST_WORDS:].strip()
        raise InvalidEnvironment(f"{command[0]} cannot read its report (exit code {answer.returncode}): {words}")
    return printed


def _rows(printed: str, first: str) -> list[list[str]]:
    """Return the rows of the CSV in a tool's output, the header first; `first` is the first column. Empty if none."""
    lines = printed.splitlines()
    begin = next((number for number, line in enumerate(lines) if line.startswith((first, f'"{first}"'))), len(lines))
    rows = list(csv.reader(io.StringIO("\n".join(lines[begin:]))))
    return [row for row in rows if len(row) == len(rows[0])]


def number(text: str) -> float | None:
    """Parse a number as the tools write it ("17,472", "0.05"); None for other texts ("n/a", "", "nan")."""
    plain = text.replace(",", "")
    return float(plain) if re.fullmatch(r"-?\d+(\.\d+)?([eE][+-]?\d+)?", plain) else None


def _collect_nsys(unit: Unit, scratch: Path, report: Reporter) -> None:
    """Report the kernels of all profiled steps, and those of each phase of the first of them."""
    whole = _nsys_kernels(unit, scratch, None)
    if not whole:
        raise InvalidEnvironment(f"{NAMES['nsys']} saw no kernel in the profiled steps: its report is empty")
    columns = [Column("range", "string"), *(column for _, column, _ in NSYS_COLUMNS)]
    rows: list[list[Scalar]] = [[None, *row] for row in whole]
    checks = []
    for phase in json.loads((scratch / PHASES).read_text()):
        try:
            rows += [[phase, *row] for row in _nsys_kernels(unit, scratch, phase)]
        except InvalidEnvironment as error:  # the report is readable, as `whole` shows: it lacks this range
            checks.append(Check(f"nsys_{phase}", False, str(error), "note"))
    report.table("nsys-kernels", columns, rows)
    _note(report, *checks)


def _nsys_kernels(unit: Unit, scratch: Path, nvtx_range: str | None) -> list[list[Scalar]]:
    """Return the rows of the summary of kernels, over everything or inside the first range of that name."""
    command = [unit.params["path"], "stats", "--report", "cuda_gpu_kern_sum", "--format", "csv", "--output", "-"]
    if nvtx_range is not None:
        command += ["--filter-nvtx", nvtx_range]
    rows = _rows(_ask([*command, str(scratch / REPORTS["nsys"])]), "Time (%)")
    if not rows:
        return []
    header, kernels = rows[0], []
    if missing := [name for name in ("Name", "Total Time (ns)", "Instances") if name not in header]:
        raise InvalidEnvironment(f"{NAMES['nsys']} {unit.params['version']} tells no {', '.join(missing)} of kernels")
    for row in rows[1:]:
        fields = dict(zip(header, row, strict=True))
        kernels.append([_nsys_value(fields.get(name, ""), column, factor) for name, column, factor in NSYS_COLUMNS])
    return kernels


def _nsys_value(text: str, column: Column, factor: float) -> Scalar:
    if column.type == "string":
        return text
    value = number(text)
    if value is None:
        return None
    return int(value) if column.type == "integer" else factor * value


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel that ncu has measured."""

    number: int
    kernel: str
    """The kernel's whole name."""
    grid: str
    block: str
    metrics: Mapping[str, str]
    """Values by metric, in base units, as ncu writes them."""

    @property
    def function(self) -> str:
        """The kernel's name without namespace, template arguments and parameters."""
        return function_of(self.kernel)

    def value(self, counter: Counter) -> float | None:
        """Return the counter's value in its unit; None if ncu reports none."""
        reading = number(self.metrics.get(counter.source, ""))
        return None if reading is None else counter.factor * reading


def function_of(kernel: str) -> str:
    """Return a kernel's name without return type, namespace, template arguments and parameters."""
    depth, plain = 0, []
    for character in kernel.replace("(anonymous namespace)::", ""):
        if character == "<":
            depth += 1
        elif character == ">":
            depth -= 1
        elif depth == 0:
            if character == "(":
                break
            plain.append(character)
    return "".join(plain).split(" ")[-1].rpartition("::")[2] or kernel


def _collect_ncu(spec: ProfileSpec, unit: Unit, scratch: Path, report: Reporter) -> None:
    from workers.measure import environment

    assert spec.ncu is not None
    command = [unit.params["path"], "--import", str(scratch / REPORTS["ncu"])]
    printed = _ask([*command, "--csv", "--page", "raw", "--print-units", "base"])
    launches = ncu_launches(printed)
    if not launches:
        raise InvalidEnvironment(f"{_no_kernel(spec.ncu)}: its report is empty")
    if not any(launch.value(counter) is not None for launch in launches for counter in COUNTERS if counter.read):
        raise InvalidEnvironment(
            f"{NAMES['ncu']} could read no counter of the {len(launches)} launches in its report, only their sizes"
        )
    _report_launches(launches, report)
    device_key = environment.device_key(choose_device(spec.device, spec.precision))
    phases = phases_of(launches)
    metrics = [Metric(counter.name, phase, counter.unit) for phase in dict.fromkeys(phases) for counter in COUNTERS]
    values = Values(metrics)
    for phase in dict.fromkeys(phases):
        measured = [launch for launch, of in zip(launches, phases, strict=True) if of == phase]
        for counter in COUNTERS:
            samples = [value for launch in measured if (value := launch.value(counter)) is not None]
            why = f"the set {spec.ncu.set!r} of {NAMES['ncu']} does not hold {counter.source}"
            values.set(counter.name, phase, samples or None, why)
    values.report(spec.case(), device_key, report)
    _note(report)


def phases_of(launches: Sequence[Launch]) -> list[str]:
    """Return the phase of each launch's measurements: its function, or the whole name if functions share one."""
    kernels = dict.fromkeys(launch.kernel for launch in launches)
    functions = [function_of(kernel) for kernel in kernels]
    return [
        launch.function if functions.count(launch.function) == 1 else launch.kernel[:MAX_PHASE] for launch in launches
    ]


def ncu_launches(printed: str) -> list[Launch]:
    """Return the launches of ncu's page `raw` as CSV. The second row has the units."""
    rows = _rows(printed, "ID")
    if len(rows) < 2:
        return []
    header = rows[0]
    launches = []
    for row in rows[2:]:
        fields = dict(zip(header, row, strict=True))
        metrics = {name: value for name, value in fields.items() if "__" in name}
        where = fields.get("Grid Size", ""), fields.get("Block Size", "")
        launches.append(Launch(int(fields["ID"]), fields["Kernel Name"], *where, metrics))
    return launches


def _report_launches(launches: Sequence[Launch], report: Reporter) -> None:
    """Report the table `ncu-launches`, with a row per launch."""
    columns = [
        *Column.parse("launch: integer, function, grid, block"),
        *(Column(counter.name, "number", counter.unit) for counter in (DURATION, *COUNTERS)),
        Column("kernel", "string"),
    ]
    rows: list[list[Scalar]] = []
    for launch in launches:
        values = [launch.value(counter) for counter in (DURATION, *COUNTERS)]
        rows.append([launch.number, launch.function, launch.grid, launch.block, *values, launch.kernel])
    report.table("ncu-launches", columns, rows)
