"""Slurm's commands, played by scripts."""

from pathlib import Path

import pytest

from workers.slurm.client import CommandFailed, Listed, NoAnswer, SlurmClient


@pytest.fixture(autouse=True)
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def play(commands: Path, name: str, script: str) -> None:
    (commands / name).write_text(f"#!/bin/bash\n{script}\n")
    (commands / name).chmod(0o755)


def test_only_our_allocations_count_whatever_others_are_called(commands: Path) -> None:
    play(commands, "squeue", "printf '%s\\n' '7|RUNNING|None|flopwatch-1-1|a|b' '8|PENDING|x|other|c' 'a line' '9|x'")
    assert SlurmClient(10).allocations() == [Listed("7", "RUNNING", "None", "flopwatch-1-1", "a|b")]


def test_an_id_may_come_with_its_cluster(commands: Path) -> None:
    play(commands, "sbatch", "cat > /dev/null; echo '12;cluster'")
    assert SlurmClient(10).submit([], "#!/bin/bash\n") == "12"


def test_an_error_is_told_in_the_commands_words(commands: Path) -> None:
    play(commands, "scancel", "echo 'Invalid job id' >&2; exit 1")
    with pytest.raises(CommandFailed, match="scancel ended with exit code 1: Invalid job id"):
        SlurmClient(10).cancel(["7"])


def test_a_controller_that_is_away_has_refused_nothing(commands: Path) -> None:
    words = "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)"
    play(commands, "sbatch", f"cat > /dev/null; echo '{words}' >&2; exit 1")
    with pytest.raises(NoAnswer, match="connect failure"):
        SlurmClient(10).submit([], "")


def test_no_command_is_waited_for_for_ever(commands: Path) -> None:
    play(commands, "squeue", "exec sleep 60")
    with pytest.raises(NoAnswer, match="did not answer within"):
        SlurmClient(0.2).allocations()


def test_a_command_that_is_not_installed_is_named(commands: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(commands))
    with pytest.raises(CommandFailed, match="sbatch cannot be started"):
        SlurmClient(10).submit([], "")


def test_the_variables_of_an_allocation_do_not_reach_commands(commands: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "3")
    monkeypatch.setenv("FLOPWATCH_API_TOKEN", "secret")
    monkeypatch.setenv("FLOPWATCH_NOTIFY_SECRET", "another")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    play(
        commands,
        "sbatch",
        'cat > /dev/null; echo "${SLURM_JOB_ID:-none} $SLURM_CONF${FLOPWATCH_API_TOKEN}${FLOPWATCH_NOTIFY_SECRET}"',
    )
    assert SlurmClient(10).submit([], "") == "none /etc/slurm.conf"
