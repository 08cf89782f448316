"""TransformerLM: a decoder-only language model in plain PyTorch.

Pre-norm blocks (Xiong et al., 2020) with RMSNorm (Zhang & Sennrich, 2019), rotary position embeddings (Su et al., 2021)
and SwiGLU (Shazeer, 2020); no biases; input and output embeddings are separate. Every operation is written out in plain
PyTorch, so that a profile shows where the time goes.
"""

import functools
from collections.abc import Collection, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import kernels
from kernels.attention.reference import attention as reference_attention
from kernels.chunked_cross_entropy import linear_cross_entropy, softmax_gradient
from kernels.operations import rotary_angles, rotate
from kernels.registry import AttentionFunction
from workers.model import accounting, generation
from workers.model.generation import KeyValueCache, LayerCache

FUSED = ("linear_cross_entropy", "rms_norm", "rope")
"""What a Triton kernel of `kernels` may compute instead of PyTorch's operations."""


class Linear(nn.Linear):
    """x Wᵀ without a bias, Glorot-normal weights."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        nn.init.xavier_normal_(self.weight)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis, computed in float32 at least.

    Fused, under autocast the result is of autocast's dtype, since it is the input of matrix products.
    """

    def __init__(self, d_model: int, eps: float = 1e-5, *, fused: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_model))
        self.eps = eps
        self.kernel = kernels.rms_norm if fused else None

    def forward(self, x: Tensor) -> Tensor:
        if self.kernel is not None:
            cast = torch.is_autocast_enabled(x.device.type)
            dtype = torch.get_autocast_dtype(x.device.type) if cast else x.dtype
            return self.kernel(x, self.weight, self.eps, out_dtype=dtype)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight).to(x.dtype)


class SwiGLU(nn.Module):
    """W2(silu(W1 x) * W3 x)."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.w1 = Linear(d_model, d_ff)
        self.w2 = Linear(d_ff, d_model)
        self.w3 = Linear(d_model, d_ff)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class MultiHeadAttention(nn.Module):
    """Causal self-attention with rotary position embeddings; several query heads may share a head of keys and values
    (Ainslie et al., 2023)."""

    def __init__(self, shape: accounting.Shape, attention: AttentionFunction, *, fused: bool = False) -> None:
        super().__init__()
        self.rotate = kernels.rope if fused else rotate
        self.head_dim = shape.head_dim
        self.window = shape.window
        self.attention = attention
        self.q_proj = Linear(shape.d_model, shape.d_model)
        self.k_proj = Linear(shape.d_model, shape.key_width)
        self.v_proj = Linear(shape.d_model, shape.key_width)
        self.output_proj = Linear(shape.d_model, shape.d_model)
        self.options = shape.problem.options(torch.get_default_device())
        self.register_buffer("document_ends", self.options.pop("document_ends", None), persistent=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: LayerCache | None = None) -> Tensor:
        q = self.rotate(self._split(self.q_proj(x)), cos, sin)
        k = self.rotate(self._split(self.k_proj(x)), cos, sin)
        v = self._split(self.v_proj(x))
        options = self.options if self.document_ends is None else {**self.options, "document_ends": self.document_ends}
        is_causal = True
        if cache is not None:
            k, v = cache.append(k, v)
            if q.shape[-2] == 1:
                # A single new token sees all keys of its window; a top-left mask would hide all but the first key.
                is_causal, options = False, {}
                if self.window is not None:
                    k, v = k[..., -self.window :, :], v[..., -self.window :, :]
        out = self.attention(q, k, v, is_causal, **options)
        merged: Tensor = self.output_proj(out.transpose(1, 2).flatten(-2))
        return merged

    def _split(self, x: Tensor) -> Tensor:
        """(batch, sequence, heads * head_dim) -> (batch, heads, sequence, head_dim)."""
        return x.view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)


class Recomputed(Enum):
    """The results that a block recomputes in the backward pass instead of saving them. Attention is always saved."""

    NOTHING = "nothing"
    CHEAP = "cheap"
    """Norms, rotation, SwiGLU's product, the copy that merges heads: no matrix products, so only memory traffic."""
    FEED_FORWARD = "feed_forward"
    """The cheap operations, and the two products of the feed-forward layer's hidden layer."""


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x))."""

    def __init__(self, shape: accounting.Shape, attention: AttentionFunction, fused: Collection[str] = ()) -> None:
        super().__init__()
        self.ln1 = RMSNorm(shape.d_model, fused="rms_norm" in fused)
        self.attn = MultiHeadAttention(shape, attention, fused="rope" in fused)
        self.ln2 = RMSNorm(shape.d_model, fused="rms_norm" in fused)
        self.ffn = SwiGLU(shape.d_model, shape.d_ff)
        self.recomputed = Recomputed.NOTHING

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: LayerCache | None = None) -> Tensor:
        if cache is None and self.recomputed is not Recomputed.NOTHING and torch.is_grad_enabled():
            return self._selectively_checkpointed(x, cos, sin)
        x = x + self.attn(self.ln1(x), cos, sin, cache)
        out: Tensor = x + self.ffn(self.ln2(x))
        return out

    def _selectively_checkpointed(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Compute `forward`, but keep only x, matrix products and the attention's output, or less.

        Korthikanti et al. (2022, section 5) do the opposite and recompute attention, since theirs stores the scores.
        """
        x = checkpointed(lambda x: x + self.attn(self.ln1(x), cos, sin), x, context_fn=keep_products)
        # The compiler takes a context_fn only where it is named, and not from a variable.
        if self.recomputed is Recomputed.FEED_FORWARD:
            x = checkpointed(lambda x: x + self.ffn(self.ln2(x)), x)
        else:
            x = checkpointed(lambda x: x + self.ffn(self.ln2(x)), x, context_fn=keep_products)
        return x


EXPENSIVE = ("mm", "bmm", "addmm", "baddbmm", "_scaled_mm", "_scaled_dot_product")
"""Prefixes of torch operations that are not recomputed. Operations outside torch, such as attention, never are, unless
they are CHEAP."""
CHEAP = ("rms_norm", "rope")
"""Prefixes of our kernels' operations that only cause memory traffic."""


def keep_products() -> tuple[Any, Any]:
    """The `context_fn` with which `checkpointed` also saves the results of matrix products and of attention."""
    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(_keep_if_expensive)  # type: ignore[no-untyped-call]
    return contexts


def _in_turn(blocks: Sequence[nn.Module], x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    for block in blocks:
        x = block(x, cos, sin)
    return x


checkpointed: Any = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
"""Calls a function and saves only its inputs for the backward pass, which recomputes everything else. There is no
dropout, so no random state to save."""


def _keep_if_expensive(_context: Any, operation: Any, *_arguments: Any, **_named: Any) -> CheckpointPolicy:
    if operation.namespace == "flopwatch" and operation.__name__.startswith(CHEAP):
        return CheckpointPolicy.PREFER_RECOMPUTE
    if operation.namespace != "aten" or operation.__name__.startswith(EXPENSIVE):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


class OutputLayer(Linear):
    """Computes the logits of hidden vectors or, with targets, the loss, without allocating all logits."""

    def __init__(self, d_model: int, vocab_size: int, *, fused: bool = False) -> None:
        super().__init__(d_model, vocab_size)
        self.kernel = kernels.linear_cross_entropy if fused else None
        self._softmax_gradient = softmax_gradient

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        if targets is None:
            return super().forward(x)
        if self.kernel is not None:
            return self.kernel(x, self.weight, targets)
        return linear_cross_entropy(x, self.weight, targets, self._softmax_gradient)

    def compile_loss(self) -> None:
        """Compile the work on one chunk of logits into one or two kernels."""
        self._softmax_gradient = torch.compile(softmax_gradient)


class TransformerLM(nn.Module):
    """Decoder-only transformer language model. Its blocks are `layers`.

    Args:
        vocab_size: Tokens in the vocabulary.
        context_length: Longest sequence; rotary angles are tabulated up to it.
        d_model: Width of the residual stream.
        num_layers: Number of blocks.
        num_heads: Attention heads; d_model / num_heads must be an even integer.
        d_ff: Width of the feed-forward layer.
        rope_theta: Base of the rotary angles.
        attention: (q, k, v, is_causal, **options) -> output; `kernels.registry.ATTENTION` has them by name.
        num_kv_heads: Heads of keys and values, each shared by as many query heads; None: as many as query heads.
        window: Tokens that a token sees back, itself included; None: all before it.
        document_lengths: Lengths of the documents that are packed into each sequence, together its length; None: one
            document.
        activation_checkpointing: Recompute activations in the backward pass. It has no effect on calls with a cache.
        checkpoint_scope: The part to recompute. "block": each block from its input. "selective": in every block the
            cheap operations (norms, SwiGLU's product), and in the first `checkpoint_layers` also the feed-forward
            layer's products; never attention.
        checkpoint_layers: Number of blocks, from the first on, that are recomputed; None: all. The backward pass frees
            the last blocks' activations first, which leaves memory for the recomputed ones.
        checkpoint_blocks: With scope "block", the number of blocks in a row that are recomputed together, from the
            first one's input.
        fused: Names in FUSED: what our Triton kernels compute, on a GPU; "linear_cross_entropy" in calls with targets.

    Raises:
        ValueError: the head dimension is not an even integer, num_kv_heads does not divide num_heads, or `fused` names
            something else.
    """

    def __init__(
        self,
        vocab_size: int,
        context_length: int,
        d_model: int,
        num_layers: int,
        num_heads: int,
        d_ff: int,
        rope_theta: float = 10_000.0,
        *,
        attention: AttentionFunction = reference_attention,
        num_kv_heads: int | None = None,
        window: int | None = None,
        document_lengths: Sequence[int] | None = None,
        activation_checkpointing: bool = False,
        checkpoint_scope: str = "block",
        checkpoint_layers: int | None = None,
        checkpoint_blocks: int = 1,
        fused: Collection[str] = (),
    ) -> None:
        super().__init__()
        if unknown := sorted(set(fused) - set(FUSED)):
            raise ValueError(f"fused: unknown {', '.join(unknown)}; known are {', '.join(FUSED)}")
        if d_model % (2 * num_heads):
            raise ValueError(f"d_model ({d_model}) must be a multiple of 2 × num_heads ({num_heads})")
        documents = None if document_lengths is None else tuple(document_lengths)
        self.shape = accounting.Shape(vocab_size, d_model, num_layers, num_heads, d_ff, num_kv_heads, window, documents)
        self.context_length = context_length
        layers = 0 if not activation_checkpointing else num_layers if checkpoint_layers is None else checkpoint_layers
        self.checkpointed_blocks = layers if checkpoint_scope == "block" else 0
        self.checkpoint_blocks = checkpoint_blocks
        """Number of blocks, from the first on, that are recomputed as a whole."""
        self.token_embeddings = nn.Embedding(vocab_size, d_model)
        blocks = [TransformerBlock(self.shape, attention, fused) for _ in range(num_layers)]
        if activation_checkpointing and checkpoint_scope == "selective":
            for index, block in enumerate(blocks):
                block.recomputed = Recomputed.FEED_FORWARD if index < layers else Recomputed.CHEAP
        self.layers = nn.ModuleList(blocks)
        self.ln_final = RMSNorm(d_model, fused="rms_norm" in fused)
        self.lm_head = OutputLayer(d_model, vocab_size, fused="linear_cross_entropy" in fused)
        cos, sin = rotary_angles(context_length, d_model // num_heads, rope_theta)
        self.register_buffer("rope_cos", cos, persistent=False)
        self.register_buffer("rope_sin", sin, persistent=False)
        self.rope_cos: Tensor
        self.rope_sin: Tensor

    def forward(
        self,
        token_ids: Tensor,
        cache: KeyValueCache | None = None,
        last_only: bool = False,
        targets: Tensor | None = None,
    ) -> Tensor:
        """Return the next-token logits or, with targets, the mean loss. Raises ValueError: more than context_length
        tokens, several tokens on top of a filled cache, or sequences that the documents do not fill.

        Args:
            token_ids: (batch, sequence), integers below vocab_size.
            cache: Keys and values of earlier tokens; the call adds those of these tokens. A cache with tokens in it
                takes one more at a time.
            last_only: Logits of the last position only.
            targets: (batch, sequence), integers below vocab_size: the tokens that follow. The full logits are never
                allocated then; see `kernels.chunked_cross_entropy.linear_cross_entropy`.

        Returns:
            (batch, sequence, vocab_size), or (batch, 1, vocab_size) with `last_only`; a scalar with `targets`.
        """
        start = 0 if cache is None else cache.length
        end = start + token_ids.shape[-1]
        if end > self.context_length:
            raise ValueError(f"{end} tokens are more than the context length ({self.context_length})")
        if start and end - start > 1:
            raise ValueError("a filled cache takes one token at a time")
        documents = self.shape.document_lengths
        if documents is not None and sum(documents) != token_ids.shape[-1]:
            raise ValueError(f"documents of {sum(documents)} tokens do not fill sequences of {token_ids.shape[-1]}")
        cos, sin = self.rope_cos[start:end], self.rope_sin[start:end]
        x = self.token_embeddings(token_ids)
        for index, block in enumerate(self.layers):
            if cache is not None:
                # Calls with a cache are not checkpointed: recomputing a block would put its keys and values into the
                # cache twice.
                x = block(x, cos, sin, cache.layer(index))
            elif index < self.checkpointed_blocks and torch.is_grad_enabled():
                if index % self.checkpoint_blocks == 0:
                    last = min(index + self.checkpoint_blocks, self.checkpointed_blocks)
                    x = checkpointed(_in_turn, [*self.layers][index:last], x, cos, sin)
            else:
                x = block(x, cos, sin)
        if cache is not None:
            cache.length = end
        if last_only:
            x = x[:, -1:]
        out: Tensor = self.lm_head(self.ln_final(x)) if targets is None else self.lm_head(self.ln_final(x), targets)
        return out

    def forward_flops(self, batch_size: int, context_length: int) -> int:
        """Return the floating-point operations of one forward pass; see `workers.model.accounting`."""
        return accounting.forward_flops(self.shape, batch_size, context_length)

    def generate_flops(self, batch_size: int, prompt_length: int, new_tokens: int) -> int:
        """Return the floating-point operations of generating `new_tokens` with a cache; see
        `workers.model.accounting`."""
        return accounting.generate_flops(self.shape, batch_size, prompt_length, new_tokens)

    def new_cache(self, batch_size: int, max_length: int) -> KeyValueCache:
        """Return an empty key-value cache for sequences of up to `max_length` tokens. Raises ValueError: sequences are
        packed documents."""
        if self.shape.document_lengths is not None:
            raise ValueError("packed documents cannot be continued: a cache needs a model without document_lengths")
        weight = self.lm_head.weight
        device = weight.device
        dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else weight.dtype
        shape = self.shape
        heads = shape.num_kv_heads or shape.num_heads
        return KeyValueCache(shape.num_layers, batch_size, heads, max_length, shape.head_dim, dtype, device)

    generate = generation.generate
