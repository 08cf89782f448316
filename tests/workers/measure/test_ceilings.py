from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

from workers.measure.ceilings import NO_CEILING, Ceilings

CPU = torch.device("cpu")
THEN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def test_what_is_recorded_is_found_again(tmp_path: Path) -> None:
    ceilings = Ceilings(tmp_path / "ceilings")
    assert ceilings.tflops(CPU, "fp32") == (None, NO_CEILING)
    ceilings.record(CPU, {"fp32": 0.5}, 12.5, THEN)
    assert ceilings.tflops(CPU, "fp32") == (0.5, "measured at 2026-01-02T03:04:05Z")
    assert ceilings.tflops(CPU, "bf16") == (None, "no measured ceiling of this device in bf16 is on record")
    assert len(list((tmp_path / "ceilings").iterdir())) == 1


def test_what_is_measured_later_replaces_only_itself(tmp_path: Path) -> None:
    ceilings = Ceilings(tmp_path)
    ceilings.record(CPU, {"fp32": 0.5, "bf16": 1.0}, 12.5, THEN)
    ceilings.record(CPU, {"fp32": 0.75}, None, spread=0.125)
    ceiling = ceilings.read(CPU)
    assert (ceiling.tflops["fp32"].value, ceiling.tflops["bf16"].value, ceiling.copy_gb_per_s.value) == (
        0.75,
        1.0,
        12.5,
    )
    assert (ceiling.tflops["fp32"].spread, ceiling.tflops["bf16"].spread) == (0.125, 0.0)
    assert ceiling.tflops["fp32"].measured_at > ceiling.tflops["bf16"].measured_at


def test_a_processors_ceiling_depends_on_its_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ceilings = Ceilings(tmp_path)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    ceilings.record(CPU, {"fp32": 0.5}, None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert ceilings.tflops(CPU, "fp32") == (None, NO_CEILING)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"device": "x", "tflops": {"fp32": 1}, "copy_gb_per_s": null}'])
def test_a_file_that_makes_no_sense_counts_as_none(tmp_path: Path, text: str) -> None:
    ceilings = Ceilings(tmp_path)
    ceilings.record(CPU, {"fp32": 0.5}, None)
    (file,) = tmp_path.iterdir()
    file.write_text(text)
    assert ceilings.tflops(CPU, "fp32") == (None, NO_CEILING)
    ceilings.record(CPU, {"fp32": 0.5}, None)
    assert ceilings.tflops(CPU, "fp32")[0] == 0.5


@pytest.mark.gpu
def test_a_gpus_ceiling_is_kept_by_its_uuid(tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    Ceilings(tmp_path).record(device, {"bf16": 700.0}, 4000.0)
    assert [file.name for file in tmp_path.iterdir()] == [f"GPU-{torch.cuda.get_device_properties(device).uuid}.json"]
