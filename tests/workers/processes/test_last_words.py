"""Where a process was when it died or was ended, as it stands in its scratch folder."""

import errno
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NoReturn

import pytest

from parallel.stacks import SIGNAL
from tools.waiting import wait_until
from workers.processes import last_words

STARTS = """
import os, runpy, signal, sys, threading, time
from pathlib import Path
from workers.measure import position
from workers.processes import last_words

last_words.keep(Path(sys.argv[1]))
position.step_begins(4)
threading.Thread(target=threading.Event().wait, daemon=True).start()
runpy.run_path(sys.argv[1] + "/code/0123abcd/train.py")
"""
HANGS = """
import os, time

def step():
    ready, told = os.pipe()
    pid = os.fork()
    if not pid:
        from workers.measure import position
        position.step_begins(5)
        os.write(told, b".")
        time.sleep(60)
    os.read(ready, 1); print(pid, flush=True); time.sleep(60)

step()
"""
FALLS = """
import ctypes

def step():
    ctypes.string_at(0)

step()
"""


def started(scratch: Path, code: str) -> subprocess.Popen[str]:
    file = scratch / "code" / "0123abcd" / "train.py"
    file.parent.mkdir(parents=True)
    file.write_text(textwrap.dedent(code).lstrip())
    return subprocess.Popen([sys.executable, "-c", STARTS, str(scratch)], stdout=subprocess.PIPE, text=True)


def test_a_crash_has_its_line_in_the_users_code(tmp_path: Path) -> None:
    with started(tmp_path, FALLS) as process:
        assert process.wait(60) == -signal.SIGSEGV
    assert last_words.place_in(tmp_path) == " (train.py:4, in step)"
    assert str(last_words.position_in(tmp_path)) == "in step 4"
    log = last_words.stacks_in(tmp_path)
    assert "Segmentation fault" in log
    assert "Extension modules" not in log


def test_a_process_that_hangs_writes_its_stacks_at_the_signal_and_its_fork_none(tmp_path: Path) -> None:
    with started(tmp_path, HANGS) as process:
        fork = int(process.stdout.readline())
        assert str(last_words.position_in(tmp_path)) == "in step 4", "that of the fork is its own"
        assert last_words.place_in(tmp_path) == ""
        os.kill(fork, SIGNAL)  # it has no handler any more
        process.send_signal(SIGNAL)
        wait_until(lambda: last_words.place_in(tmp_path) == " (train.py:11, in step)", "the stacks", 10)
        assert last_words.stacks_in(tmp_path).count("Current thread") == 1
        process.kill()


def test_a_full_disk_ends_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_path: Path, _mode: str) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "open", fail)
    monkeypatch.setattr(os, "register_at_fork", lambda **_: None)
    last_words.keep(tmp_path)


def test_ranks_that_wait_for_each_other_have_a_place_each(tmp_path: Path) -> None:
    for rank, line in ((0, 12), (1, 17)):
        file = tmp_path / "ranks" / f"rank-{rank}.log"
        file.parent.mkdir(exist_ok=True)
        own = f'  File "{tmp_path}/code/0123abcd/train.py", line {line} in step\n'
        file.write_text(
            f'said\n\nCurrent thread 0x1 (most recent call first):\n  File "{tmp_path}/torch/x.py", line 1 in f\n{own}'
        )
    assert last_words.place_in(tmp_path) == " (rank 0: train.py:12, in step; rank 1: train.py:17, in step)"
    assert "--- output of rank 1 ---\nsaid" in last_words.stacks_in(tmp_path)


def test_only_a_stack_of_faulthandlers_has_a_place(tmp_path: Path) -> None:
    line = '  File "train.py", line 5 in step\n'
    for text, place in (
        (line, ""),
        (f"Current thread 0x1 (most recent call first):\n{line}", " (train.py:5, in step)"),
        (f"Current thread 0x1 (most recent call first):\n  <no Python frame>\n\nsaid:\n{line}", ""),
    ):
        (tmp_path / last_words.STACKS).write_text(text)
        assert last_words.place_in(tmp_path) == place


@pytest.mark.parametrize(
    ("file", "place"), [("train.py", " (train.py:5, in step)"), ("<string>", ""), ("/usr/lib/train.py", "")]
)
def test_a_place_is_in_a_script_or_in_uploaded_files(tmp_path: Path, file: str, place: str) -> None:
    (tmp_path / last_words.STACKS).write_text(
        f'\nCurrent thread 0x1 (most recent call first):\n  File "{file}", line 5 in step\n'
    )
    assert last_words.place_in(tmp_path) == place
