"""Named presets; standard library only. Sizes follow the GPT-2 family, as used in Stanford's CS336."""

from typing import Any, Final, TypedDict

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
    "8b": {"d_model": 4096, "d_ff": 11_008, "num_layers": 34, "num_heads": 32},
}
VOCABULARY_SIZES: Final[dict[str, int]] = {"8b": 151_936}
"""Vocabulary sizes of the presets that do not have VOCABULARY_SIZE."""

ATTENTION_PRESETS: Final[dict[str, dict[str, Any]]] = {
    # CS336's leaderboard problem: one forward and backward pass, by its stopwatch, too.
    "leaderboard": {
        "do_bench": True,
        "implementations": ["triton", "flex", "sdpa_flash", "sdpa_cudnn"],
        "batch_size": 1,
        "num_heads": 16,
        "head_dims": [64],
        "sequence_lengths": [16_384],
        "dtypes": ["bf16"],
        "causal": [True],
        "device": "cuda",
    },
    # CS336's problem flash_benchmarking.
    "flash_benchmarking": {
        "implementations": ["eager", "triton"],
        "batch_size": 1,
        "num_heads": 1,
        "head_dims": [16, 32, 64, 128],
        "sequence_lengths": [2**power for power in range(7, 17)],
        "dtypes": ["bf16", "fp32"],
        "causal": [True],
        "device": "cuda",
    },
    # CS336's problem pytorch_attention, with its compiled form and ours.
    "classic": {
        "implementations": ["eager", "compiled", "triton"],
        "batch_size": 8,
        "num_heads": 1,
        "head_dims": [16, 32, 64, 128],
        "sequence_lengths": [256, 1024, 4096, 8192, 16_384],
        "dtypes": ["fp32", "bf16"],
        "causal": [False],
        "device": "cuda",
    },
    # The C++ implementations on a CPU, at the size whose intermediates `kernels.attention.cpu` documents, and under
    # the profiler: what CS149's assignment on attention asks for.
    "cpu": {
        "implementations": ["cpu_naive", "cpu_blocked", "cpu_fused", "cpu_flash", "sdpa_flash"],
        "batch_size": 1,
        "num_heads": 4,
        "head_dims": [32],
        "sequence_lengths": [1024],
        "dtypes": ["fp32"],
        "causal": [False],
        "mode": "forward",
        "profile": True,
        "device": "cpu",
    },
}
"""Partial specs of kind `attention`. Those with sizes for a GPU ask for one, so that on a host without a GPU the job
says at once that it waits, instead of running for hours on a CPU."""

DEMO_SWEEPS: Final[dict[str, dict[str, Any]]] = {
    "cpu": {
        "base": {"kind": "benchmark", "batch_size": 1},
        "grid": {"model.size": ["tiny", "small"], "context_length": [128, 256]},
    },
    "cuda": {
        "base": {"kind": "benchmark"},
        "grid": {"model.size": ["tiny", "small", "medium", "large"], "context_length": [256, 512]},
    },
}
"""The first sweep of `make demo` and of the welcome page, by type of device; it takes minutes at most."""
