"""The toy and its batches."""

import torch
from torch import nn

from workers.model.toy import HIDDEN_FEATURES, IN_FEATURES, ToyModel


def test_it_is_linear_relu_layer_norm_linear() -> None:
    torch.manual_seed(0)
    model = ToyModel()
    x = torch.randn(3, IN_FEATURES)
    hidden = torch.relu(x @ model.fc1.weight.T)
    normed = nn.functional.layer_norm(hidden, (HIDDEN_FEATURES,))
    torch.testing.assert_close(model(x), normed @ model.fc2.weight.T)
    assert [type(module).__name__ for module in model.children()] == ["Linear", "ReLU", "LayerNorm", "Linear"]
