"""Hosts on one switch, each a network namespace, whose cables a test can pull: packets are lost then, and nobody hears
of it. All of it ends with the test's process; the machine's own network is not touched."""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

NEW_NETWORK = 0x40000000
"""CLONE_NEWNET of unshare() and setns()."""
ENTER = """
import ctypes, os, socket
library = ctypes.CDLL(None, use_errno=True)
if library.setns(os.open({namespace!r}, os.O_RDONLY | os.O_CLOEXEC), 0x40000000) or library.unshare(0x04000000):
    raise OSError(ctypes.get_errno(), "cannot become another host")
socket.sethostname({name!r})
"""
_library = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Host:
    name: str
    address: str
    namespace: str
    """A path of its network namespace."""

    @property
    def statements(self) -> str:
        """Statements by which a process of one thread becomes one of this host, which has a name of its own."""
        return ENTER.format(namespace=self.namespace, name=self.name)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Let what this thread starts run on the host."""
        with ExitStack() as stack:
            before = _here(stack)
            _enter(int(self.namespace.rpartition("/")[2]))
            try:
                yield
            finally:
                _enter(before)

    def pull(self) -> None:
        """Pull the cable out of the switch."""
        _ip(f"link set {self.name} down")

    def plug(self) -> None:
        _ip(f"link set {self.name} up")

    def received_bytes(self) -> int:
        """The bytes that have come to it through the cable."""
        lines = Path("/proc/net/dev").read_text().splitlines()
        [counters] = [line.split() for line in lines if line.split()[0] == f"{self.name}:"]
        return int(counters[9])  # what the switch has sent


@contextmanager
def hosts(*names: str) -> Iterator[list[Host]]:
    """Connect hosts to a switch, of which the calling thread is a host as well meanwhile; skip the test where this
    is not permitted."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and Debian's package iproute2")
    with ExitStack() as stack:
        before = _here(stack)
        try:
            _new()
        except OSError as error:
            pytest.skip(str(error))
        stack.callback(_enter, before)
        _ip("link set lo up", "link add switch type bridge", "addr add 10.0.0.1/24 dev switch", "link set switch up")
        yield [_connect(stack, name, f"10.0.0.{number}") for number, name in enumerate(names, 2)]


def _connect(stack: ExitStack, name: str, address: str) -> Host:
    switch = _here(stack)
    _new()
    path = f"/proc/{os.getpid()}/fd/{_here(stack)}"
    host = Host(name, address, path)
    _enter(switch)
    _ip(f"link add {name} type veth peer name eth0 netns {path}", f"link set {name} master switch up")
    with host.entered():
        _ip("link set lo up", f"addr add {address}/24 dev eth0", "link set eth0 up")
    return host


def _ip(*commands: str) -> None:
    for command in commands:
        subprocess.run(["ip", *command.split()], check=True)


def _here(stack: ExitStack) -> int:
    """A descriptor of this thread's namespace."""
    descriptor = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    stack.callback(os.close, descriptor)
    return descriptor


def _enter(namespace: int) -> None:
    if _library.setns(namespace, NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "cannot enter a network namespace")


def _new() -> None:
    """Put this thread into a new namespace."""
    if _library.unshare(NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "network namespaces are not permitted here")
