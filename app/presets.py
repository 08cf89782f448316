"""Named presets; standard library only. Sizes follow the GPT-2 family, as used in Stanford's CS336."""

from __future__ import annotations

from typing import Final, TypedDict

VOCABULARY_SIZE: Final = 10_000
BATCH_SIZE: Final = 4


class ModelShape(TypedDict):
    """Hyper-parameters that a model preset fixes."""

    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int


MODEL_SIZES: Final[dict[str, ModelShape]] = {
    "tiny": {"d_model": 128, "d_ff": 512, "num_layers": 2, "num_heads": 4},
    "small": {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12},
    "medium": {"d_model": 1024, "d_ff": 4096, "num_layers": 24, "num_heads": 16},
    "large": {"d_model": 1280, "d_ff": 5120, "num_layers": 36, "num_heads": 20},
    "xl": {"d_model": 1600, "d_ff": 6400, "num_layers": 48, "num_heads": 25},
    "2.7b": {"d_model": 2560, "d_ff": 10240, "num_layers": 32, "num_heads": 32},
}
