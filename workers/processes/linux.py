"""Linux process control: adopt orphans, find descendants, end them all."""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Container
from pathlib import Path

import psutil

from parallel.stacks import SIGNAL

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")


def adopt_orphans() -> None:
    """Make this process the child subreaper: descendants whose parent dies become its children, setsid or not."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent, with the pid `parent`, dies, also if it has died already."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def descendants(spare: Container[int] = ()) -> list[psutil.Process]:
    """Return live descendants of this process, in any session, without those below a child whose pid is in `spare`."""
    processes: list[psutil.Process] = []
    for child in psutil.Process().children():
        if child.pid in spare:
            continue
        processes.append(child)
        try:
            processes.extend(child.children(recursive=True))
        except psutil.NoSuchProcess:
            continue
    return processes


def signal_all(signum: int, spare: Container[int] = ()) -> int:
    """Send a signal to every descendant; returns how many were reached."""
    reached = 0
    for process in descendants(spare):
        try:
            process.send_signal(signum)
        except psutil.NoSuchProcess:
            continue
        reached += 1
    return reached


def ask_for_stacks() -> int:
    """Let every descendant that can write its threads' stacks do so; returns how many were asked."""
    asked = 0
    for process in descendants():
        with contextlib.suppress(Exception):  # the keeper, which ends them next, must live
            status = Path(f"/proc/{process.pid}/status").read_bytes()  # a process's name may be cut within a character
            if int(status.partition(b"\nSigCgt:")[2].split()[0], 16) >> (SIGNAL - 1) & 1:
                process.send_signal(SIGNAL)
                asked += 1
    return asked


def kill_all(spare: Container[int] = (), within_s: float = float("inf")) -> None:
    """Kill every descendant and reap it, as far as that is possible within so many seconds; needs adopt_orphans(), else
    a grandchild can escape.

    It repeats, because a process that forks while it is being killed leaves a new orphan, which becomes our child. It
    looks less and less often: a process may take seconds to give a GPU's memory back, while others measure.
    """
    pause_s, give_up_at = 0.001, time.monotonic() + within_s
    while signal_all(signal.SIGKILL, spare) and time.monotonic() < give_up_at:
        for child in psutil.Process().children():
            if child.pid in spare:
                continue
            try:
                os.waitpid(child.pid, os.WNOHANG)
            except ChildProcessError:
                continue
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)


def end_tree(root: psutil.Process, within_s: float) -> bool:
    """Kill every descendant of `root`, a child subreaper, and then `root`, also if it is stopped. Returns False, and
    leaves `root` alone, if some are alive after so many seconds: a process whose driver hangs cannot be killed.

    A stopped subreaper still adopts, so none of its descendants can leave the tree before it is killed itself.
    """
    pause_s, give_up_at = 0.001, time.monotonic() + within_s
    with contextlib.suppress(psutil.NoSuchProcess):
        while live := [process for process in root.children(recursive=True) if _lives(process)]:
            for process in live:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            if time.monotonic() >= give_up_at:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
        root.kill()
    return True


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def reap() -> dict[int, int]:
    """Reap every dead child; returns wait statuses by pid."""
    statuses: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return statuses
        if pid == 0:
            return statuses
        statuses[pid] = status
