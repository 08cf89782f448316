"""FlashAttention-3 in Gluon for compute capability 9.0 (H100, H200): other packages call `launch`."""
