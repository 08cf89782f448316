"""Linear layers in FP8: which are chosen, and that they compute what bf16 computes, by torchao's emulation."""

import sys

import pytest
import torch
from torch import nn

from app.specs import _training
from workers.model import TransformerLM
from workers.model.float8 import FP8_MULTIPLE, RECIPES, NoFloat8, convert, float8, fp8_flops, grouped, linear_layers


def model(d_model: int = 32, d_ff: int = 64, vocab_size: int = 48) -> TransformerLM:
    torch.manual_seed(0)
    return TransformerLM(vocab_size, 16, d_model, 2, 2, d_ff)


def chosen(patterns: list[str], rows: int = 32, recipe: str = "tensorwise", **sizes: int) -> set[str]:
    return {grouped(one.name) for one in linear_layers(model(**sizes), rows, recipe, patterns) if one.in_fp8}


def test_patterns_choose_layers_by_name() -> None:
    every = {f"layers.*.attn.{name}_proj" for name in ("q", "k", "v", "output")}
    every |= {f"layers.*.ffn.w{number}" for number in (1, 2, 3)}
    assert chosen(["all"]) == {*every, "lm_head"}
    assert chosen(["layers.*.ffn.*"]) == {one for one in every if ".ffn." in one}
    assert chosen(["layers.0.*", "lm_head"]) == every | {"lm_head"}
    names = [one.name for one in linear_layers(model(), 32, "tensorwise", ["layers.0.*"]) if one.in_fp8]
    assert names
    assert all(name.startswith("layers.0.") for name in names)


def test_auto_takes_only_products_with_many_operations_for_each_number_and_only_in_blocks() -> None:
    with torch.device("meta"):
        large = TransformerLM(4096 * 16, 16, 4096, 1, 2, 16384)
    found = {one.name: one for one in linear_layers(large, 65_536, "tensorwise", ["auto"])}
    assert found["layers.0.ffn.w1"].in_fp8
    assert not found["lm_head"].in_fp8
    assert found["lm_head"].why == "outside the blocks"
    assert chosen(["auto"]) == set()
    few = linear_layers(large, 256, "tensorwise", ["auto"])
    assert not any(one.in_fp8 for one in few), "few tokens, so each weight is cast for few operations"


@pytest.mark.parametrize(("sizes", "layer"), [({"d_ff": 72}, "layers.0.ffn.w1"), ({"vocab_size": 50}, "lm_head")])
def test_a_size_that_is_no_multiple_of_16_is_refused_with_the_layer(sizes: dict[str, int], layer: str) -> None:
    (size,) = sizes.values()
    with pytest.raises(NoFloat8, match=rf"'{layer}' maps 32 features to {size}, .*multiples of 16"):
        chosen(["all"], **sizes)
    other = "lm_head" if layer != "lm_head" else "layers.*"
    assert chosen([other], **sizes), "a layer that is left out may have any size"


def test_submissions_refuse_by_the_same_number() -> None:
    """The model imports nothing of the service, so each has a constant of its own."""
    assert _training.FP8_MULTIPLE == FP8_MULTIPLE


def test_a_pattern_without_a_layer_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(NoFloat8, match=r"like 'block\.\*'; there are layers\.\*\.attn\.q_proj"):
        chosen(["block.*"])


def test_an_output_layer_that_computes_the_loss_stays_as_it_is() -> None:
    layers = linear_layers(model(), 32, "tensorwise", ["all"], model_has_loss=True)
    assert "lm_head" not in {one.name for one in layers}
    with pytest.raises(NoFloat8, match="the output layer computes the loss, too, and stays as it is"):
        linear_layers(model(), 32, "tensorwise", ["lm_head"], model_has_loss=True)


def test_gradients_of_weights_count_only_where_they_are_in_8_bits() -> None:
    layers = linear_layers(model(), 32, "tensorwise", ["layers.0.ffn.w1"])
    one = 2 * 32 * 32 * 64
    assert [fp8_flops(layers, name, backward=True) for name in RECIPES] == [3 * one, 3 * one, 2 * one]
    assert fp8_flops(layers, "tensorwise", backward=False) == one


def test_without_torchao_the_error_has_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(NoFloat8, match=r'pip install "flopwatch\[fp8\]"'):
        float8()


@pytest.mark.parametrize("recipe", RECIPES)
def test_emulated_layers_compute_what_bf16_computes_within_8_bits(recipe: str) -> None:
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(64, 128, bias=False), nn.SiLU(), nn.Linear(128, 64, bias=False))
    parameters = list(layer.parameters())
    x = torch.randn(4, 16, 64)

    def results() -> list[torch.Tensor]:
        layer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = layer(x)
        out.float().square().mean().backward()
        return [out.detach().float(), *(one.grad.clone() for one in parameters if one.grad is not None)]

    plain = results()
    convert(layer, linear_layers(layer, 64, recipe, ["all"]), recipe, emulate=True)
    assert [id(one) for one in layer.parameters()] == [id(one) for one in parameters]
    errors = [((a - b).norm() / b.norm()).item() for a, b in zip(results(), plain, strict=True)]
    # e4m3 has 3 bits of mantissa: a relative rounding error of at most 2^-4, on average half of that.
    assert all(0.01 < error < 0.1 for error in errors), errors
