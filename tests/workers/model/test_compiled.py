import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workers.measure.compilation import compilation
from workers.model import TransformerLM
from workers.model.compiled import NoBlocks, compile_blocks
from workers.model.loss import cross_entropy


@pytest.fixture
def fresh_compiler(fresh_compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use only the first half of the compiler: all of it would take too long in every run of the tests."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))


def model(num_layers: int = 3, **options: Any) -> TransformerLM:
    torch.manual_seed(0)
    return TransformerLM(61, 24, d_model=16, num_layers=num_layers, num_heads=2, d_ff=24, **options)


def ids(length: int = 12) -> Tensor:
    return torch.randint(61, (2, length), generator=torch.Generator().manual_seed(1))


def gradients(call: object, module: nn.Module) -> list[Tensor]:
    cross_entropy(call(ids()), ids()).backward()
    collected = [parameter.grad for parameter in module.parameters()]
    assert None not in collected
    return collected  # type: ignore[return-value]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_blocks_are_compiled_once_for_all_of_them(fresh_compiler: None, checkpointing: bool) -> None:
    eager, blocks = (model(activation_checkpointing=checkpointing) for _ in range(2))
    expected = gradients(eager, eager)
    assert compile_blocks(blocks) is blocks
    for mine, theirs in zip(gradients(blocks, blocks), expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert compilation().graphs == 1
    assert (compilation().graph_breaks, compilation().frames_not_compiled) == (0, 0)


def test_compiled_blocks_checkpoint_selectively(fresh_compiler: None) -> None:
    """One graph for each form of a block, and one for the loss; hooks stay in Python."""
    eager = model()
    blocks = model(activation_checkpointing=True, checkpoint_scope="selective", checkpoint_layers=1)
    cross_entropy(eager(ids()), ids()).backward()
    called: list[bool] = []
    for block in blocks.layers:
        block.register_forward_hook(lambda *_: called.append(torch.compiler.is_compiling()))
    compile_blocks(blocks, inside_hooks=True)
    blocks(ids(), targets=ids()).backward()
    for mine, theirs in zip(blocks.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    assert called == [False] * 3
    assert (compilation().graphs, compilation().graph_breaks, compilation().frames_not_compiled) == (3, 0, 0)


def test_compiled_blocks_generate_what_eager_ones_do(fresh_compiler: None) -> None:
    """One graph for the prompt, and one or two for single tokens, whatever the number of layers."""
    expected = model(num_layers=5).generate(ids(), 8, temperature=0)
    blocks = compile_blocks(model(num_layers=5))
    assert torch.equal(blocks.generate(ids(), 8, temperature=0), expected)
    assert compilation().graphs <= 3
    assert compilation().frames_not_compiled == 0


@pytest.mark.parametrize("layers", [None, [nn.Linear(2, 2)], nn.ModuleList()])
def test_a_model_without_blocks_says_what_it_lacks(layers: object) -> None:
    module = nn.Linear(2, 2)
    module.layers = layers
    with pytest.raises(NoBlocks, match=r"Linear has no blocks .* as 'layers', a torch.nn.ModuleList"):
        compile_blocks(module)
