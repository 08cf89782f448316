"""Models by name: ours, and what is installed in the entry-point group `flopwatch.models`.

An entry point is a class, or any callable, that takes TransformerLM's sizes, by name, and returns a module that maps
token ids (batch, context) to logits (batch, context, vocabulary). Of TransformerLM's other arguments it gets those that
it takes. What a model may offer beyond that:

- `forward_flops(batch_size, context_length) -> int` and `generate_flops(batch_size, prompt_length, new_tokens) -> int`:
  FLOPs of one forward pass and of one generation; without them, `tflops` and `mfu` are null.
- `layers`, a torch.nn.ModuleList of its blocks: `compile` with `compile_scope` blocks needs it.
- `new_cache(batch_size, max_length)` and `forward(token_ids, cache=…, last_only=True)`: mode `generate` needs them.
"""

from __future__ import annotations

from kernels.registry import Registry


def _check_model(_name: str, loaded: object) -> None:
    if not callable(loaded):
        raise TypeError(f"expected a model class or a function that builds one, not {type(loaded).__name__}")


MODELS = Registry(
    "model", "flopwatch.models", {"transformer_lm": "workers.model.transformer:TransformerLM"}, _check_model
)
"""Every model; `MODELS.load(name)` gives what builds it."""
