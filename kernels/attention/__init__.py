"""Attention: one reference, which is the oracle of every test, and the implementations that are measured against it.

Shapes are (batch, heads, sequence, head_dim), or (batch, sequence, head_dim) without heads. Scores are scaled by
1/sqrt(head_dim). The causal mask is aligned top-left, as in torch's scaled_dot_product_attention: query i sees keys
0 … i, also where there are more keys than queries.
"""
