"""The transformer under test: model, loss, optimizer, schedule, batches and their accounting.

Nothing here may import the service (app): GPU hosts may lack its dependencies. torch is imported with the first
attribute, not with the package, so that the registry's names can be listed without it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workers.model.transformer import TransformerLM

__all__ = ["TransformerLM"]


def __getattr__(name: str) -> Any:
    if name == "TransformerLM":
        from workers.model.transformer import TransformerLM

        return TransformerLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
