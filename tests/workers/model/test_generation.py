import pytest
import torch
from torch import Tensor

from workers.model import TransformerLM
from workers.model.generation import sample


def make_model(num_heads: int = 2, **options: int) -> TransformerLM:
    torch.manual_seed(0)
    return TransformerLM(61, 24, d_model=16, num_layers=2, num_heads=num_heads, d_ff=24, **options).double()


@pytest.fixture
def model() -> TransformerLM:
    return make_model()


@pytest.fixture
def prompt() -> Tensor:
    return torch.randint(61, (3, 7), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"num_heads": 4, "num_kv_heads": 2}, {"window": 5}], ids=str)
def test_logits_with_a_cache_equal_those_without(options: dict[str, int], prompt: Tensor) -> None:
    model = make_model(**options)
    whole = torch.cat((prompt, prompt, prompt), dim=1)
    expected = model(whole)
    cache = model.new_cache(3, 21)
    assert cache.keys.shape == (2, 3, 2, 21, model.shape.head_dim)
    parts = [model(whole[:, :7], cache=cache)]
    parts += [model(whole[:, position : position + 1], cache=cache) for position in range(7, 21)]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=1e-9, atol=1e-9)
    assert cache.length == 21


def test_greedy_generation_needs_no_cache(model: TransformerLM, prompt: Tensor) -> None:
    cached = model.generate(prompt, 15, temperature=0)
    assert cached.shape == (3, 22)
    assert torch.equal(cached[:, :7], prompt)
    assert torch.equal(cached, model.generate(prompt, 15, temperature=0, use_cache=False))
    for position in range(7, 22):
        assert torch.equal(cached[:, position], model(cached[:, :position])[:, -1].argmax(-1))


def test_a_prompt_without_a_batch_axis(model: TransformerLM, prompt: Tensor) -> None:
    alone = model.generate(prompt[0], 5, temperature=0)
    assert torch.equal(alone, model.generate(prompt[:1], 5, temperature=0)[0])


def test_generation_keeps_no_gradients(model: TransformerLM, prompt: Tensor) -> None:
    model.generate(prompt, 2)
    assert not model.new_cache(1, 2).keys.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())


def test_bounds_are_checked(model: TransformerLM, prompt: Tensor) -> None:
    with pytest.raises(ValueError, match=r"7 \+ 18 tokens exceed the context length \(24\)"):
        model.generate(prompt, 18)
    with pytest.raises(ValueError, match="prompt is empty"):
        model.generate(prompt[:, :0], 1)
    assert torch.equal(model.generate(prompt, 0), prompt)
    cache = model.new_cache(3, 24)
    model(prompt, cache=cache)
    with pytest.raises(ValueError, match="one token at a time"):
        model(prompt[:, :2], cache=cache)


def test_sample_follows_the_softmax_of_tempered_logits() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    drawn = sample(logits.expand(40_000, 4), temperature=0.5, generator=torch.Generator().manual_seed(3))
    frequencies = torch.bincount(drawn.flatten(), minlength=4) / 40_000
    torch.testing.assert_close(frequencies, torch.softmax(logits / 0.5, dim=0), rtol=0, atol=0.01)


def test_top_k_leaves_the_others_out() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0, 2.0]).expand(2000, 4)
    generator = torch.Generator().manual_seed(4)
    assert set(sample(logits, top_k=2, generator=generator).flatten().tolist()) == {1, 3}
    assert set(sample(logits, top_k=1, generator=generator).flatten().tolist()) == {1}
    assert set(sample(logits, top_k=99, generator=generator).flatten().tolist()) == {0, 1, 2, 3}
    assert sample(logits, temperature=0).unique().tolist() == [1]


@pytest.mark.parametrize("options", [{"temperature": -1.0}, {"top_k": 0}])
def test_sample_refuses_what_makes_no_sense(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be at least"):
        sample(torch.zeros(1, 4), **options)
