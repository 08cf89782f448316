"""The played step beside torch's allocations, and beside itself."""

import itertools
from fractions import Fraction
from typing import Any

import pytest

from parallel.scaling import evaluate
from workers.model import accounting
from workers.model.accounting import Shape, StepMemory
from workers.model.step_memory import PARTS, Choices, Moment, Play, Sharing, moments

SHAPE = Shape(vocab_size=1500, d_model=48, num_layers=3, num_heads=4, d_ff=112)
MIB = 2**20


def peak(found: list[Moment]) -> Moment:
    return max(found, key=lambda moment: moment.total)


MEASURED = [
    {},
    {"precision": "bf16"},
    {"precision": "bf16", "parameters": "bf16", "master_weights": True, "context": 40},
    {"precision": "bf16", "attention": "sdpa_flash", "checkpointing": True},
    {"attention": "tiled", "key_heads": 2, "vocabulary": 200},
    {"attention": "tiled", "vocabulary": 50, "context": 128},
    {"attention": "sdpa_flash", "window": 8, "vocabulary": 200, "context": 600, "batch": 1},
    {"vocabulary": 100, "context": 300, "batch": 2, "checkpointing": True},
    {"mode": "forward", "precision": "bf16"},
    {"mode": "forward_backward", "key_heads": 2},
    {"optimizer": "torch_adamw", "context": 24, "batch": 1},
    {"fused_loss": True, "precision": "bf16"},
    {
        "fused_loss": True,
        "precision": "bf16",
        "parameters": "bf16",
        "mode": "forward_backward",
        "vocabulary": 9000,
        "context": 2,
    },
]


@pytest.mark.parametrize("fields", MEASURED, ids=str)
def test_the_peak_is_that_of_torchs_allocations(fields: dict[str, Any]) -> None:
    """Within 10 % for the step, and for each of its phases."""
    torch = pytest.importorskip("torch")
    from tests.workers.model.measured_peaks import Case, measured_on_cpu, phases_of

    shape = {"d_model": 48, "num_layers": 3, "num_heads": 4, "d_ff": 112}
    case = Case(**{"sizes": shape, "vocabulary": 1500, "context": 96, "batch": 3, **fields})
    found, peaks = case.estimated(on_gpu=False), measured_on_cpu(case, torch.device("cpu"))
    assert peak(found).total == pytest.approx(max(peaks.values()), rel=0.1)
    for phase, measured_bytes in peaks.items():
        assert phases_of(found)[phase] == pytest.approx(measured_bytes, rel=0.15), phase


ON_A_GPU = [
    {"attention": "eager"},
    {"attention": "triton", "precision": "bf16", "checkpointing": True},
    {"vocabulary": 151_936, "precision": "bf16", "parameters": "bf16", "attention": "triton", "fused_loss": True},
    {"precision": "bf16", "parameters": "bf16", "master_weights": True, "optimizer": "triton_adamw"},
    {"context": 2048, "precision": "bf16", "attention": "sdpa_cudnn", "key_heads": 4},
    {"context": 2048, "precision": "fp16", "key_heads": 4},
    {"mode": "forward", "precision": "bf16", "batch": 8},
    {"optimizer": "torch_fused_adamw", "batch": 1, "context": 128},
]


@pytest.mark.gpu
@pytest.mark.parametrize("fields", ON_A_GPU, ids=str)
def test_the_peak_is_that_of_torchs_allocator_on_a_gpu(fields: dict[str, Any]) -> None:
    """Within 10 %: the allocator rounds."""
    import torch

    from tests.workers.model.measured_peaks import Case, measured_on_gpu

    shape = {"d_model": 768, "num_layers": 12, "num_heads": 12, "d_ff": 3072}
    case = Case(**{"sizes": shape, "vocabulary": 50_257, "context": 512, "batch": 4, **fields})
    peaks = measured_on_gpu(case, torch.device("cuda", 0))
    assert peak(case.estimated(on_gpu=True)).total == pytest.approx(max(peaks.values()), rel=0.1)


def test_a_vocabulary_of_50_257_takes_four_tensors_of_logits() -> None:
    """What kind `memory` measures is 974 MiB: the logits, and three tensors like them in the loss's backward pass."""
    tiny = Shape(50_257, d_model=128, num_layers=2, num_heads=4, d_ff=512)
    highest = peak(moments(tiny, StepMemory(4, 256, on_gpu=False)))
    assert highest.name == "backward: output layer and loss"
    assert highest.total / MIB == pytest.approx(974, rel=0.005)
    logits = [key for key in highest.held if key[2].axes == ("B", "T", "V")]
    assert sum(highest.bytes_of(key) for key in logits) == 4 * 4 * 4 * 256 * 50_257


@pytest.mark.parametrize("attention", ["eager", "fused", "sdpa_flash"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_what_is_saved_is_what_accounting_lists(attention: Any, precision: Any, on_gpu: bool) -> None:
    """At the end of the forward pass; but for what the loss still holds, which both count."""
    step = StepMemory(3, 64, precision, "fp32", attention, on_gpu=on_gpu)
    play = Play(SHAPE, step)
    loss = play.forward()
    play.tape.moment("now")
    spare = play.take("spare", play.ids.key[2])
    del spare
    (now,) = [moment for moment in play.tape.finish() if moment.name == "now"]
    saved = (
        now.part("activations") + now.part("weight copies") - now.bytes_of(("activations", "spare", play.ids.key[2]))
    )
    of_loss = 2 * 4 * 3 * 64
    listed = accounting.activations(SHAPE, step)
    listed += int(evaluate(accounting.weight_copies_formula(SHAPE, step), SHAPE.symbols))
    assert saved - of_loss == pytest.approx(listed, rel=0.01)
    assert loss.source is not None


def test_a_deep_model_follows_from_two_shallow_ones() -> None:
    sharings = (
        Sharing(),
        Sharing(parameters=3),
        Sharing(optimizer=2),
        Sharing(parameters=4, gathered_in_16_bits=False, activations=Fraction(1, 3)),
    )
    for sharing, vocabulary, checkpointing, mode, (precision, parameters) in itertools.product(
        sharings, (50, 5000), (False, True), ("forward", "train_step"), (("fp32", "fp32"), ("bf16", "fp32"))
    ):
        shape = Shape(vocabulary, d_model=64, num_layers=11, num_heads=4, d_ff=160)
        step = StepMemory(3, 96, precision, parameters, "eager", checkpointing)  # type: ignore[arg-type]
        played = Play(shape, step, Choices(mode, "torch_adamw"), sharing).run()
        found = moments(shape, step, Choices(mode, "torch_adamw"), sharing)
        assert [(one.name, one.total) for one in found] == [(one.name, one.total) for one in played]
        assert [sum(one.part(part) for part in PARTS) for one in found] == [one.total for one in played]


RECORDED: list[tuple[float, str, int, int, str, str, Choices, Sharing]] = [
    (13.23, "2.7b", 4, 512, "fp32", "eager", Choices("forward"), Sharing()),
    (19.32, "2.7b", 4, 512, "bf16", "eager", Choices("forward"), Sharing()),
    (58.94, "2.7b", 4, 512, "fp32", "eager", Choices(), Sharing()),
    (61.23, "2.7b", 4, 512, "bf16", "eager", Choices(), Sharing()),
    (88.60, "large", 48, 512, "bf16", "triton", Choices(optimizer="torch_fused_adamw"), Sharing()),
    (85.09, "large", 48, 512, "bf16", "triton", Choices(optimizer="torch_fused_adamw"), Sharing(optimizer=2)),
    (33.1, "xl", 2, 512, "fp32", "eager", Choices(optimizer="torch_fused_adamw"), Sharing()),
    (21.8, "xl", 2, 512, "fp32", "eager", Choices(optimizer="torch_fused_adamw"), Sharing(parameters=2)),
]
"""Peaks on GPUs in GiB: docs/measurements.md, "Where the memory goes", "Data parallelism", "Dividing the optimizer's
state"."""


@pytest.mark.parametrize("row", RECORDED, ids=str)
def test_peaks_are_those_that_were_measured_on_gpus(row: tuple[Any, ...]) -> None:
    presets = pytest.importorskip("app.presets")
    gib, size, batch, context, precision, attention, choices, sharing = row
    shape = Shape(10_000, **presets.MODEL_SIZES[size])
    found = moments(shape, StepMemory(batch, context, precision, "fp32", attention), choices, sharing)
    assert peak(found).total / 2**30 == pytest.approx(gib, rel=0.03)


def test_the_chunks_are_those_of_the_loss() -> None:
    pytest.importorskip("torch")
    from kernels import chunked_cross_entropy as loss
    from workers.model import step_memory

    assert (step_memory.CHUNK_BYTES, step_memory.MIN_CHUNK_ROWS) == (loss.CHUNK_BYTES, loss.MIN_CHUNK_ROWS)
