import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from workers.model import TransformerLM
from workers.model.loss import cross_entropy
from workers.model.transformer import RMSNorm, SwiGLU, rotary_angles, rotate


def small_model(**options) -> TransformerLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "context_length": 32, "d_model": 16, "num_layers": 3, "num_heads": 2, "d_ff": 24}
    return TransformerLM(**{**sizes, **options}).double()


def tokens(batch: int = 2, length: int = 12) -> Tensor:
    return torch.randint(61, (batch, length), generator=torch.Generator().manual_seed(1))


def test_rms_norm_scales_to_unit_root_mean_square() -> None:
    norm = RMSNorm(8, eps=0).double()
    out = norm(torch.randn(5, 8, dtype=torch.float64) * 100)
    torch.testing.assert_close(out.square().mean(-1), torch.ones(5, dtype=torch.float64))
    assert norm(torch.randn(2, 8).bfloat16()).dtype == torch.bfloat16


def test_swiglu_is_gated_silu() -> None:
    ffn, x = SwiGLU(4, 6), torch.randn(3, 4)
    gate = x @ ffn.w1.weight.T
    expected = (gate * torch.sigmoid(gate) * (x @ ffn.w3.weight.T)) @ ffn.w2.weight.T
    torch.testing.assert_close(ffn(x), expected)


def test_rotation_of_a_pair_is_by_position_times_frequency() -> None:
    cos, sin = rotary_angles(10, 4, 100.0)
    pair = torch.complex(torch.tensor(1.0), torch.tensor(2.0))
    turned = pair * torch.exp(1j * torch.arange(10)[:, None] * torch.tensor([1.0, 0.1]))  # 100^(-2i/4)
    x = torch.tensor([1.0, 2.0, 1.0, 2.0]).expand(10, 4)
    torch.testing.assert_close(rotate(x, cos, sin), torch.view_as_real(turned).flatten(1))


# torch 2.14 says that the hooks, which the test counts by, do not see what the checkpoints keep.
@pytest.mark.filterwarnings("ignore:A saved_tensors_hooks context:FutureWarning")
@pytest.mark.parametrize(("layers", "in_feed_forward"), [(0, 0), (2, 2), (None, 3)])
def test_selective_checkpointing_recomputes_chosen_products(layers: int | None, in_feed_forward: int) -> None:
    """It also saves less, apart from the products that the checkpoints keep."""
    options = {"activation_checkpointing": True, "checkpoint_scope": "selective", "checkpoint_layers": layers}
    plain, checkpointed = small_model(), small_model(**options)
    flops, kept = [], []
    for model in (plain, checkpointed):
        saved: list[int] = []
        with FlopCounterMode(display=False) as counter:
            with torch.autograd.graph.saved_tensors_hooks(lambda x, to=saved: to.append(x.numel()) or x, lambda x: x):
                loss = model(tokens()).square().mean()
            loss.backward()
        flops.append(counter.get_total_flops())
        kept.append(sum(saved))
    assert flops[1] - flops[0] == in_feed_forward * 2 * (2 * 24 * 16 * 24)
    assert kept[1] < kept[0] / 2
    for one, other in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "recomputed"),
    [
        ({}, [2, 1, 0]),
        ({"checkpoint_layers": 2}, [1, 0]),
        ({"checkpoint_blocks": 2}, [2, 0, 1]),
        ({"checkpoint_blocks": 3}, [0, 1, 2]),
        ({"checkpoint_blocks": 9, "checkpoint_layers": 2}, [0, 1]),
    ],
)
def test_blocks_are_recomputed_as_a_whole(options: dict[str, int], recomputed: list[int]) -> None:
    plain, model = small_model(), small_model(activation_checkpointing=True, **options)
    calls: list[int] = []
    for index, block in enumerate(model.layers):
        block.register_forward_pre_hook(lambda *_, index=index: calls.append(index))
    for one in (plain, model):
        one(tokens()).square().sum().backward()
    assert calls == [0, 1, 2, *recomputed]
    with torch.no_grad():
        model(tokens())
    assert calls[3 + len(recomputed) :] == [0, 1, 2], "without gradients there is nothing to recompute"
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=0, atol=0)


def test_with_targets_the_model_computes_its_loss() -> None:
    one, other = small_model(), small_model()
    targets = tokens().flip(0)
    values = [cross_entropy(one(tokens()), targets), other(tokens(), targets=targets)]
    torch.testing.assert_close(*values)
    for value in values:
        value.backward()
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_shared_key_heads_are_those_of_torchs_attention(num_kv_heads: int) -> None:
    def torchs(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        assert k.shape == v.shape == (2, num_kv_heads, 12, 4)
        return scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)

    model, theirs = (
        small_model(num_heads=4, num_kv_heads=num_kv_heads, **options) for options in ({}, {"attention": torchs})
    )
    torch.testing.assert_close(model(tokens()), theirs(tokens()))


def test_packed_documents_are_those_computed_alone() -> None:
    packed, alone = small_model(document_lengths=(5, 7)), small_model()
    alone.load_state_dict(packed.state_dict())
    ids = tokens()
    torch.testing.assert_close(packed(ids), torch.cat((alone(ids[:, :5]), alone(ids[:, 5:])), dim=1))
    with pytest.raises(ValueError, match="packed documents cannot be continued"):
        packed.new_cache(1, 4)
    for length in (11, 13):
        with pytest.raises(ValueError, match=f"documents of 12 tokens do not fill sequences of {length}"):
            packed(tokens(length=length))


def test_more_tokens_than_the_context_length_are_refused() -> None:
    with pytest.raises(ValueError, match=r"33 tokens are more than the context length \(32\)"):
        small_model()(tokens(1, 33))


def test_a_token_sees_its_window_and_document_only() -> None:
    ids = tokens(1, 12)
    changed = ids.clone()
    changed[:, 4] = (ids[:, 4] + 1) % 61
    for options, seen in (({"window": 3}, range(4, 7)), ({"document_lengths": (2, 6, 0, 4)}, range(4, 8))):
        model = small_model(num_layers=1, **options)
        differs = (model(ids) != model(changed)).any(-1).squeeze(0)
        assert differs.nonzero().flatten().tolist() == list(seen)


def test_checkpointing_under_gradients_still_fills_the_cache() -> None:
    """A regression: the cache's length advanced without new keys, so later tokens read unwritten ones."""
    model, ids = small_model(activation_checkpointing=True), tokens(2, 7)
    expected = model(ids)
    cache = model.new_cache(2, 7)
    cache.keys.fill_(float("nan"))
    cache.values.fill_(float("nan"))
    assert torch.is_grad_enabled()
    first = model(ids[:, :6], cache=cache)
    last = model(ids[:, 6:], cache=cache)
    assert cache.length == 7
    torch.testing.assert_close(torch.cat((first, last), dim=1), expected, rtol=1e-9, atol=1e-9)
