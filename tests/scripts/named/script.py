"""Run as it is by `flopwatch run-script`."""

import torch

import app
import flopwatch
import kernels

assert app.NAME == "app of the project"
x = torch.randn(64, 64)
flopwatch.measure(lambda: kernels.rms_norm(x), warmup_steps=1, measure_steps=2)
