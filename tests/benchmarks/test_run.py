"""Every file in benchmarks/specs has jobs that the service takes, and `benchmarks.run` prints a file's table."""

import json
from pathlib import Path

import pytest

from app.specs import spec_adapter
from app.specs._sweep import expand
from benchmarks import run

FILES = sorted(run.SPECS.glob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_point_of_a_file_is_a_valid_spec(path: Path) -> None:
    content = json.loads(path.read_text())
    assert content.keys() == {"base", "grids", "columns"}
    points = [point.spec for grid in content["grids"] for point in expand(content["base"], grid, [])]
    assert all(spec_adapter.validate_json(json.dumps(spec)) for spec in points)
    texts = [json.dumps(spec, sort_keys=True) for spec in points]
    assert len(texts) == len(set(texts)), "no job is submitted twice"
