"""The launcher with its warm parent, keepers and children. It reaps every child of its process, so it gets its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parent.parent
LET_GO_S = 10.0
"""How soon what is killed lets go of its locks, also while other tests have the processors."""

PRELUDE = """
import fcntl, json, os, signal, sys, time
import psutil
from pathlib import Path
from workers.keeper import Request
from workers.launch import Launcher

FOLDER = Path(os.environ["MISBEHAVE_FOLDER"])

WRAPPER = [sys.executable, PLUGINS + "/wrapper.py"]

def request(model, wrap=(), **environment):
    shape = {"d_model": 8, "d_ff": 8, "num_layers": 1, "num_heads": 1, "vocab_size": 16}
    spec = {"kind": "benchmark", "model": {"name": model, **shape}, "batch_size": 1, "context_length": 1,
            "mode": "forward", "warmup_steps": 0, "measure_steps": 1, "device": "cpu"}
    unit = {"title": "unit", "params": {"replicate": 0}, "start": START, "environment": {}}
    return Request("benchmark", spec, unit, str(FOLDER), environment, wrap=list(wrap))

def read(descriptor):
    data = b""
    while chunk := os.read(descriptor, 1 << 16):
        data += chunk
    return data.decode()

def wait_for(path):
    deadline = time.monotonic() + 60
    while not path.exists() or not path.read_text().endswith("\\n"):
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.01)
    return path.read_text().split()

def alive(pid):
    # A process lets go of its locks a moment before it is a zombie: PF_EXITING tells.
    try:
        state, *_, flags = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:7]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z" and not int(flags) & 4

launcher = Launcher()
"""


def run_script(folder: Path, start: str, body: str, *, plugins: bool = True) -> Any:
    """Run `body` after PRELUDE in a process of its own, with tests/plugins; returns what it prints as JSON."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), *([str(TESTS / "plugins")] if plugins else [])]),
        "MISBEHAVE_FOLDER": str(folder),
        "TMPDIR": str(folder),
    }
    script = (
        f"START, PLUGINS = {start!r}, {str(TESTS / 'plugins')!r}\n"
        + PRELUDE
        + textwrap.dedent(body)
        + "\nlauncher.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    print(done.stderr)
    return json.loads(done.stdout)


starts = pytest.mark.parametrize("start", ["fork", "exec"])


@starts
def test_a_unit_reports_its_output_is_captured_and_its_end_is_told(tmp_path: Path, start: str) -> None:
    told = run_script(
        tmp_path,
        start,
        """
        ends = {}
        for model in ("counted", "segfault", "exits", "raises"):
            process = launcher.start(request(model), START, [])
            messages, log = read(process.messages), read(process.log)
            ends[model] = [messages.splitlines(), log, vars(process.report())]
            process.close()
        print(json.dumps(ends))
        """,
    )
    messages = [json.loads(line) for line in told["counted"][0]]
    assert messages[0] == {"type": "started"}
    assert messages[-1] == {"type": "outcome", "code": None, "detail": ""}
    assert {message["type"] for message in messages} >= {"measurement", "environment", "validity"}
    assert (tmp_path / "runs").read_text()
    assert {model: report for model, (_, _, report) in told.items()} == {
        "counted": {"exit_code": 0, "signal": None},
        "segfault": {"exit_code": None, "signal": 11},
        "exits": {"exit_code": 3, "signal": None},
        "raises": {"exit_code": 1, "signal": None},
    }
    assert "about to fall over" in told["segfault"][1]
    assert "the loss is a pineapple" in told["raises"][1]


@starts
def test_kill_ends_a_descendant_in_a_session_of_its_own(tmp_path: Path, start: str) -> None:
    told = run_script(
        tmp_path,
        start,
        """
        process = launcher.start(request("stubborn"), START, [])
        pids = wait_for(FOLDER / "started")
        before = [alive(pid) for pid in pids]
        process.terminate()
        time.sleep(0.2)  # SIGTERM is ignored: nothing to wait for
        ignored = [alive(pid) for pid in pids]
        process.kill()
        report = process.report()
        print(json.dumps([before, ignored, [alive(pid) for pid in pids], vars(report)]))
        """,
    )
    assert told == [[True, True], [True, True], [False, False], {"exit_code": None, "signal": 9}]


@starts
@pytest.mark.parametrize("victim", ["agent's end", "keeper", "child"])
def test_nothing_survives_and_locks_are_held_until_then(tmp_path: Path, start: str, victim: str) -> None:
    told = run_script(
        tmp_path,
        start,
        f"""
        lock = os.open(FOLDER / "lock", os.O_RDWR | os.O_CREAT)
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = launcher.start(request("stubborn"), START, [lock])
        os.close(lock)
        child, grandchild = wait_for(FOLDER / "started")
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
            os.kill(psutil.Process(int(child)).ppid(), signal.SIGKILL)
        else:
            os.kill(int(child), signal.SIGKILL)
        if victim == "keeper" and START == "exec":
            launcher.wait_until_warm()
            process.report()
            launcher.start(request("counted"), START, []).close()  # orphans are ended with the next start
        died = time.monotonic()
        fcntl.flock(probe, fcntl.LOCK_EX)
        gone = [alive(pid) for pid in (child, grandchild)]
        deadline = time.monotonic() + 5
        while any(alive(pid) for pid in (child, grandchild)) and time.monotonic() < deadline:
            time.sleep(0.01)
        print(json.dumps([held, gone[0], [alive(pid) for pid in (child, grandchild)], time.monotonic() - died]))
        """,
    )
    held, child_alive_when_unlocked, still_alive, seconds = told
    assert held
    assert not child_alive_when_unlocked
    assert still_alive == [False, False]
    assert seconds < LET_GO_S


def test_a_killed_warm_parent_is_replaced(tmp_path: Path) -> None:
    told = run_script(
        tmp_path,
        "fork",
        """
        launcher.wait_until_warm()
        first = psutil.Process().children()[0]
        first.kill()
        deadline = time.monotonic() + 10
        while first.is_running() and first.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
            time.sleep(0.01)
        process = launcher.start(request("counted"), START, [])
        messages = read(process.messages)
        print(json.dumps([json.loads(messages.splitlines()[-1]), vars(process.report())]))
        """,
    )
    assert told == [{"type": "outcome", "code": None, "detail": ""}, {"exit_code": 0, "signal": None}]


def test_a_warm_parent_that_is_killed_while_it_starts_is_replaced(tmp_path: Path) -> None:
    told = run_script(
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
    assert told == [{"type": "outcome", "code": None, "detail": ""}, {"exit_code": 0, "signal": None}]


def test_what_runs_outlives_its_warm_parent(tmp_path: Path) -> None:
    told = run_script(
        tmp_path,
        "fork",
        """
        process = launcher.start(request("gated"), START, [])
        wait_for(FOLDER / "started")
        psutil.Process().children()[0].kill()
        other = launcher.start(request("counted"), START, [])  # needs a new warm parent; the orphans are looked at
        read(other.messages)
        (FOLDER / "open").touch()
        messages = read(process.messages)
        print(json.dumps([json.loads(messages.splitlines()[-1]), vars(process.report()), vars(other.report())]))
        """,
    )
    well = {"exit_code": 0, "signal": None}
    assert told == [{"type": "outcome", "code": None, "detail": ""}, well, well]


def test_the_warm_parent_touches_no_gpu_and_has_one_thread(tmp_path: Path) -> None:
    told = run_script(
        tmp_path,
        "fork",
        """
        launcher.wait_until_warm()
        warm = psutil.Process().children()[0]
        libraries = ("libcuda.so", "libnvidia-ml")
        mapped = [region.path for region in warm.memory_maps() if any(name in region.path for name in libraries)]
        print(json.dumps([warm.num_threads(), mapped]))
        """,
        plugins=False,  # they would keep it from importing all
    )
    assert told == [1, []]


class TestWrapped:
    """Units that run under tests/plugins/wrapper.py, which takes from them what profilers take."""

    def test_messages_arrive_and_the_report_is_written_before_the_end_is_told(self, tmp_path: Path) -> None:
        told = run_script(
            tmp_path,
            "exec",
            """
            wrap = [*WRAPPER, "--report", str(FOLDER / "report"), "--"]
            process = launcher.start(request("counted", wrap, OF_THE_UNIT="set"), START, [])
            messages, log = read(process.messages), read(process.log)
            print(json.dumps([messages, log, vars(process.report()), (FOLDER / "report").exists()]))
            """,
        )
        messages = [json.loads(line) for line in told[0].splitlines()]
        assert messages[0] == {"type": "started"}
        assert messages[-1] == {"type": "outcome", "code": None, "detail": ""}
        assert "measurement" in {message["type"] for message in messages}
        assert told[2:] == [{"exit_code": 0, "signal": None}, True]
        assert (tmp_path / "report").read_text() == "the program ended with 0\n"

    def test_control_the_wrapper_takes_descriptors_standard_input_and_variables(self, tmp_path: Path) -> None:
        reader, writer = os.pipe()
        program = (
            "import os, sys\n"
            "try:\n    os.write(int(sys.argv[1]), b'x')\nexcept OSError as error:\n    print(error.strerror)\n"
            "print(repr(sys.stdin.read()), os.environ.get('OF_THE_UNIT'), os.getsid(0) == int(sys.argv[2]))"
        )
        wrapped = [sys.executable, str(TESTS / "plugins" / "wrapper.py"), "--", sys.executable, "-c", program]
        done = subprocess.run(
            [*wrapped, str(writer), str(os.getsid(0))],
            input="a request",
            pass_fds=[writer],
            env={**os.environ, "OF_THE_UNIT": "set"},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        os.close(reader)
        os.close(writer)
        assert done.stdout.splitlines() == ["Bad file descriptor", "'' None False"]

    def test_variables_that_a_wrapper_drops_are_set_again_and_output_arrives(self, tmp_path: Path) -> None:
        (tmp_path / "sitecustomize.py").write_text(
            "import atexit, os\n"
            "atexit.register(lambda: print(f'variable: {os.environ.get(\"OF_THE_UNIT\")}', flush=True))\n"
        )
        told = run_script(
            tmp_path,
            "exec",
            """
            path = os.pathsep.join([str(FOLDER), os.environ["PYTHONPATH"]])
            wrapped = request("counted", [*WRAPPER, "--"], OF_THE_UNIT="of the unit", PYTHONPATH=path)
            process = launcher.start(wrapped, START, [])
            messages, log = read(process.messages), read(process.log)
            print(json.dumps(log))
            """,
        )
        assert "variable: of the unit\n" in told

    def test_a_program_that_is_started_again_reports_once(self, tmp_path: Path) -> None:
        told = run_script(
            tmp_path,
            "exec",
            """
            process = launcher.start(request("counted", [*WRAPPER, "--times", "2", "--"]), START, [])
            messages, log = read(process.messages), read(process.log)
            print(json.dumps([messages, vars(process.report())]))
            """,
        )
        assert [json.loads(line)["type"] for line in told[0].splitlines()].count("started") == 1
        assert told[1] == {"exit_code": 0, "signal": None}
        assert len((tmp_path / "runs").read_text().splitlines()) == 2

    def test_kill_ends_wrapper_program_and_daemon(self, tmp_path: Path) -> None:
        told = run_script(
            tmp_path,
            "exec",
            """
            process = launcher.start(request("stubborn", [*WRAPPER, "--"]), START, [])
            pids = wait_for(FOLDER / "started")
            parents = [parent.pid for parent in psutil.Process(int(pids[0])).parents()]
            pids += parents[:parents.index(os.getpid())]
            before = [alive(pid) for pid in pids]
            process.kill()
            report = process.report()
            print(json.dumps([before, [alive(pid) for pid in pids[:-1]], vars(report)]))
            """,
        )
        before, after, report = told
        assert len(before) >= 5, "the program, its daemon, a shell, the wrapper, the keeper"
        assert all(before)
        assert not any(after)
        assert report == {"exit_code": None, "signal": 9}

    @pytest.mark.parametrize("command", ["no-such-profiler", "/no/such/profiler"])
    def test_one_that_is_not_installed_is_named(self, tmp_path: Path, command: str) -> None:
        told = run_script(
            tmp_path,
            "exec",
            f"""
            from workers.outcome import InvalidEnvironment
            try:
                launcher.start(request("counted", [{command!r}, "profile"]), START, [])
            except InvalidEnvironment as error:
                print(json.dumps(str(error)))
            """,
        )
        assert repr(command) in told
        assert "not installed" in told

    def test_one_that_cannot_be_executed_ends_with_127_and_says_why(self, tmp_path: Path) -> None:
        broken = tmp_path / "profiler"
        broken.write_text("#!/no/such/interpreter\n")
        broken.chmod(0o700)
        told = run_script(
            tmp_path,
            "exec",
            f"""
            process = launcher.start(request("counted", [{str(broken)!r}]), START, [])
            messages, log = read(process.messages), read(process.log)
            print(json.dumps([messages, log, vars(process.report())]))
            """,
        )
        messages, log, report = told
        assert messages == ""
        assert "cannot be started" in log
        assert report == {"exit_code": 127, "signal": None}


def variables_of_a_unit(folder: Path, start: str, body: str = "", wrap: str = "()") -> set[str]:
    """What a unit finds, whose launcher has a token among its variables."""
    run_script(
        folder,
        start,
        f"""
        os.environ |= {{"FLOPWATCH_API_TOKEN": "hunter2", "NCCL_DEBUG": "WARN", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}}
        {body}
        process = launcher.start(request("curious", {wrap}, CUDA_VISIBLE_DEVICES=""), START, [])
        read(process.messages)
        sys.stderr.write(read(process.log))
        print(json.dumps(vars(process.report())))
        """,
    )
    return set(json.loads((folder / "variables").read_text()))


@pytest.mark.parametrize(("start", "wrap"), [("fork", "()"), ("exec", "()"), ("exec", "[*WRAPPER, '--']")])
def test_a_unit_has_every_variable_but_the_services_settings(tmp_path: Path, start: str, wrap: str) -> None:
    found = variables_of_a_unit(tmp_path, start, wrap=wrap)
    assert {"NCCL_DEBUG=WARN", "CUDA_DEVICE_ORDER=PCI_BUS_ID", "CUDA_VISIBLE_DEVICES="} <= found
    assert not [text for text in found if "FLOPWATCH_" in text or "hunter2" in text]


@starts
def test_control_of_the_units_variables(tmp_path: Path, start: str) -> None:
    inherit = "import workers.launch; workers.launch.units_environment = lambda: None"
    assert "FLOPWATCH_API_TOKEN=hunter2" in variables_of_a_unit(tmp_path, start, inherit)
