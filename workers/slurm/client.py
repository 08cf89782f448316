"""Slurm's commands: sbatch, squeue and scancel, each with a time limit.

They need no accounting. squeue is asked in its plain format: `--json` came late and ignores some filters.
"""

import os
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from app.settings import SECRETS

FINAL = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED"),
    *("NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
)
"""States that an allocation does not leave any more."""
PREFIX = "flopwatch-"
"""Begins the names of all our allocations."""
LIST_FORMAT = "%A|%T|%r|%j|%k"
"""Id, state, reason, name, and last the comment, in which users may write anything."""
IGNORED = ("SLURM_", "SQUEUE_", "SCANCEL_")
"""Variables of an allocation in which this worker may run itself, and of its user's habits, which would change what
commands do. SLURM_CONF says which cluster it is."""
AWAY = ("Unable to contact slurm controller", "Socket timed out", "Zero Bytes were transmitted")
"""What commands say when the controller is away, or goes away meanwhile; their exit code does not tell."""


class CommandFailed(Exception):
    """A command ended with an error, or did not answer in time; the text is for people."""


class NoAnswer(CommandFailed):
    """A command had no answer, or not in time. Slurm may have done what it asked for."""


@dataclass(frozen=True)
class Listed:
    """An allocation as squeue shows it."""

    id: str
    state: str
    reason: str
    name: str
    comment: str

    @property
    def is_final(self) -> bool:
        return self.state in FINAL

    @property
    def is_pending(self) -> bool:
        """True if it has no node yet."""
        return self.state == "PENDING"


class SlurmClient:
    """Runs Slurm's commands. `timeout_s` is the time limit of each."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def submit(self, arguments: Sequence[str], script: str) -> str:
        """Submit a batch script; returns the allocation's id. Raises CommandFailed, also if it may have been taken."""
        answer = self._run(["sbatch", "--parsable", *arguments], script)
        return answer.strip().partition(";")[0]

    def test(self, arguments: Sequence[str]) -> None:
        """Ask whether Slurm would take an allocation, and submit none. Raises CommandFailed."""
        self._run(["sbatch", "--test-only", *arguments], "#!/bin/bash\n")

    def run_on_node(self, arguments: Sequence[str], within_s: int, script: str) -> str:
        """Run a shell script on a node that is free within so many seconds; returns what it prints.

        Raises CommandFailed.
        """
        limits = [f"--immediate={within_s}", "--time=1", "--nodes=1", "--ntasks=1", "--quiet"]
        return self._run(["srun", *arguments, *limits, "sh", "-c", script])

    def allocations(self) -> list[Listed]:
        """Return all our allocations of this user, also those that ended lately. Raises CommandFailed."""
        answer = self._run(
            ["squeue", "--noheader", "--states=all", f"--user={os.geteuid()}", f"--format={LIST_FORMAT}"]
        )
        rows = (line.split("|", 4) for line in answer.splitlines())
        return [Listed(*row) for row in rows if len(row) == 5 and row[3].startswith(PREFIX)]

    def cancel(self, ids: Collection[str]) -> None:
        """Cancel these allocations. Raises CommandFailed, also if one of them has ended meanwhile."""
        self._run(["scancel", *sorted(ids)])

    def _run(self, command: list[str], stdin: str = "") -> str:
        # Allocations have this worker's variables, and need no secrets.
        kept = {
            name: value
            for name, value in os.environ.items()
            if name not in SECRETS and (name == "SLURM_CONF" or not name.startswith(IGNORED))
        }
        try:
            done = subprocess.run(
                command,
                input=stdin,
                env=kept,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=self._timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise NoAnswer(f"{command[0]} did not answer within {self._timeout_s:g} s") from error
        except OSError as error:
            raise CommandFailed(f"{command[0]} cannot be started: {error.strerror}") from error
        if done.returncode != 0:
            words = " ".join(done.stderr.split()) or "it said nothing"
            kind = NoAnswer if any(one in words for one in AWAY) else CommandFailed
            raise kind(f"{command[0]} ended with exit code {done.returncode}: {words}")
        return done.stdout
