"""Models by name: ours, and those installed in the entry-point group `flopwatch.models`.

An entry point is a class, or any callable, that takes TransformerLM's sizes, by name, and returns a module that maps
token ids (batch, context) to logits (batch, context, vocabulary). TransformerLM's other arguments are passed to it if
its signature has them. A model may also have:

- `forward_flops(batch_size, context_length) -> int` and `generate_flops(batch_size, prompt_length, new_tokens) -> int`:
  FLOPs of one forward pass and of one generation; without them, `tflops` and `mfu` are null.
- `layers`, a torch.nn.ModuleList of its blocks: `compile` with `compile_scope` blocks needs it.
- `forward(token_ids, targets=…)`, which returns the mean loss: `fused_linear_cross_entropy` needs it. When blocks are
  compiled, `compile_loss()` is called on every module that has this method.
- `new_cache(batch_size, max_length)` and `forward(token_ids, cache=…, last_only=True)`: mode `generate` needs them.
"""

from kernels.registry import Registry

_HERE = __name__.rpartition(".")[0]


def _check_model(_name: str, loaded: object) -> None:
    if not callable(loaded):
        raise TypeError(f"expected a model class or a function that builds one, not {type(loaded).__name__}")


MODELS = Registry("model", "flopwatch.models", {"transformer_lm": f"{_HERE}.transformer:TransformerLM"}, _check_model)
"""Every model; `MODELS.load(name)` returns the class or function that builds it."""
