"""Launching ranks and ending them together.

Most tests launch ranks that do not import torch, and for which sleep stands for an operation: the launcher's part is
the same. One test uses gloo.
"""

import os
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed

from parallel import process_group
from parallel.process_group import RanksFailed, RanksTimedOut, launch
from tests.parallel import ranks
from tests.processes import alive
from tests.sockets import listening_of
from tools.waiting import wait_until

WITHOUT_TORCH = process_group._RANK_PROGRAM.replace(
    "rank_main()",
    """from parallel import process_group
process_group._join = process_group._leave = lambda *request: None
rank_main()""",
)


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ranks start in 0.1 s, without torch and a process group."""
    monkeypatch.setattr(process_group, "_RANK_PROGRAM", WITHOUT_TORCH)


@pytest.fixture
def pids() -> list[int]:
    """Processes of ranks, as they report them."""
    return []


def run(function: Any, *arguments: Any, folder: Path, pids: list[int] | None = None, **options: Any) -> list[Any]:
    def reported(index: int, message: Any) -> None:
        if pids is not None and isinstance(message, int):
            pids.append(message)

    options = {"world_size": 2, "backend": "gloo", "start_timeout_s": 60, "step_timeout_s": 30, **options}
    return launch(function, *arguments, folder=folder, reported=reported, **options)


def hold_time(monkeypatch: pytest.MonkeyPatch, condition: Callable[[Any], bool]) -> None:
    """Let no deadline pass before this is true of the ranks, since ranks may be slow on a busy host."""

    class Held(process_group._Ranks):
        def _held(self, deadline: float) -> float:
            return deadline if condition(self) else max(deadline, time.monotonic() + 0.05)

        @property
        def _start_deadline(self) -> float:
            return self._held(self._starts_until)

        @_start_deadline.setter
        def _start_deadline(self, deadline: float) -> None:
            self._starts_until = deadline

        def _deadline(self, index: int) -> float:
            return self._held(super()._deadline(index))

    monkeypatch.setattr(process_group, "_Ranks", Held)


def wait_for_last_words(monkeypatch: pytest.MonkeyPatch, log: Path, words: str) -> None:
    """Kill no rank before its stack is in its log, since writing it may be slow on a busy host."""
    ask = process_group._Ranks._log_stacks

    def asked(self: Any) -> None:
        ask(self)
        wait_until(lambda: words in log.read_text(), repr(words), 30)

    monkeypatch.setattr(process_group._Ranks, "_log_stacks", asked)


class StepClock:
    """The launcher's clock, which also advances by some seconds at each step that a rank reports."""

    sleep = staticmethod(time.sleep)

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step_s: float) -> None:
        self._offset_s = 0.0
        take = process_group._Ranks._handle

        def taken(ranks: Any, index: int, kind: str, at: float, content: Any) -> None:
            self._offset_s += step_s if kind == "step" else 0.0
            take(ranks, index, kind, at, content)

        monkeypatch.setattr(process_group._Ranks, "_handle", taken)
        monkeypatch.setattr(process_group, "time", self)

    def monotonic(self) -> float:
        return time.monotonic() + self._offset_s


def test_ranks_of_launches_at_once_meet_and_return_and_nothing_is_left(tmp_path_factory, monkeypatch) -> None:
    """In an environment that names a taken port."""
    reports: list[Any] = []
    others: list[Any] = []

    def state() -> tuple[Any, ...]:
        return listening_of(os.getpid()), threading.active_count(), signal.getsignal(signal.SIGTERM)

    # Made here: pytest's folders are not for two threads at a time.
    alone, together = tmp_path_factory.mktemp("alone"), tmp_path_factory.mktemp("together")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Exception, match=r"(?i)address already in use"):  # it really is taken
            torch.distributed.TCPStore("127.0.0.1", port, 1, is_master=True)
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        before = state()
        other = threading.Thread(target=lambda: others.extend(run(ranks.add_up, 5, folder=alone, world_size=1)))
        other.start()
        options: dict[str, Any] = {"world_size": 2, "backend": "gloo", "folder": together}
        results = launch(ranks.add_up, 3, reported=lambda *report: reports.append(report), **options)
        other.join()
        assert state() == before
    assert [result["total"] for result in (*results, *others)] == [7, 7, 5]
    assert sorted(index for index, message in reports if message == {"rank": index}) == [0, 1]
    assert not alive([result["pid"] for result in (*results, *others)])


def test_ranks_inherit_the_environment_and_return_plain_data(light, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    results = run(ranks.tell, "NCCL_NVLS_ENABLE", folder=tmp_path, world_size=3)
    assert results == [[index, 3, "gloo", "0", [1, 2], float("inf")] for index in range(3)]


@pytest.mark.parametrize(
    ("how", "reason", "words"),
    [
        ("raise", "raised ArithmeticError: made to fail", "in fail\n"),
        ("kill", "died after step 1", "the last words of the culprit"),
        ("crash", "died after step 1: of C", "Fatal Python error: Segmentation fault"),
    ],
)
def test_one_ranks_failure_ends_all_and_is_reported(light, tmp_path, pids, how, reason, words) -> None:
    began = time.monotonic()
    with pytest.raises(RanksFailed, match=f"rank 1 {reason}") as failure:
        run(ranks.fail, how, 1, str(tmp_path), folder=tmp_path, pids=pids)
    assert time.monotonic() - began < 15  # the others would sleep for a minute
    assert failure.value.rank == 1
    assert failure.value.log_file == tmp_path / "rank-1.log"
    assert words in str(failure.value)
    assert "the last words of the culprit" in failure.value.log
    assert len(pids) == 2
    assert not alive(pids)


def test_without_killing_the_others_would_live_on(light, tmp_path, pids, monkeypatch) -> None:
    """The control of the tests above."""
    monkeypatch.setattr(process_group._Ranks, "_kill", lambda self: None)
    monkeypatch.setattr(process_group, "END_S", 0.3)
    with pytest.raises(RanksFailed, match="rank 1 raised"):
        run(ranks.fail, "raise", 1, str(tmp_path), folder=tmp_path, pids=pids)
    left = alive(pids)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left
    wait_until(lambda: not alive(pids), timeout_s=10)


def rank_1_is_stopped(ranks: Any, is_stopped: Callable[[int], bool] = process_group._is_stopped) -> bool:
    return 1 in ranks._pids and is_stopped(ranks._pids[1])


def test_a_stopped_rank_is_named(light: None, tmp_path: Path, pids: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    hold_time(monkeypatch, rank_1_is_stopped)
    with pytest.raises(RanksTimedOut, match=r"rank 1 was stopped and made no step within 0.5 s") as failure:
        run(ranks.fail, "stop", 1, str(tmp_path), folder=tmp_path, pids=pids, step_timeout_s=0.5)
    assert failure.value.rank == 1
    assert not alive(pids)


def test_of_ranks_that_hang_without_a_cause_all_say_where(light, tmp_path, pids, monkeypatch) -> None:
    hold_time(monkeypatch, rank_1_is_stopped)
    monkeypatch.setattr(process_group, "_is_stopped", lambda pid: False)
    wait_for_last_words(monkeypatch, tmp_path / "rank-0.log", "in fail")
    with pytest.raises(RanksTimedOut, match="the ranks made no step") as failure:
        run(ranks.fail, "stop", 1, str(tmp_path), folder=tmp_path, pids=pids, step_timeout_s=0.5)
    assert failure.value.rank is None
    # The others have told where they were.
    assert "in fail" in (tmp_path / "rank-0.log").read_text()


def test_the_cause_is_distinguished_from_its_effects(light, tmp_path, monkeypatch) -> None:
    heard = tmp_path / "heard"
    take = process_group._Ranks._handle

    def taken(self: Any, index: int, kind: str, at: float, content: Any) -> None:
        take(self, index, kind, at, content)
        if kind == "raised":
            heard.touch()

    monkeypatch.setattr(process_group._Ranks, "_handle", taken)
    monkeypatch.setattr(process_group, "CAUSE_S", 10.0)
    with pytest.raises(RanksFailed, match="rank 1 died after step 0"):
        run(ranks.fail_of_anothers_failure, str(heard), folder=tmp_path)


def test_shared_memory_is_removed(light: None, tmp_path: Path) -> None:
    path = Path(f"/dev/shm/nccl-{os.getpid()}-{time.monotonic_ns()}")
    with pytest.raises(RanksFailed, match="made to fail"):
        run(ranks.hold_shared_memory, str(path), folder=tmp_path)
    assert not path.exists()


def test_each_step_has_its_own_time(light: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Five steps take longer than the timeout of one.
    with monkeypatch.context() as patch:
        StepClock(patch, 20.0)
        assert run(ranks.wait, 0.1, 5, folder=tmp_path, world_size=1, step_timeout_s=30) == [5]
    # Rank 0's steps must wait for rank 1, which begins slowly.
    pids: list[int] = []
    hold_time(monkeypatch, lambda ranks: 0 in ranks.results and len(pids) == 2)
    wait_for_last_words(monkeypatch, tmp_path / "rank-1.log", "in wait")
    with pytest.raises(RanksTimedOut, match=r"rank 1 made no first step within 2 s") as failure:
        run(ranks.wait, 0.1, 3, folder=tmp_path, pids=pids, start_timeout_s=2, step_timeout_s=0.5)
    assert "in wait" in (tmp_path / "rank-1.log").read_text()
    assert failure.value.rank == 1


def ranks_of_a_killed_launcher(folder: Path) -> list[int]:
    """Launch ranks from another process, kill that, and return the ranks' processes."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # A fork, since it has torch: it only starts the launcher's thread, and is killed.
        warnings.simplefilter("ignore", DeprecationWarning)
        launcher = os.fork()
    if launcher == 0:
        try:
            launch(
                ranks.wait,
                60,
                1,
                world_size=2,
                backend="gloo",
                folder=folder,
                reported=lambda index, pid: os.write(writing, f"{pid}\n".encode()),
            )
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as lines:
        pids = [int(lines.readline()) for _ in range(2)]
    assert alive(pids) == pids
    os.kill(launcher, signal.SIGKILL)
    os.waitpid(launcher, 0)
    return pids


def test_ranks_die_with_the_launching_process(light: None, tmp_path: Path) -> None:
    pids = ranks_of_a_killed_launcher(tmp_path)
    wait_until(lambda: not alive(pids), timeout_s=5)


def test_a_rank_that_cannot_begin_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = process_group._RANK_PROGRAM.replace("rank_main()", "raise SystemExit('no torch here')")
    monkeypatch.setattr(process_group, "_RANK_PROGRAM", broken)
    with pytest.raises(RanksFailed, match=r"ended before it began.*\n*no torch here"):
        run(ranks.tell, "", folder=tmp_path)


HANGING = process_group._RANK_PROGRAM.replace("rank_main()", "print('hangs', flush=True); import time; time.sleep(60)")


def all_hang(ranks: Any) -> bool:
    return all("hangs" in ranks._log_of(index)["log"] for index in range(2))


def test_a_rank_that_hangs_before_it_connects_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "_RANK_PROGRAM", HANGING)
    hold_time(monkeypatch, all_hang)
    before = set(process_group.children_of(os.getpid()))
    with pytest.raises(RanksTimedOut, match=r"did not start within 0.5 s.*\n*hangs"):
        run(ranks.tell, "", folder=tmp_path, start_timeout_s=0.5)
    wait_until(lambda: not alive(list(set(process_group.children_of(os.getpid())) - before)), timeout_s=5)


def test_wrong_uses_are_refused(light: None, tmp_path: Path) -> None:
    def local(rank: Any) -> None:
        """Do nothing."""

    for message, function, options in [
        ("world_size must be 1 or more, not 0", ranks.tell, {"world_size": 0}),
        ("unknown backend 'mpi'; known are gloo, nccl", ranks.tell, {"backend": "mpi"}),
        ("step_timeout_s must be more than 0", ranks.tell, {"step_timeout_s": 0}),
        ("99 nccl ranks need as many GPUs", ranks.tell, {"backend": "nccl", "world_size": 99}),
        ("it must be a function of a module", local, {}),
    ]:
        with pytest.raises(ValueError, match=message):
            run(function, folder=tmp_path, **options)
    with pytest.raises(ValueError, match="arguments must be plain data"):
        run(ranks.tell, object(), folder=tmp_path)
    with pytest.raises(RanksFailed, match="what return_an_object returns must be plain data"):
        run(ranks.return_an_object, folder=tmp_path)
