"""The usual name of the folder or file with one's own kernels."""

import sys

import torch

OURS = ("app", "kernels", "migrations", "parallel", "workers")
loaded = [name for name in OURS if name in sys.modules and name != __name__]
of_flopwatch = [name for name in loaded if not sys.modules[name].__file__.startswith(__file__.rpartition("/")[0])]
print("kernels: the project's own; modules in sight of Flopwatch:", of_flopwatch, flush=True)


class Doubled(torch.nn.Module):
    """Something to be pickled by name, and compiled."""

    def forward(self, x):
        return 2 * rms_norm(x)


def rms_norm(x, weight=None):
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    return normed if weight is None else normed * weight


def attention(q, k, v, is_causal=False):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
