import pytest
import torch
from torch import nn

from workers.model.batches import RandomBatches
from workers.model.loss import cross_entropy
from workers.model.schedule import cosine_learning_rate


def test_cross_entropy_and_its_gradient_equal_torchs() -> None:
    logits = torch.randn(2, 5, 11, dtype=torch.float64, requires_grad=True)
    same = logits.detach().clone().requires_grad_()
    targets = torch.randint(11, (2, 5))
    mine, theirs = cross_entropy(logits, targets), nn.functional.cross_entropy(same.flatten(0, 1), targets.flatten())
    mine.backward()
    theirs.backward()
    torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(logits.grad, same.grad)


def test_cross_entropy_is_stable_and_at_least_float32() -> None:
    logits = torch.tensor([[1e5, -1e5, 0.0]])
    assert cross_entropy(logits, torch.tensor([0])).item() == 0
    assert cross_entropy(logits, torch.tensor([1])).item() == pytest.approx(2e5)
    assert cross_entropy(logits.bfloat16(), torch.tensor([2])).dtype == torch.float32


@pytest.mark.parametrize(
    ("returned", "named"),
    [
        ({"logits": torch.ones(2, 5, 11)}, "dict"),
        ((torch.ones(2, 5, 11), None), "tuple"),
        (torch.ones(()), r"torch.float32 \(\)"),
        (torch.ones(10, 11), r"torch.float32 \(10, 11\)"),
        (torch.ones(2, 6, 11), r"torch.float32 \(2, 6, 11\)"),  # whose first five rows gather would take
        (torch.ones(2, 5, 11).long(), "torch.int64"),
    ],
)
def test_what_is_no_logits_is_named_with_the_cure(returned: object, named: str) -> None:
    with pytest.raises(ValueError, match=rf"returns {named}.* for tokens \(2, 5\): let forward return logits alone"):
        cross_entropy(returned, torch.zeros(2, 5, dtype=torch.long))


def test_the_schedule_rises_falls_and_stays() -> None:
    def at(step: int) -> float:
        return cosine_learning_rate(
            step, max_learning_rate=1.0, min_learning_rate=0.1, warmup_steps=10, cosine_steps=30
        )

    assert [at(step) for step in (0, 5, 10)] == pytest.approx([0, 0.5, 1.0])
    assert at(15) == pytest.approx(0.1 + 0.45 * (1 + 2**-0.5))  # a quarter: cos(pi/4)
    assert at(20) == pytest.approx(0.55)
    assert [at(step) for step in (30, 31, 1000)] == pytest.approx([0.1] * 3)
    assert all(at(step) > at(step + 1) for step in range(10, 30))


def test_batches_are_shifted_and_repeatable() -> None:
    def make(seed: int) -> RandomBatches:
        return RandomBatches(50, 4, 100, torch.device("cpu"), seed)

    batches = make(1)
    inputs, targets = batches.next()
    assert inputs.shape == targets.shape == (4, 100)
    assert inputs.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert {inputs.min().item(), inputs.max().item()} == {0, 49}
    again = batches.next()[0]
    assert not torch.equal(again, inputs)
    repeated = make(1)
    assert torch.equal(repeated.next()[0], inputs)
    assert torch.equal(repeated.next()[0], again)
    assert not torch.equal(make(2).next()[0], inputs)
