"""The launcher with its warm parent, keepers and children. It reaps every child of its process, so it gets its own.

Importing torch takes longer than all that a unit does here. Units that are forked share one launcher and its warm
parent; the others are of the kind `plain`, without torch (tests/plugins/plain_kind), but for one.
"""

import functools
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.forked import forkserver

TESTS = Path(__file__).resolve().parents[2]
PLUGINS = TESTS / "plugins"
LET_GO_S = 10.0
"""How soon what is killed lets go of its locks, also while other tests have the processors."""

PRELUDE = """
import fcntl, json, os, signal, sys, time
import psutil
from pathlib import Path
from tests.processes import is_alive
from tools.waiting import wait_until
from workers.processes.keeper import Request
from workers.processes.launch import Launcher

os.environ |= SETTINGS
WRAPPER = [sys.executable, PLUGINS + "/wrapper.py"]

def request(behaviour, wrap=(), kind=KIND, **environment):
    shape = {"d_model": 8, "d_ff": 8, "num_layers": 1, "num_heads": 1, "vocab_size": 16}
    specs = {
        "benchmark": {"model": {"name": behaviour, **shape}, "batch_size": 1, "context_length": 1,
                      "mode": "forward", "warmup_steps": 0, "measure_steps": 1, "device": "cpu"},
        "plain": {"behaviour": behaviour, "start": START},
    }
    unit = {"title": "unit", "params": {"replicate": 0}, "start": START, "environment": {}}
    environment = {"MISBEHAVE_FOLDER": str(FOLDER), **environment}
    return Request(kind, {"kind": kind, **specs[kind]}, unit, str(FOLDER), environment, wrap=list(wrap))

def read(descriptor):
    data = b""
    while chunk := os.read(descriptor, 1 << 16):
        data += chunk
    return data.decode()

def started():
    path = FOLDER / "started"
    wait_until(lambda: path.exists() and path.read_text().endswith("\\n"), str(path))
    return [int(pid) for pid in path.read_text().split()]

launcher = Launcher()
"""


SERVE = """
for line in sys.stdin:
    folder, body = json.loads(line)
    FOLDER = Path(folder)
    exec(body, globals())
    print(flush=True)
launcher.close()
"""
SETTINGS = {
    "FLOPWATCH_API_TOKEN": "hunter2",
    "FLOPWATCH_ARTIFACTS_URL": "s3://bucket",
    "AWS_SECRET_ACCESS_KEY": "hunter2",
    "PGPASSWORD": "hunter2",
    "AZURE_STORAGE_ACCOUNT_NAME": "not of this store",
    "NCCL_DEBUG": "WARN",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
}
"""Variables of every launcher, with a token and an object store's credentials among them."""

Run = Callable[[str], Any]


def script(folder: Path, start: str, body: str, *, kind: str, plugins: Sequence[Path]) -> tuple[str, dict[str, str]]:
    """A program that runs `body` after PRELUDE, with these plugins, and its environment."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, [*plugins, TESTS.parent])),
        "TMPDIR": str(folder),
    }
    constants = f"START, KIND, PLUGINS, SETTINGS = {start!r}, {kind!r}, {str(PLUGINS)!r}, {SETTINGS!r}\n"
    return constants + PRELUDE + textwrap.dedent(body), environment


def start_server(folder: Path) -> subprocess.Popen[str]:
    """Start a process that runs bodies which it reads; its errors go to a file in `folder`."""
    program, environment = script(folder, "fork", SERVE, kind="benchmark", plugins=[PLUGINS])
    with (folder / "errors").open("wb") as errors:
        return subprocess.Popen(
            [sys.executable, "-c", program],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )


def run_script(folder, start, body, *, plugins=(PLUGINS / "plain_kind", PLUGINS)) -> Any:
    """Run `body` in a process of its own, with units of the kind `plain`; returns what it prints as JSON."""
    whole = f"FOLDER = Path({str(folder)!r})\n{textwrap.dedent(body)}\nlauncher.close()\n"
    program, environment = script(folder, start, whole, kind="plain", plugins=plugins)
    output, errors = folder / "printed", folder / "errors"
    process = forkserver().start(["-c", program], environment, output, errors=errors)
    try:
        assert process.wait(120) == 0, errors.read_text()
    finally:
        process.kill()
    print(errors.read_text())
    return json.loads(output.read_text())


@pytest.fixture(scope="module")
def launchers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[tuple[subprocess.Popen[str], Path]]]:
    """Processes that have served tests: the last one, if it still runs, serves on."""
    started: list[tuple[subprocess.Popen[str], Path]] = []
    yield started
    for process, _ in started:
        process.communicate(timeout=60)


@pytest.fixture
def run_forked(launchers, tmp_path, tmp_path_factory) -> Run:
    """Runs a body whose units are forked in the process that the module shares; returns what it prints as JSON."""

    def run(body: str) -> Any:
        if not launchers or launchers[-1][0].poll() is not None:
            folder = tmp_path_factory.mktemp("launcher")
            launchers.append((start_server(folder), folder))
        process, folder = launchers[-1]
        process.stdin.write(json.dumps([str(tmp_path), textwrap.dedent(body)]) + "\n")
        process.stdin.flush()
        printed = process.stdout.readline()
        print(errors := (folder / "errors").read_text())
        assert printed, f"the body has failed: {errors}"
        assert process.stdout.readline() == "\n"
        return json.loads(printed)

    return run


starts = pytest.mark.parametrize("start", ["fork", "exec"])


def test_how_a_unit_ended_is_reported(run_forked: Run) -> None:
    reports = run_forked(
        """
        reports = []
        for behaviour in ("counted", "segfault", "exits", "raises"):
            process = launcher.start(request(behaviour, kind="benchmark"), START, [])
            read(process.messages), read(process.log)
            reports.append(vars(process.report()))
            process.close()
        print(json.dumps(reports))
        """
    )
    assert [list(one.values()) for one in reports] == [[0, None], [None, 11], [3, None], [1, None]]


def test_a_gpu_that_does_not_compute_is_found(run_forked: Run) -> None:
    found = run_forked(
        """
        from app.settings import Settings
        from workers.agent.host_check import HostCheck
        from workers.agent.readings import Readings
        from workers.devices.discovery import Gpu, Host
        from workers.devices.locks import HeldDevices

        readings = Readings(Host((), 1, 1), 1.0)
        check = HostCheck(Settings(data_dir=FOLDER), launcher, None, readings, FOLDER / "scratch")
        gone = check.of_job(HeldDevices(gpus=(Gpu("GPU-gone", "a GPU that fell off the bus", 1),)))
        print(json.dumps([gone.code, gone.reason, check.of_job(HeldDevices()), list((FOLDER / "scratch").iterdir())]))
        """
    )
    assert found[0] == "device_lost"
    assert "CUDA sees 0 of 1 GPUs" in found[1]
    assert found[2:] == [None, []], "a job on the CPU needs none, and nothing is left"


def test_a_unit_that_is_ended_writes_its_stacks_first(run_forked: Run) -> None:
    printed = run_forked(
        """
        process = launcher.start(request("stubborn"), START, [])
        started()
        stacks = FOLDER / ".stacks"
        before = stacks.read_text()
        process.terminate()
        wait_until(lambda: "in never_end" in stacks.read_text(), "the stacks")
        process.kill()
        process.report()
        print(json.dumps(before))
        """
    )
    assert printed == ""


@starts
@pytest.mark.parametrize("victim", ["agent's end", "keeper", "child"])
def test_nothing_survives_and_locks_are_held_until_then(run_forked, tmp_path, start, victim) -> None:
    run = run_forked if start == "fork" else functools.partial(run_script, tmp_path, start)
    printed = run(
        f"""
        lock = os.open(FOLDER / "lock", os.O_RDWR | os.O_CREAT)
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = launcher.start(request("stubborn"), START, [lock])
        os.close(lock)
        child, grandchild = started()
        probe = os.open(FOLDER / "lock", os.O_RDWR)
        try:
            fcntl.flock(probe, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = False
        except BlockingIOError:
            held = True
        victim = {victim!r}
        if victim == "agent's end":
            process.close()
        elif victim == "keeper":
            os.kill(psutil.Process(child).ppid(), signal.SIGKILL)
        else:
            os.kill(child, signal.SIGKILL)
        if victim == "keeper" and START == "exec":
            launcher.wait_until_warm()
            process.report()
            launcher.start(request("counted"), START, []).close()  # orphans are ended with the next start
        died = time.monotonic()
        fcntl.flock(probe, fcntl.LOCK_EX)
        gone = [is_alive(pid) for pid in (child, grandchild)]
        deadline = time.monotonic() + 5
        while any(is_alive(pid) for pid in (child, grandchild)) and time.monotonic() < deadline:
            time.sleep(0.01)
        print(json.dumps([held, gone[0], [is_alive(pid) for pid in (child, grandchild)], time.monotonic() - died]))
        """
    )
    held, child_alive_when_unlocked, still_alive, seconds = printed
    assert held
    assert not child_alive_when_unlocked
    assert still_alive == [False, False]
    assert seconds < LET_GO_S


def test_a_starting_warm_parent_is_replaced(tmp_path: Path) -> None:
    printed = run_script(
        tmp_path,
        "fork",
        """
        from threading import Thread

        def kill_first():
            while not (children := psutil.Process().children()):
                time.sleep(0.001)
            children[0].kill()

        killer = Thread(target=kill_first)
        killer.start()
        launcher.wait_until_warm()
        killer.join()
        process = launcher.start(request("counted"), START, [])
        messages = read(process.messages)
        print(json.dumps([json.loads(messages.splitlines()[-1]), vars(process.report())]))
        """,
    )
    assert printed == [{"type": "outcome", "code": None, "detail": ""}, {"exit_code": 0, "signal": None}]


def test_what_runs_outlives_its_warm_parent_which_is_replaced(tmp_path: Path) -> None:
    printed = run_script(
        tmp_path,
        "fork",
        """
        process = launcher.start(request("gated"), START, [])
        started()
        psutil.Process().children()[0].kill()
        other = launcher.start(request("counted"), START, [])  # needs a new warm parent; the orphans are looked at
        others = read(other.messages)
        (FOLDER / "open").touch()
        outcomes = [json.loads(messages.splitlines()[-1]) for messages in (read(process.messages), others)]
        print(json.dumps([outcomes, vars(process.report()), vars(other.report())]))
        """,
    )
    well = {"exit_code": 0, "signal": None}
    assert printed == [[{"type": "outcome", "code": None, "detail": ""}] * 2, well, well]


def test_the_warm_parent_touches_no_gpu_and_has_one_thread(tmp_path: Path) -> None:
    printed = run_script(
        tmp_path,
        "fork",
        """
        launcher.wait_until_warm()
        warm = psutil.Process().children()[0]
        libraries = ("libcuda.so", "libnvidia-ml")
        mapped = [region.path for region in warm.memory_maps() if any(name in region.path for name in libraries)]
        print(json.dumps([warm.num_threads(), mapped]))
        """,
        plugins=(),  # they would keep it from importing all
    )
    assert printed == [1, []]


class TestWrapped:
    """Units that run under tests/plugins/wrapper.py, which takes from them what profilers take."""

    def test_messages_arrive_before_the_end(self, tmp_path: Path) -> None:
        printed = run_script(
            tmp_path,
            "exec",
            """
            wrap = [*WRAPPER, "--report", str(FOLDER / "report"), "--"]
            process = launcher.start(request("counted", wrap, OF_THE_UNIT="set"), START, [])
            messages, log = read(process.messages), read(process.log)
            print(json.dumps([messages, log, vars(process.report()), (FOLDER / "report").exists()]))
            """,
        )
        messages = [json.loads(line) for line in printed[0].splitlines()]
        assert messages[0] == {"type": "started"}
        assert messages[-1] == {"type": "outcome", "code": None, "detail": ""}
        assert "measurement" in {message["type"] for message in messages}
        assert printed[2:] == [{"exit_code": 0, "signal": None}, True]
        assert (tmp_path / "report").read_text() == "the program ended with 0\n"


VARIABLES = """
process = launcher.start(request("curious", WRAP, CUDA_VISIBLE_DEVICES=""), START, [])
read(process.messages)
sys.stderr.write(read(process.log))
print(json.dumps(vars(process.report())))
"""


def variables_of_a_unit(folder: Path, run: Run, body: str = "", wrap: str = "()") -> set[str]:
    """What a unit finds, whose launcher has a token among its variables."""
    run(body + VARIABLES.replace("WRAP", wrap))
    return set(json.loads((folder / "variables").read_text()))


@pytest.mark.parametrize(("start", "wrap"), [("fork", "()"), ("exec", "()"), ("exec", "[*WRAPPER, '--']")])
def test_a_unit_has_every_variable_but_the_services_settings(run_forked, tmp_path, start, wrap) -> None:
    run = run_forked if start == "fork" else functools.partial(run_script, tmp_path, start)
    variables = variables_of_a_unit(tmp_path, run, wrap=wrap)
    assert {"NCCL_DEBUG=WARN", "CUDA_DEVICE_ORDER=PCI_BUS_ID", "CUDA_VISIBLE_DEVICES="} <= variables
    assert "AZURE_STORAGE_ACCOUNT_NAME=not of this store" in variables
    assert not [text for text in variables if "FLOPWATCH_" in text or "hunter2" in text]


def test_control_of_the_units_variables(tmp_path: Path) -> None:
    inherit = "import workers.processes.launch; workers.processes.launch.units_environment = lambda *_: None"
    run = functools.partial(run_script, tmp_path, "exec")
    variables = variables_of_a_unit(tmp_path, run, inherit)
    assert {"FLOPWATCH_API_TOKEN=hunter2", "AWS_SECRET_ACCESS_KEY=hunter2"} <= variables


def ends_with_a_stopped_keeper(folder, start, stopped, sabotage="", *, reason=None, within_s=60) -> Any:
    """Stop a unit's keeper, or its warm parent too, and let the unit time out, or stop it; its outcome's type, and who
    lives on."""
    return run_script(
        folder,
        start,
        f"""
        import threading
        from workers.agent import unit_run
        from workers.processes.launch import Process
        from workers.agent.unit_run import Listener, StopSignal, Timeout, UnitRun

        unit_run.KEEPER_S = 0.2
        {sabotage}
        # A shell in the unit's place costs no import of torch. It must not end, or its daemon would be the keeper's.
        shell = f"trap '' TERM; setsid sleep 3600 & echo $$ $! > {{FOLDER}}/started; while :; do sleep 3600; done"
        stubborn = request("stubborn") if START == "fork" else request("none", ["sh", "-c", shell])
        process = launcher.start(stubborn, START, [])
        pids = started()
        parents = [one.pid for one in psutil.Process(pids[0]).parents()]
        keepers = parents[:parents.index(os.getpid())]  # the keeper, and below a forked one the warm parent
        for pid in keepers if {stopped!r} == "all" else keepers[:1]:
            os.kill(pid, signal.SIGSTOP)
        listener = Listener(message=lambda _: None, output=lambda _: None, flush=lambda: None)
        outcome, stop, reason = [], StopSignal(), {reason!r}
        if reason is not None:
            stop.set(getattr(unit_run, reason)())
        timeout = Timeout.after(60 if reason else 0.05, time.monotonic())
        run = UnitRun(process, listener, stop, timeout=timeout, grace_s=0.05)
        thread = threading.Thread(target=lambda: outcome.append(type(run.run()).__name__), daemon=True)
        thread.start()
        thread.join({within_s})
        print(json.dumps([outcome, [is_alive(pid) for pid in [*pids, keepers[0]]]]))
        """,
    )


@pytest.mark.parametrize(
    ("start", "stopped", "reason", "outcome"),
    [
        ("fork", "all", None, "Failed"),
        ("exec", "keeper", None, "Failed"),
        ("exec", "keeper", "Abandoned", "Abandoned"),
        ("exec", "keeper", "GivenBack", "GivenBack"),
    ],
)
def test_a_stopped_keeper_keeps_nothing_alive(tmp_path, start, stopped, reason, outcome) -> None:
    assert ends_with_a_stopped_keeper(tmp_path, start, stopped, reason=reason) == [[outcome], [False] * 3]


def test_control_of_the_stopped_keeper(tmp_path: Path) -> None:
    """Without the agent's own kill, the unit lives on."""
    leave = "Process.kill_with_keeper = lambda _self: True"
    assert ends_with_a_stopped_keeper(tmp_path, "exec", "keeper", leave, within_s=1) == [[], [True] * 3]


def test_processes_that_cannot_be_killed_keep_no_job_running(tmp_path: Path) -> None:
    """Their driver hangs. The keeper lives, too, and holds the devices."""
    hangs = "from workers.processes import launch; launch.ENDS_S = 0.1; psutil.Process.kill = lambda _self: None"
    assert ends_with_a_stopped_keeper(tmp_path, "exec", "keeper", hangs) == [["Failed"], [True] * 3]


def test_a_unit_waits_at_its_gate(tmp_path: Path) -> None:
    """It begins when the gate opens; closing its process ends it even there."""
    begun, alive = run_script(
        tmp_path,
        "exec",
        """
        import socket

        def start_at_gate():
            gate, of_unit = socket.socketpair()
            with of_unit:
                process = launcher.start(request("counted"), START, [], gate=of_unit)
            gate.settimeout(60)
            assert gate.recv(1) == b"R"
            return process, gate

        process, gate = start_at_gate()
        begun = [(FOLDER / "runs").exists()]
        gate.sendall(b"R")
        read(process.messages)
        begun.append((FOLDER / "runs").exists())
        process.report()
        process, gate = start_at_gate()
        units = [process._kept_by, *process._kept_by.children()]
        process.close()
        psutil.wait_procs(units, 10)
        print(json.dumps([begun, [is_alive(unit.pid) for unit in units]]))
        """,
    )
    assert begun == [False, True]
    assert alive == [False, False], "the keeper and its unit"
