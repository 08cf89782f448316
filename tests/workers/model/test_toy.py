"""The toy and its batches."""

import torch
from torch import nn

from workers.model.toy import CLASSES, HIDDEN_FEATURES, IN_FEATURES, ToyBatches, ToyModel


def test_it_is_linear_relu_layer_norm_linear() -> None:
    torch.manual_seed(0)
    model = ToyModel()
    x = torch.randn(3, IN_FEATURES)
    hidden = torch.relu(x @ model.fc1.weight.T)
    normed = nn.functional.layer_norm(hidden, (HIDDEN_FEATURES,))
    torch.testing.assert_close(model(x), normed @ model.fc2.weight.T)
    assert [type(module).__name__ for module in model.children()] == ["Linear", "ReLU", "LayerNorm", "Linear"]


def test_batches_are_equal_for_equal_seeds() -> None:
    one, same, other = (ToyBatches(5, torch.device("cpu"), seed) for seed in (1, 1, 2))
    (features, classes), (same_features, same_classes) = one.next(), same.next()
    assert (features.shape, classes.shape) == ((5, IN_FEATURES), (5,))
    assert 0 <= int(classes.min()) <= int(classes.max()) < CLASSES
    assert torch.equal(features, same_features)
    assert torch.equal(classes, same_classes)
    assert not torch.equal(features, other.next()[0])
    assert not torch.equal(features, one.next()[0])
