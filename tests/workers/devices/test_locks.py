"""The locks of devices. Two DeviceLocks on one folder are two agents of one host, also inside one process.

Workers of several users are played by root: each is a fork with that user's rights.
"""

import errno
import fcntl
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.errors import CannotRunHere
from workers.devices import locks
from workers.devices.discovery import Gpu, Host
from workers.devices.locks import DeviceLocks, HeldDevices

GPUS = tuple(Gpu(f"GPU-{name}", "NVIDIA H200", 143_771) for name in ("aaaa-0", "aabb-1", "cccc-2"))
CPU_HOST = Host((), 2, 1000)
GPU_HOST = Host(GPUS, 16, 1000)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "locks"


@pytest.fixture
def held() -> Iterator[list[HeldDevices]]:
    """Leases that are released at the end of the test."""
    taken: list[HeldDevices] = []
    yield taken
    for free in taken:
        free.release()


def test_an_idle_host_is_taken_whole(folder: Path, held: list[HeldDevices]) -> None:
    free = DeviceLocks(GPU_HOST, folder).take_free()
    held.append(free)
    assert free.alone
    assert free.gpus == GPUS
    assert len(free.descriptors) == 2 + len(GPUS), "the lock of choosing, the host's, and one for each GPU"
    assert folder.stat().st_mode & 0o7777 == 0o1777
    assert {path.stat().st_mode & 0o7777 for path in folder.iterdir()} == {0o1644}, "all can lock it; it is kept"


@pytest.mark.parametrize("host", [CPU_HOST, GPU_HOST])
def test_nothing_is_free_beside_a_job_that_is_alone(host: Host, folder: Path, held: list[HeldDevices]) -> None:
    first, second = DeviceLocks(host, folder), DeviceLocks(host, folder)
    held.append(first.keep_only(first.take_free(), gpus=0, alone=True))
    everything = frozenset({"host", *(gpu.uuid for gpu in host.gpus)})
    assert second.take_free() == HeldDevices(taken=everything)
    held[0].release()
    held.append(second.take_free())
    assert held[1].alone


def test_gpu_jobs_share_a_host_and_no_gpu(folder: Path, held: list[HeldDevices]) -> None:
    first, second = DeviceLocks(GPU_HOST, folder), DeviceLocks(GPU_HOST, folder)
    held.append(first.keep_only(first.take_free(), gpus=2, alone=False))
    assert held[0].gpus == GPUS[:2]
    held.append(second.take_free())
    assert not held[1].alone
    assert held[1].gpus == GPUS[2:]
    held[0].release()
    held[1].release()
    held.append(second.take_free())
    assert (held[2].alone, held[2].gpus) == (True, GPUS)


def test_a_cleaned_temporary_folder_stops_nobody(folder: Path, held: list[HeldDevices]) -> None:
    locks = DeviceLocks(GPU_HOST, folder)
    locks.take_free().release()
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    held.append(locks.take_free())
    assert held[-1].gpus == GPUS


def test_a_full_disk_moves_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's folder for temporary files is the first in which it can write one."""
    monkeypatch.setattr(tempfile, "tempdir", "/var/tmp")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert locks.lock_folder() == tmp_path / "flopwatch-locks"
    with pytest.raises(CannotRunHere, match="locks, cannot be used: No such file or directory"):
        DeviceLocks(GPU_HOST, tmp_path / "none" / "locks")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
    assert locks.lock_folder() == Path("/tmp/flopwatch-locks")


def test_locks_are_not_inherited_by_accident(folder: Path, held: list[HeldDevices]) -> None:
    held.append(DeviceLocks(GPU_HOST, folder).take_free())
    assert not any(os.get_inheritable(descriptor) for descriptor in held[0].descriptors)


def open_descriptors() -> list[str]:
    return os.listdir("/proc/self/fd")  # noqa: PTH208


class Failing:
    """Counts the calls of a function of the operating system, and lets one of them fail."""

    def __init__(self, module: Any, name: str, fails_at: int) -> None:
        self.function = getattr(module, name)
        self.left = fails_at

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return self.function(*args, **options)


@pytest.mark.parametrize("name", ["open", "fstat", "flock"])
def test_an_error_while_locking_holds_no_lock(folder, held, monkeypatch, name) -> None:
    locks = DeviceLocks(GPU_HOST, folder)
    locks.take_free().release()
    locks.close()
    before = open_descriptors()
    module = fcntl if name == "flock" else os
    for fails_at in range(1, 50):
        failing = Failing(module, name, fails_at)
        with monkeypatch.context() as patched:
            patched.setattr(module, name, failing)
            with suppress(OSError, CannotRunHere):
                locks.take_free().release()
            locks.close()
            assert len(open_descriptors()) == len(before), f"call {fails_at} of {name} failed"
        if failing.left > 0:
            break
    assert failing.left > 0, "each of its calls has failed once"
    assert fails_at > 1
    held.append(locks.take_free())
    assert (held[0].alone, held[0].gpus) == (True, GPUS)


def test_nobody_chooses_while_a_host_is_converted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """flock(2) removes a lock before it establishes the new one: another agent could take the host in between."""
    ours, others = DeviceLocks(GPU_HOST, folder), DeviceLocks(GPU_HOST, folder)
    free, seen = ours.take_free(), []

    def convert(descriptor: int, operation: int) -> None:
        if operation & fcntl.LOCK_SH:
            seen.append(others.take_free())
        fcntl.flock(descriptor, operation)

    monkeypatch.setattr(locks, "fcntl", SimpleNamespace(**{**vars(fcntl), "flock": convert}))
    ours.keep_only(free, gpus=1, alone=False).release()
    assert seen == [HeldDevices()]


ANN, BOB = 64_998, 64_999
several_users = pytest.mark.skipif(os.geteuid() != 0, reason="only root can play several users")


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder as /tmp is: all users write to it, and change only what is theirs. pytest's own is closed to them."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o1777)
    yield folder / "flopwatch-locks"
    shutil.rmtree(folder)


class User:
    """A process of a user that does one piece of work after the other, when it is asked to."""

    def __init__(self, uid: int, *works: Callable[[], Any]) -> None:
        self._orders, orders = os.pipe()
        answers, self._answers = os.pipe()
        self._pid = os.fork()
        if not self._pid:
            try:
                os.setgid(uid)
                os.setuid(uid)
                os.umask(0o077)
                for work in works:
                    os.read(self._orders, 1)
                    os.write(self._answers, json.dumps(work()).encode() + b"\n")
                os.read(self._orders, 1)  # the locks are held until it is killed
            finally:
                os._exit(0)
        os.close(self._orders)
        os.close(self._answers)
        self._orders, self._answers = orders, answers

    def next(self) -> Any:
        """Let it do its next piece of work; returns what that returns."""
        os.write(self._orders, b"x")
        answer = b""
        while not answer.endswith(b"\n"):
            chunk = os.read(self._answers, 4096)
            assert chunk, "it has failed; its standard error says why"
            answer += chunk
        return json.loads(answer)

    def end(self) -> None:
        os.close(self._orders)
        os.close(self._answers)
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


@pytest.fixture
def user() -> Iterator[Callable[..., User]]:
    users: list[User] = []

    def start(uid: int, *works: Callable[[], Any]) -> User:
        users.append(User(uid, *works))
        return users[-1]

    yield start
    for process in users:
        process.end()


class Worker:
    """A worker of one user, as far as locks go."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: list[HeldDevices] = []

    def take(self) -> tuple[bool, list[str]]:
        """Take what is free: whether the host is free of others, and which GPUs."""
        self._locks = DeviceLocks(GPU_HOST, self._folder)
        self._held.append(self._locks.take_free())
        return self._held[-1].alone, [gpu.uuid for gpu in self._held[-1].gpus]

    def keep_one(self) -> None:
        self._held.append(self._locks.keep_only(self._held.pop(), gpus=1, alone=False))

    def end_job(self) -> None:
        self._held.pop().release()


ALL = [gpu.uuid for gpu in GPUS]


@several_users
def test_users_exclude_each_other(shared: Path, user: Callable[..., User]) -> None:
    anns, bobs = Worker(shared), Worker(shared)
    ann = user(ANN, anns.take, anns.keep_one, anns.end_job, anns.take)
    bob = user(BOB, bobs.take, bobs.end_job, bobs.take, bobs.keep_one)
    assert ann.next() == [True, ALL]
    assert bob.next() == [False, []], "she chooses"
    bob.next()
    ann.next()  # keeps one
    assert bob.next() == [False, ALL[1:]], "she uses one, so he cannot have the host alone"
    bob.next()  # keeps one
    assert ann.next() is None  # her job has ended
    assert ann.next() == [False, [ALL[0], ALL[2]]]


@several_users
def test_control_users_with_own_folders_share_a_device(shared: Path, user: Callable[..., User]) -> None:
    anns, bobs = Worker(shared.with_name("anns")), Worker(shared.with_name("bobs"))
    ann, bob = user(ANN, anns.take, anns.keep_one), user(BOB, bobs.take)
    ann.next()
    ann.next()
    assert bob.next() == [True, ALL]


@several_users
def test_no_user_can_change_anothers_locks(shared: Path, user: Callable[..., User]) -> None:
    """Bob has made the folder, Ann the files."""
    anns = Worker(shared)

    def make_folder() -> None:
        shared.mkdir()
        shared.chmod(0o1777)

    def attack() -> list[str]:
        changed = []
        for path in shared.iterdir():
            for flags in (os.O_RDWR, os.O_WRONLY | os.O_TRUNC):
                with suppress(PermissionError):
                    os.close(os.open(path, flags))
                    changed.append(path.name)
        return changed

    bob = user(BOB, make_folder, attack)
    bob.next()
    assert user(ANN, anns.take).next() == [True, ALL]
    assert bob.next() == []


@several_users
@pytest.mark.parametrize("trap", ["folder", "link to a folder", "link", "pipe", "unreadable"])
def test_a_trap_is_refused_and_nothing_written_elsewhere(shared, user, tmp_path, trap) -> None:
    target, file = shared.with_name("target"), shared / "host.lock"

    def make_trap() -> None:
        if trap == "link to a folder":
            shared.symlink_to(target)
            return
        shared.mkdir()
        shared.chmod(0o755 if trap == "folder" else 0o1777)
        if trap == "link":
            file.symlink_to(target / "file")
        elif trap == "pipe":
            os.mkfifo(file)
        elif trap == "unreadable":
            file.touch(0o600)

    def start() -> str:
        target.mkdir()
        try:
            DeviceLocks(GPU_HOST, shared)
        except CannotRunHere as error:
            return f"{error.detail} {list(target.iterdir())}"
        return "started"

    user(BOB, make_trap).next()
    text = user(ANN, start).next()
    assert text.startswith(f"{shared if 'folder' in trap else file}, ")
    assert text.endswith("Remove it, or name another folder for all workers of this host by TMPDIR. []")


def test_a_lock_of_a_removed_file_is_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host cleans its folder for temporary files just before a lock is taken."""
    device_locks = DeviceLocks(CPU_HOST, folder)

    def clean_and_lock(descriptor: int, operation: int) -> None:
        for file in folder.iterdir():
            file.unlink()
        fcntl.flock(descriptor, operation)

    with monkeypatch.context() as patched:
        patched.setattr(locks, "fcntl", SimpleNamespace(**{**vars(fcntl), "flock": clean_and_lock}))
        assert device_locks.take_free() == HeldDevices()
