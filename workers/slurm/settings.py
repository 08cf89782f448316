"""What differs between Slurm clusters, read from a TOML file (deploy/slurm/slurm.toml is an example)."""

import tomllib
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from app.errors import CannotRunHere
from app.importing import program

Word = Annotated[str, StringConstraints(min_length=1, max_length=4096, pattern=r"^[^\x00-\x1f]+$")]
Name = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[^\s\x00-\x1f]+$")]
MAX_NODES = 64


class SlurmSettings(BaseModel):
    """One cluster's settings."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    folder: Annotated[Path, Field(strict=False)]
    """A folder that this host and the nodes see under one path, for this worker alone: hand-over files, and the output
    of allocations until they have ended."""
    partition: Name | None = None
    account: Name | None = None
    constraint: Name | None = None
    gpus_per_node: int = Field(default=0, ge=0, le=64)
    """GPUs that a job can have on one node; 0: the nodes have none, or jobs shall not use them."""
    gpu_type: Name | None = None
    """The type in `--gres=gpu:TYPE:N`, where nodes have several."""
    max_nodes: int = Field(default=1, ge=1, le=MAX_NODES)
    """Nodes that one job can have."""
    max_jobs: int = Field(default=32, ge=1, le=10_000)
    """Allocations that wait or run at a time; other jobs stay in the queue."""
    extra_arguments: list[Word] = []
    """Further arguments of sbatch, such as "--qos=short" or "--cpus-per-gpu=8"."""
    setup: str = ""
    """Lines of shell that run on each node before the agent: modules, variables."""
    container: list[Word] = []
    """A command before the agent's, such as ["apptainer", "exec", "--nv", "flopwatch.sif"]."""
    command: list[Word] = Field(default=program("app.cli"), min_length=1)
    """The command `flopwatch` on the nodes; by default this installation's."""
    tools: list[Name] = []
    """Profilers that the nodes have (nsys, ncu), whether this host has them or not."""
    start_s: float = Field(default=600.0, ge=0, le=86_400)
    """Seconds that an allocation's time limit has beside the job's `timeout_s`, for imports and for storing results."""
    poll_s: float = Field(default=5.0, gt=0, le=600)
    """Seconds between two questions to Slurm."""
    command_timeout_s: float = Field(default=60.0, gt=0, le=600)
    """Seconds after which a command of Slurm counts as unanswered."""

    @classmethod
    def read(cls, file: Path) -> Self:
        """Read a file. Raises CannotRunHere, which names the field and what is wrong with it."""
        try:
            settings = cls.model_validate(tomllib.loads(file.read_text()))
        except OSError as error:
            raise CannotRunHere(f"{file}, the settings for Slurm, cannot be read: {error.strerror}.") from error
        except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise CannotRunHere(f"{file}, the settings for Slurm, is no TOML: {error}.") from error
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
            raise CannotRunHere(f"{file}, the settings for Slurm: {wrong}.") from error
        if not settings.folder.is_absolute():
            raise CannotRunHere(
                f"{file}, the settings for Slurm: folder: must be an absolute path, which nodes see, too."
            )
        return settings
