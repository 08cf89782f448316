"""Locks on single bytes of a file: many locks, one descriptor.

They are Linux's open file description locks (fcntl(2)). They belong to the descriptor, so they end with its process,
however that ends, and a process that inherits the descriptor holds them too. A byte need not exist. Two descriptors
exclude each other also within one process.
"""

import fcntl
import hashlib
import os
import struct

_FLOCK = struct.Struct("hhqqi4x")
"""struct flock: type, whence, start, length, pid."""


def byte_of(name: str) -> int:
    """Return the byte that stands for a name. Two names share one as seldom as 60-bit hashes collide."""
    return int(hashlib.sha256(name.encode()).hexdigest()[:15], 16)


def share(descriptor: int, byte: int) -> None:
    """Take the shared lock; wait while another one has it exclusively."""
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLKW, _request(fcntl.F_RDLCK, byte))


def try_exclusive(descriptor: int, byte: int) -> bool:
    """Take the exclusive lock, for which the file must be open for writing; False if another one has any lock."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _request(fcntl.F_WRLCK, byte))
    except BlockingIOError:
        return False
    return True


def unlock(descriptor: int, byte: int) -> None:
    """Give the lock back."""
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _request(fcntl.F_UNLCK, byte))


def _request(kind: int, byte: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0)
