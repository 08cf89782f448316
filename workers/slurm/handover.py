"""The files by which a claim reaches its allocation, in a folder that both sides see."""

import fcntl
import hashlib
import json
import os
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

from app.errors import CannotRunHere
from app.store.records import Claim, HandedOver

LOCK = "worker.lock"
SUFFIX = ".json"


@dataclass(frozen=True)
class HandOver:
    """What a hand-over file says: the claim, and what its agent needs before it may take it over."""

    claim: HandedOver
    nodes: int
    device_type: str
    devices: int
    """On this node."""
    exclusive_host: bool


def mark_of(token: str) -> str:
    """Return what names a claim where others can read it. The token itself is a secret."""
    return hashlib.sha256(f"mark {token}".encode()).hexdigest()[:16]


class HandOverFolder:
    """The folder of one worker, until `close`. Raises CannotRunHere: it cannot be used, or another worker uses it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = path.stat()
            if status.st_uid != os.geteuid() or status.st_mode & 0o077:
                raise CannotRunHere(
                    f"{path}, the folder for hand-over files, must be yours and closed to others: chmod 700 it, or set "
                    "`folder` to another."
                )
            self._lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CannotRunHere(f"Another worker uses {path}: give each its own `folder`.") from error
        except OSError as error:
            raise CannotRunHere(f"{path}, the folder for hand-over files, cannot be used: {error.strerror}.") from error

    def file_of(self, mark: str) -> Path:
        return self.path / f"{mark}{SUFFIX}"

    def output_of(self, mark: str) -> Path:
        """Return the file with the output of its allocation."""
        return self.path / f"{mark}.log"

    def write(self, claim: Claim, nodes: int) -> Path:
        """Write the hand-over file of a claim, for its owner's eyes only, whole or not at all."""
        file = self.file_of(mark_of(claim.token))
        part = file.with_suffix(".part")
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as opened:  # noqa: PTH123
            content = {
                "job": claim.job_id,
                "attempt": claim.attempt,
                "token": claim.token,
                "nodes": nodes,
                "device_type": claim.device_type,
                "devices": claim.devices,
                "exclusive_host": claim.exclusive_host,
            }
            json.dump(content, opened)
        return part.rename(file)

    def is_waiting(self, mark: str) -> bool:
        """Return True if the claim's hand-over file is there: no agent has taken it over yet."""
        return self.file_of(mark).exists()

    def last_words(self, mark: str, size: int) -> str:
        """Return the end of an allocation's output, at most `size` bytes, without what Slurm's own daemon wrote."""
        try:
            lines = self.output_of(mark).read_bytes()[-size:].decode(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(line for line in lines if not line.startswith("slurmstepd")).strip()

    def tidy(self, kept: Container[str]) -> None:
        """Remove the files of all claims but those with the marks `kept`."""
        for file in self.path.iterdir():
            if file.name != LOCK and file.stem not in kept:
                file.unlink(missing_ok=True)

    def close(self) -> None:
        """Let another worker use the folder."""
        os.close(self._lock)


def taken(file: Path) -> Path:
    """Return the name of a hand-over file whose claim was taken over; the job's other nodes still read it."""
    return file.with_suffix(".taken")


def read(file: Path) -> HandOver:
    """Read a hand-over file. Raises CannotRunHere: it is gone, since its claim was taken over or given up, or it is
    none."""
    try:
        content = json.loads((taken(file) if taken(file).exists() else file).read_text())
        handed = HandedOver(int(content["job"]), int(content["attempt"]), str(content["token"]))
        return HandOver(
            handed,
            int(content["nodes"]),
            str(content["device_type"]),
            int(content["devices"]),
            bool(content["exclusive_host"]),
        )
    except FileNotFoundError as error:
        raise CannotRunHere(
            f"{file} is gone: the job was taken over or given up, and this allocation is not needed."
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CannotRunHere(f"{file} is no hand-over file: {error!r}.") from error
