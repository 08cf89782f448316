"""FlashAttention-2 in Triton: `kernels.attention.flash_triton` is what other rooms call."""
