"""FlashAttention-2 in Triton: other packages call `kernels.attention.flash_triton`."""
