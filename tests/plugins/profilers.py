"""Plays nsys and ncu for tests: takes their options, runs the program, writes a report, and prints it as CSV.

    profilers.py nsys|ncu MODE ARGUMENT…

`install` puts an executable of the tool's name into a folder, for PATH. A report holds the CSV that the tool would make
of it: for ncu what an H200 has told of attention's kernels (tests/workers/jobs/profile/recorded). MODE is "works",
or how it fails.
"""

import csv
import re
import subprocess
import sys
from pathlib import Path

RECORDED = Path(__file__).resolve().parents[1] / "workers/jobs/profile/recorded/ncu_raw.csv"
NO_PERMISSION = (
    "ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters on the target"
    " device 0."
)
VERSIONS = {
    "nsys": "NVIDIA Nsight Systems version 2024.6.2.225-246235244400v0\n",
    "ncu": "NVIDIA (R) Nsight Compute Command Line Profiler\nCopyright (c) 2018-2025 NVIDIA Corporation\n"
    "Version 2025.3.1.0 (build 36398880) (public-release)\n",
}
WITH_VALUE = {
    *("--export", "--target-processes", "--profile-from-start", "--clock-control", "--set", "--import-sass"),
    *("--launch-count", "--kernel-name", "--import", "--page", "--print-units"),
    *("--report", "--format", "--output", "--filter-nvtx"),
}
FLAGS = {"--force-overwrite", "--csv", "--version"}
NSYS_HEADER = "Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name\n"
NSYS_KERNELS = {
    None: '75.0,1500000,6,250000.0,250000.0,240000,260000,8164.9,"void cutlass::Kernel2<gemm>(T1::Params)"\n'
    '25.0,500000,12,41666.7,41000.0,40000,45000,1500.0,"rows_kernel"\n',
    "forward": '100.0,500000,2,250000.0,250000.0,240000,260000,8164.9,"void cutlass::Kernel2<gemm>(T1::Params)"\n',
}


def install(folder: Path, tool: str, mode: str = "works") -> Path:
    """Make the executable; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / tool
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "{Path(__file__).resolve()}" {tool} {mode} "$@"\n')
    path.chmod(0o755)
    return path


def main(tool: str, mode: str, arguments: list[str]) -> int:
    if mode == "broken":
        return 127
    options: dict[str, str] = {}
    if tool == "nsys" and arguments[0] in ("profile", "stats"):
        options["command"] = arguments.pop(0)
    while arguments and arguments[0].startswith("--"):
        name, _, value = arguments.pop(0).partition("=")
        if name in WITH_VALUE and not value:
            value = arguments.pop(0)
        elif name not in FLAGS and not value:
            print(f"==ERROR== unrecognised option '{name}'. Use --help for further details.")
            return 1
        options[name] = value
    if "--version" in options:
        print(VERSIONS[tool], end="")
        return 0
    if tool == "nsys":
        return nsys(mode, options, arguments)
    return tell_ncu(mode, options) if "--import" in options else ncu(mode, options, arguments)


def ncu(mode: str, options: dict[str, str], program: list[str]) -> int:
    """Run the program, and write the report."""
    print("==PROF== Connected to process 1 (/usr/bin/python3)", flush=True)
    if mode.startswith("permission"):
        print(f"==ERROR== {NO_PERMISSION}", flush=True)
    code = subprocess.run(program, check=False).returncode
    if mode == "permission_exit":
        return 1
    if mode in ("permission", "silent"):
        return code
    head, units, *launches = csv.reader(RECORDED.read_text().splitlines())
    name = head.index("Kernel Name")
    pattern = options.get("--kernel-name", "regex:").removeprefix("regex:")
    chosen = [row for row in launches if re.search(pattern, row[name].partition("<")[0])]
    if not chosen:
        print(
            "==WARNING== No kernels were profiled.\nAvailable Kernels:\n1. flash_fwd_splitkv_kernel\n2. reduce_kernel"
        )
        return code
    if mode == "no_counters":
        counters = [i for i, metric in enumerate(head) if "__" in metric and not metric.startswith("launch__")]
        chosen = [["n/a" if i in counters else value for i, value in enumerate(row)] for row in chosen]
    rows = [head, units, *chosen[: int(options["--launch-count"])]]
    if mode == "empty":
        rows = rows[:2]
    with Path(options["--export"] + ".ncu-rep").open("w", newline="") as report:
        csv.writer(report, quoting=csv.QUOTE_ALL).writerows(rows)
    print(f"==PROF== Disconnected from process 1\n==PROF== Report: {options['--export']}.ncu-rep")
    return code


def tell_ncu(mode: str, options: dict[str, str]) -> int:
    if mode == "unreadable":
        print("==ERROR== Failed to open the report: it was written by a newer version.")
        return 1
    assert (options["--page"], options["--print-units"]) == ("raw", "base")
    print("==PROF== a line before the table\n" + Path(options["--import"]).read_text(), end="")
    return 0


def nsys(mode: str, options: dict[str, str], rest: list[str]) -> int:
    """`profile` runs the program; `stats` prints the report's summary."""
    if options["command"] == "profile":
        code = subprocess.run(rest, check=False).returncode
        if mode == "silent":
            print("No reports were generated")
        else:
            Path(options["--output"] + ".nsys-rep").write_text("" if mode == "empty" else NSYS_HEADER)
        return code
    (report,) = rest
    header = Path(report).read_text().replace("Instances", "Launches" if mode == "other_columns" else "Instances")
    print(f"Generating SQLite file x.sqlite from {report}\nProcessing [x.sqlite] with [cuda_gpu_kern_sum.py]... \n")
    nvtx_range = options.get("--filter-nvtx")
    if nvtx_range == "optimizer":
        print("ERROR: no range named optimizer")
        return 1
    kernels = NSYS_KERNELS.get(nvtx_range)
    if not header or kernels is None:
        print("SKIPPED: x.sqlite does not contain CUDA kernel data.")
    else:
        print(header + kernels)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
