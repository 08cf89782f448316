"""A step with all that finds modules by name: loaders' processes, pickles, the compiler, imports in functions."""

import importlib
import pickle

import torch
from torch.utils.data import DataLoader

import app
import flopwatch
import parallel
import workers
from kernels import Doubled, rms_norm
from parallel.data import Rows


def make_step(device, start="fork"):
    assert [f"{it} of the project" for it in ("app", "workers", "parallel")] == [app.NAME, workers.NAME, parallel.NAME]
    assert importlib.import_module("kernels").rms_norm is rms_norm
    module = pickle.loads(pickle.dumps(Doubled()))
    assert type(module) is Doubled
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    linear = torch.nn.Linear(64, 64).to(device)
    rows = iter(DataLoader(Rows(), batch_size=4, num_workers=1, multiprocessing_context=start))

    def step():
        from kernels import rms_norm as again

        assert again is rms_norm
        with flopwatch.phase("forward"):
            loss = compiled(linear(next(rows).to(device))).sum()
        with flopwatch.phase("backward"):
            loss.backward()

    return step


def spawning(device):
    return make_step(device, start="spawn")
