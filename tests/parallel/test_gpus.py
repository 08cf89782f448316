"""One GPU, and all of a host, over NCCL: the wrappers compute the same, and communication runs beside computation."""

from pathlib import Path

import pytest

from tests.parallel import guards, outputs, passes, sharding, steps, training
from tests.parallel.pool import Pool
from tests.parallel.test_data_parallel import WRAPPERS

pytestmark = [pytest.mark.gpu, pytest.mark.alone]


def branches_of(gpus: Pool) -> dict[int, list[int]]:
    """Each rank's branches: not the same ones, nor in the same order."""
    return {rank: [1, 0, 2] if rank % 2 else [0, 1] for rank in range(gpus.world_size)}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_data_parallel(gpus: Pool, wrapper: str) -> None:
    gpus(training.parity, wrapper)
    gpus(training.accumulation, wrapper)
    gpus(training.branches, wrapper, branches_of(gpus))
    gpus(training.no_gradient_at_all, wrapper)


@pytest.mark.parametrize("wrapper", ["flat", "bucketed", "fully sharded"])
def test_a_cuda_graph_holds_a_step(one_gpu: Pool, wrapper: str) -> None:
    for count in (1, 2):
        one_gpu(steps.gradients_of_a_graph, wrapper, count)


@pytest.mark.parametrize("kind", ["AdamW", "AdamW, fused", "SGD"])
def test_sharded_optimizer(gpus: Pool, kind: str) -> None:
    gpus(training.optimizer_parity, kind)


def test_sharded_optimizers_state(gpus: Pool) -> None:
    gpus(training.optimizer_groups)
    gpus(training.optimizer_state, 0)
    gpus(training.optimizer_state, 1)
    gpus(training.optimizer_alone_in_memory)


@pytest.mark.parametrize("checkpoint", ["", "outside non-reentrant", "inside reentrant"])
def test_fully_sharded(gpus: Pool, checkpoint: str) -> None:
    gpus(training.fully_sharded_parity, checkpoint)


def test_fully_sharded_in_every_kind_of_pass(gpus: Pool) -> None:
    assert gpus(passes.some, None) == [[]] * gpus.world_size
    assert gpus(passes.experts) == [[]] * gpus.world_size
    assert gpus(outputs.returned) == [{}] * gpus.world_size
    assert gpus(outputs.used_later, None) == [[]] * gpus.world_size


def test_fully_sharded_otherwise(gpus: Pool) -> None:
    gpus(training.fully_sharded_parity, "", 2)
    gpus(training.branches, "fully sharded", branches_of(gpus))
    for report in gpus(training.fully_sharded_compute_dtype):
        assert report["computed"] == ["torch.bfloat16"]
        for ours, theirs in report["losses"]:
            assert ours == pytest.approx(theirs, rel=0.03)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("how", ["ours", "torch's"])
def test_clipping(gpus: Pool, how: str, norm_type: float) -> None:
    norms = gpus(guards.clipped, how, norm_type)
    assert norms == [norms[0]] * gpus.world_size


@pytest.mark.parametrize("kind", ["fully sharded", "sharded optimizer"])
def test_scaled_losses(gpus: Pool, kind: str) -> None:
    for optimizer in ("SGD", "AdamW, fused"):
        for scales in gpus(training.scaled, kind, optimizer):
            assert scales == [64.0, 32.0, 32.0, 32.0]


@pytest.mark.parametrize("kind", ["fully sharded", "sharded optimizer", "bucketed"])
def test_going_on_from_a_file(gpus: Pool, tmp_path: Path, kind: str) -> None:
    for optimizer in ("AdamW, fused", "SGD"):
        gpus(training.resumed_exactly, kind, optimizer, str(tmp_path / optimizer))
        gpus(training.load_and_go_on, kind, optimizer, str(tmp_path / optimizer))


def test_saving_gathers_one_tensor_at_a_time(gpus: Pool) -> None:
    for rank, report in enumerate(gpus(training.peak_of_saving, 1024)):
        assert 1 <= report["peak"] < 2.5
        assert report["kept"] == pytest.approx(0 if rank else 12, rel=0.01)


@pytest.mark.parametrize("passes", ["1", "0 1 finished"])
def test_accumulating_without_sending(gpus: Pool, passes: str) -> None:
    gpus(training.fully_sharded_parity, "", 3, passes)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_parameters_used_outside_their_modules(gpus: Pool, checkpoint: bool) -> None:
    for report in gpus(training.fully_sharded_used_outside, True, checkpoint):
        assert "embedding.weight" in report["root"]


@pytest.mark.parametrize("compute", [None, "bfloat16", "float16"])
def test_training_beside_torchs(gpus: Pool, compute: str | None) -> None:
    for difference in gpus(sharding.beside_torchs, compute, None, True):
        if compute is None:
            assert max(difference.values()) < 1e-5
        assert difference["ours and alone"] < 2 * difference["torch's and alone"] + 1e-4


def test_fully_shardeds_options(gpus: Pool) -> None:
    gpus(sharding.not_resharded, "inside non-reentrant")
    for sent in gpus(sharding.bytes_of_a_step):
        assert sent["gathered once"] == pytest.approx(2 * sent["P"])
        assert sent["fully sharded"] == pytest.approx(3 * sent["P"])
    for error in gpus(sharding.accumulated):
        assert error["float32 2"] < 1e-6 < 1e-4 < error["bfloat16 2"]
    for report in (*gpus(sharding.from_meta, None), *gpus(sharding.from_meta, "bfloat16")):
        assert report["existing"] < 0.9 * report["all"]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_gradients_may_travel_in_bfloat16(gpus: Pool, wrapper: str) -> None:
    for report in gpus(training.reduced_in_bfloat16, wrapper):
        assert report["sent"]["torch.bfloat16"] < 0.6 * report["sent"]["None"]
        assert report["errors"]["torch.bfloat16"] < 2**-6


@pytest.mark.parametrize("wrapper", ["bucketed", "fully sharded"])
def test_a_step_can_be_recorded(gpus: Pool, wrapper: str) -> None:
    for report in gpus(steps.timeline, wrapper):
        intervals = report["intervals"]
        assert report["after"] == len(intervals) > 3
        assert all(0 <= start <= end for _, _, start, end in intervals)
        ends = [end for *_, end in intervals]
        assert ends == sorted(ends)


def test_memory_beyond_the_gradients(gpus: Pool) -> None:
    """Buckets add one or two layers' gradients (of eight) for a moment; sharding halves parameters and gradients."""
    for peak_bytes in gpus(steps.peaks):
        parameters = peak_bytes["parameters"]
        assert peak_bytes["alone"] == pytest.approx(2 * parameters, rel=0.1)
        assert peak_bytes["bucketed"] < 2.4 * parameters
        assert peak_bytes["fully sharded"] < 1.75 * parameters
