"""The settings of a cluster."""

import re
from pathlib import Path

import pytest

from app.errors import CannotRunHere
from workers.slurm.settings import SlurmSettings

EXAMPLE = Path(__file__).resolve().parents[3] / "deploy" / "slurm" / "slurm.toml"


def test_the_example_is_valid() -> None:
    settings = SlurmSettings.read(EXAMPLE)
    assert settings.gpus_per_node > 0
    assert "export" in settings.setup


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "folder: Field required"),
        ('folder = "relative"', "folder: must be an absolute path"),
        ('folder = "/shared"\npartitions = "gpu"', "partitions: Extra inputs"),
        ('folder = "/shared"\npartition = "gpu nodes"', "partition: String should match"),
        ('folder = "/shared"\nmax_nodes = 0', "max_nodes: Input should be greater"),
        ('folder = "/shared"\nextra_arguments = "--qos=short"', "extra_arguments: Input should be a valid list"),
        ("folder", "is no TOML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "slurm.toml"
    file.write_text(text)
    with pytest.raises(CannotRunHere, match="the settings for Slurm") as raised:
        SlurmSettings.read(file)
    assert told in raised.value.detail


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CannotRunHere, match="No such file"):
        SlurmSettings.read(tmp_path / "none.toml")


def test_the_example_has_every_field() -> None:
    named = re.findall(r"^(?:# )?(\w+) = ", EXAMPLE.read_text(), flags=re.MULTILINE)
    assert sorted(named) == sorted(SlurmSettings.model_fields)
