"""Workers of several users on one host. Root plays them: each is a fork with that user's rights."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.errors import InvalidEnvironment
from app.store.database import byte_locks
from workers.devices import announcements
from workers.devices.announcements import Others
from workers.devices.locks import DeviceLocks, Gpu, Host, Lease

ANN, BOB = 64_998, 64_999
GPUS = tuple(Gpu(f"GPU-{number}", "NVIDIA H200", 143_771) for number in range(3))
HOST = Host(GPUS, 16, 1000)
several_users = pytest.mark.skipif(os.geteuid() != 0, reason="only root can play several users")


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder as /tmp is: all users write to it, and change only what is theirs. pytest's own is closed to them."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


class User:
    """A process of a user that does what it is told, one piece of work after the other."""

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
    for one in users:
        one.end()


class Worker:
    """What a worker of one user does with the locks."""

    def __init__(self, parent: Path, uid: int) -> None:
        self._folder = parent / f"{announcements.PREFIX}{uid}"
        self._leases: list[Lease] = []

    def take(self) -> tuple[bool, list[str]]:
        """Take what is free: the host alone?, and which GPUs."""
        self._locks = DeviceLocks(HOST, self._folder)
        lease = self._locks.take_free()
        self._leases.append(lease)
        return lease.alone, [gpu.uuid for gpu in lease.gpus]

    def keep_one(self) -> None:
        self._leases.append(self._locks.keep_only(self._leases.pop(), gpus=1, alone=False))

    def keep_host(self) -> None:
        self._leases.append(self._locks.keep_only(self._leases.pop(), gpus=0, alone=True))

    def end_job(self) -> None:
        self._leases.pop().release()


ALL = [gpu.uuid for gpu in GPUS]


@several_users
def test_users_exclude_each_other(shared: Path, user: Callable[..., User]) -> None:
    anns, bobs = Worker(shared, ANN), Worker(shared, BOB)
    ann = user(ANN, anns.take, anns.keep_one, anns.end_job, anns.take)
    bob = user(BOB, bobs.take, bobs.end_job, bobs.take, bobs.keep_one, bobs.take, bobs.keep_host)
    assert ann.next() == [True, ALL]
    assert bob.next() == [False, []], "she chooses"
    bob.next()
    ann.next()  # keeps one
    assert bob.next() == [False, ALL[1:]], "she uses one, so he cannot have the host alone"
    bob.next()  # keeps one
    assert ann.next() is None  # her job has ended
    assert ann.next() == [False, [ALL[0], ALL[2]]]


@several_users
def test_another_users_exclusive_job_leaves_nothing_free(shared: Path, user: Callable[..., User]) -> None:
    anns, bobs = Worker(shared, ANN), Worker(shared, BOB)
    ann = user(ANN, anns.take, anns.keep_host, anns.end_job)
    bob = user(BOB, bobs.take, bobs.take)
    ann.next()
    ann.next()
    assert bob.next() == [False, []]
    ann.next()
    assert bob.next() == [True, ALL]


@several_users
def test_control_of_the_announcements(shared: Path, user: Callable[..., User], monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless they read what others announce, two users get one device."""
    monkeypatch.setattr(Others, "have", lambda *_: set())
    anns, bobs = Worker(shared, ANN), Worker(shared, BOB)
    ann, bob = user(ANN, anns.take, anns.keep_one), user(BOB, bobs.take)
    ann.next()
    ann.next()
    assert bob.next() == [True, ALL]


@several_users
def test_another_user_can_neither_open_nor_block_the_locks(shared: Path, user: Callable[..., User]) -> None:
    folder = shared / f"{announcements.PREFIX}{ANN}"
    anns = Worker(shared, ANN)

    def attack() -> list[str]:
        refused = []
        for path in folder.iterdir():
            for flags in (os.O_RDONLY, os.O_RDWR):
                try:
                    descriptor = os.open(path, flags)
                except PermissionError:
                    refused.append(path.name)
                    continue
                # All that is possible with the file of announcements: it says nothing to its owner.
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                for name in ("choosing", "host", "alone", *ALL):
                    byte_locks.share(descriptor, byte_locks.byte_of(name))
        return refused

    ann = user(ANN, anns.take, anns.end_job, anns.take)
    bob = user(BOB, attack)
    ann.next()
    ann.next()
    files = sorted(path.name for path in folder.iterdir())
    assert sorted(bob.next()) == sorted([*files, *(name for name in files if name != announcements.FILE)])
    assert ann.next() == [True, ALL]


@several_users
@pytest.mark.parametrize("trap", ["folder", "link", "link to her own"])
def test_a_folder_that_somebody_else_made_is_refused(shared: Path, user: Callable[..., User], trap: str) -> None:
    folder, target = shared / f"{announcements.PREFIX}{ANN}", shared / "target"

    def make_trap() -> None:
        if trap == "folder":
            folder.mkdir()
            folder.chmod(0o777)
        else:
            folder.symlink_to(target)

    def start() -> str:
        try:
            DeviceLocks(HOST, folder)
        except InvalidEnvironment as error:
            return error.detail
        return "started"

    user(BOB, make_trap).next()
    ann = user(ANN, lambda: target.mkdir() if trap == "link to her own" else None, start)
    ann.next()
    told = ann.next()
    assert told.startswith(f"{folder}, the folder for device locks, ")
    assert (f"belongs to the user {BOB}" if trap == "folder" else "cannot be used") in told
    assert "remove it" in told
    assert not target.exists() or not list(target.iterdir())


@several_users
@pytest.mark.parametrize("trap", ["not his", "open to others", "link", "pipe"])
def test_nothing_is_believed_that_another_could_have_said(shared: Path, user: Callable[..., User], trap: str) -> None:
    """Ann looks; Bob has made what looks like the announcements of a third."""
    third = shared / f"{announcements.PREFIX}{BOB if trap != 'not his' else 64_997}"
    file = third / announcements.FILE

    def lie() -> None:
        third.mkdir(mode=0o755)
        third.chmod(0o777 if trap == "open to others" else 0o755)
        if trap == "link":
            (third / "other").touch()
            file.symlink_to(third / "other")
        elif trap == "pipe":
            os.mkfifo(file, 0o644)
        else:
            file.touch()
            file.chmod(0o644)
        if trap != "pipe":
            descriptor = os.open(file, os.O_RDWR)
            byte_locks.share(descriptor, byte_locks.byte_of("alone"))

    anns = Worker(shared, ANN)
    user(BOB, lie).next()
    assert user(ANN, anns.take).next() == [True, ALL]


def make_folders(parent: Path, owners: dict[str, int]) -> None:
    for suffix, uid in owners.items():
        folder = parent / f"{announcements.PREFIX}{suffix}"
        folder.mkdir(mode=0o755)
        (folder / announcements.FILE).touch(0o644)
        for path in (folder / announcements.FILE, folder):
            os.chown(path, uid, uid)


@several_users
def test_a_user_has_one_folder(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [str(ANN), f"0{ANN}", f"00{ANN}", "٣", "5"]
    make_folders(shared, {**dict.fromkeys(names, ANN), str(BOB): BOB})
    opened: list[str] = []
    most_open = 0
    real = announcements._announcements_of

    def look(path: Path, uid: int) -> int:
        nonlocal most_open
        file = real(path, uid)
        opened.append(path.name)
        most_open = max(most_open, len(os.listdir("/proc/self/fd")))  # noqa: PTH208
        return file

    monkeypatch.setattr(announcements, "_announcements_of", look)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    assert Others(shared).have(["alone"]) == set()
    assert sorted(opened) == [f"{announcements.PREFIX}{uid}" for uid in (ANN, BOB)]
    assert most_open == before + 1


@several_users
@pytest.mark.parametrize(("error", "told"), [("ENOENT", True), ("EACCES", True), ("EMFILE", False), ("ENFILE", False)])
def test_who_cannot_look_takes_nothing(shared: Path, monkeypatch: pytest.MonkeyPatch, error: str, told: bool) -> None:
    make_folders(shared, {str(ANN): ANN})
    locks = DeviceLocks(HOST, shared / f"{announcements.PREFIX}{os.geteuid()}")
    code = getattr(errno, error)

    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(announcements, "_announcements_of", fail)
        if told:
            locks.take_free().release()
        else:
            with pytest.raises(OSError, match=os.strerror(code)):
                locks.take_free()
    lease = locks.take_free()
    assert lease.alone, "the failed look holds no lock"
    lease.release()


def test_only_a_look_for_a_claim_lists_the_temporary_folder(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locks = DeviceLocks(HOST, shared / f"{announcements.PREFIX}{os.geteuid()}")
    listed: list[Path] = []
    real = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: (listed.append(path), real(path))[1])
    for afresh in (True, False, False, True):
        locks.take_free(afresh=afresh).release()
    assert listed == [shared, shared]


@several_users
def test_a_user_who_came_later_is_seen_by_a_claim(shared: Path, user: Callable[..., User]) -> None:
    anns, bobs = Worker(shared, ANN), Worker(shared, BOB)

    def wait_for_work() -> bool:
        anns._locks = DeviceLocks(HOST, shared / f"{announcements.PREFIX}{ANN}")
        anns._locks.take_free().release()
        return True

    def look(afresh: bool) -> bool:
        lease = anns._locks.take_free(afresh=afresh)
        try:
            return lease.alone
        finally:
            lease.release()

    ann = user(ANN, wait_for_work, lambda: look(False), lambda: look(True), lambda: look(False))
    bob = user(BOB, bobs.take, bobs.keep_host)
    ann.next()
    bob.next()
    bob.next()
    assert ann.next(), "control: she does not know him yet"
    assert not ann.next()
    assert not ann.next(), "now she does"


@several_users
def test_who_sees_another_choose_takes_nothing(shared: Path, user: Callable[..., User]) -> None:
    """Also when the other has announced nothing else so far."""
    anns = Worker(shared, ANN)

    def begin() -> None:
        folder = shared / f"{announcements.PREFIX}{BOB}"
        folder.mkdir(mode=0o755)
        folder.chmod(0o755)
        with announcements.own_folder(folder) as descriptor:
            announcements.announce(descriptor, ["choosing"])

    user(BOB, begin).next()
    assert user(ANN, anns.take).next() == [False, []]
