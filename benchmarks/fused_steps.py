"""A compiled training step in a CUDA graph, with parts of the model as Triton kernels (`fused`): times on this GPU.

    python -m benchmarks.fused_steps --size xl --parameters fp32 --variants plain chunked rms_norm all
    python -m benchmarks.fused_steps --size xl --optimizer triton_adamw --variants all

Needs torch, Triton and this checkout only. Steps are those of `benchmark` jobs with `compile`, `cuda_graph`, precision
bf16 and attention `triton`. A variant is `plain`; `chunked`, the output layer's loss in chunks
(`fused_linear_cross_entropy`); one of the names of `fused`; several with + between them; or `all`. Parameters `master`
are bf16 with float32 master weights, which `adamw` and `triton_adamw` have. One line per variant: the median time of a
step, and the memory that its tensors take. On an H200 a variant of xl takes 20 to 30 s, most of it compilation.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time

import torch

from app.presets import MODEL_SIZES, VOCABULARY_SIZE, VOCABULARY_SIZES
from kernels.registry import ATTENTION
from workers.model import TransformerLM
from workers.model.batches import RandomBatches
from workers.model.compiled import compile_blocks
from workers.model.graphed import GraphedStep
from workers.model.optimizer import OPTIMIZERS, make_optimizer
from workers.model.precision import PRECISIONS, set_parameter_dtype
from workers.model.steps import MAX_LEARNING_RATE, TrainStep
from workers.model.transformer import FUSED

VARIANTS = ("plain", "chunked", "linear_cross_entropy", "rms_norm", "rope", "all")
WARMUP = 5


def make(size: str, parameters: str, batch: int, context: int, variant: str, optimizer_name: str) -> GraphedStep:
    """Make the step of a variant, not yet captured."""
    device = torch.device("cuda", torch.cuda.current_device())
    fused = FUSED if variant == "all" else tuple(name for name in variant.split("+") if name in FUSED)
    vocabulary = VOCABULARY_SIZES.get(size, VOCABULARY_SIZE)
    torch.manual_seed(0)
    with device:
        model = TransformerLM(
            vocabulary, context, **MODEL_SIZES[size], attention=ATTENTION.load("triton").function, fused=fused
        )
    set_parameter_dtype(model, "fp32" if parameters == "fp32" else "bf16")
    compile_blocks(model)
    rate = torch.tensor(MAX_LEARNING_RATE, device=device)
    optimizer = make_optimizer(optimizer_name, model, rate, capturable=True, master_weights=parameters == "master")
    batches = RandomBatches(vocabulary, batch, context, device, 0)
    has_loss = "linear_cross_entropy" in fused or "chunked" in variant.split("+")
    return GraphedStep(TrainStep(model, batches, PRECISIONS["bf16"], model, optimizer, 1000, model_has_loss=has_loss))


def milliseconds(step: GraphedStep, steps: int) -> tuple[float, float]:
    """Return a step's median time in ms, and the seconds until it was ready."""
    begun = time.perf_counter()
    taken = []
    for index in range(WARMUP + steps):
        step.prepare()
        torch.cuda.synchronize()
        if index == WARMUP:
            ready_s = time.perf_counter() - begun
        start = time.perf_counter()
        step.run()
        torch.cuda.synchronize()
        taken.append(1e3 * (time.perf_counter() - start))
    return statistics.median(taken[WARMUP:]), ready_s


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=sorted(MODEL_SIZES), default="xl")
    parser.add_argument("--parameters", choices=("fp32", "bf16", "master"), default="fp32")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--optimizer", choices=sorted(OPTIMIZERS), default="torch_fused_adamw")
    parser.add_argument("--variants", nargs="+", default=VARIANTS)
    given = parser.parse_args()
    if given.parameters == "master" and given.optimizer.startswith("torch"):
        parser.error(f"{given.optimizer} has no master weights: choose --optimizer triton_adamw")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {given}\n")
    print("| variant | step, ms | memory, GiB | ready after, s |\n|---|---|---|---|")
    for variant in given.variants:
        torch._dynamo.reset()
        torch.cuda.reset_peak_memory_stats()
        step = make(given.size, given.parameters, given.batch, given.context, variant, given.optimizer)
        taken, ready = milliseconds(step, given.steps)
        memory = torch.cuda.max_memory_allocated() / 2**30
        print(f"| {variant} | {taken:.2f} | {memory:.2f} | {ready:.0f} |", flush=True)
        del step
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
