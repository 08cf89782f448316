"""Plans FP8 for a model's linear layers: the time of each in bf16 and by each recipe, and the filter that follows."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from app.specs.kernel import KernelSpec
from flopwatch.intervals import median_interval
from workers.jobs import _own_step
from workers.jobs._grid import Trial
from workers.jobs._grid.operations import OperationContext, check_timing
from workers.jobs._values import Metric
from workers.measure.check import Check
from workers.measure.linear_products import PRODUCTS, product_works, whole_work
from workers.measure.memory import translate_oom
from workers.measure.table import Column, Scalar
from workers.measure.timing import run_step
from workers.model.compiled import BLOCKS
from workers.model.float8 import (
    FP8_MULTIPLE,
    LinearLayer,
    NoFloat8,
    calls_of,
    candidates,
    float8,
    grouped,
    linear_layers,
)
from workers.model.registry import MODELS
from workers.outcome import Unsupported
from workers.torch_host import load, reset_process, seed_everything, set_precision, why_no_precision

BF16 = "bf16"
WHOLE, BETWEEN = "whole", "between"
"""Both passes of a layer alone, and between two elementwise operations. In bf16 their difference is what these
operations take; the rest of a recipe's time is the layer's, with casts that the compiler has fused."""
Shape = tuple[int, int, int, int]
"""M, K and N of a layer's product of the forward pass, and the layers that read its input."""
EMULATED = "a CPU emulates fp8, so that its times plan nothing"


@dataclass(frozen=True)
class Times:
    """Medians in ms of one layer."""

    products: Mapping[str, float]
    """Of each product alone."""
    whole: float
    """Of both passes."""
    interval: tuple[float, float]
    """That of both passes between two elementwise operations: 95 %, or all of few samples."""

    def pays(self, plain: Times) -> bool:
        """Return True if the layer is shown to be faster than `plain`: their intervals do not overlap."""
        return self.interval[1] < plain.interval[0]

    @property
    def casts(self) -> float:
        """What is not in the products; differences of medians may be a little below zero."""
        return max(0.0, self.whole - sum(self.products.values()))


def metrics(spec: KernelSpec) -> list[Metric]:
    """Return the metrics of a plan: the time of all linear layers of a step in bf16, by each recipe, and by each recipe
    where it pays."""
    names = (BF16, *spec.recipes, *(f"planned_{recipe}" for recipe in spec.recipes))
    return [Metric(f"{name}_ms", None, "ms") for name in names]


def measure(spec: KernelSpec, context: OperationContext, trial: Trial) -> None:
    """Time each layer, report the tables `linears` and `plan`, and set the metrics. Raises Unsupported: torchao is
    missing, the device has no FP8, or there is no linear layer."""
    if why := why_no_precision(context.device, "fp8"):
        raise Unsupported(f"kernel linear: {why}")
    set_precision(BF16)
    try:
        float8()
    except NoFloat8 as error:
        raise Unsupported(f"kernel linear: {error}") from error
    found = layers_of_model(spec) if spec.step_code is None else layers_of_step(spec, context.device)
    if not found:
        raise Unsupported("kernel linear: there is no linear layer (torch.nn.Linear) to plan for")
    seed_everything(spec.seed)
    trial.monitor.start(warm=False)
    measured: dict[Shape, dict[str, Times]] = {}
    for layer in found:
        if _shape(layer) not in measured:
            trial.tell(layer.name)
            measured[_shape(layer)] = _times(spec, layer, context, trial)
            trial.monitor.watch()
    _report(spec, found, measured, context, trial)


def layers_of_model(spec: KernelSpec) -> Counter[LinearLayer]:
    """Return the linear layers of the spec's model, and how many there are of each."""

    assert spec.model is not None
    with torch.device("meta"):
        sizes = {"vocab_size": spec.model.vocab_size, "context_length": spec.context_length, **spec.model.shape()}
        key_heads = {} if spec.model.num_kv_heads is None else {"num_kv_heads": spec.model.num_kv_heads}
        model = load(MODELS, spec.model.name)(**sizes, **key_heads)
    tokens = torch.zeros(spec.batch_size, spec.context_length, dtype=torch.long, device="meta")
    readers: dict[str, int] = {}
    # A plug-in's model may not run there; then each layer casts its own input.
    with suppress(Exception), calls_of(candidates(model, model_has_loss=False)) as calls:
        model(tokens)
        readers = {one.name: one.readers for one in calls}
    layers = linear_layers(model, spec.batch_size * spec.context_length, "tensorwise", ["auto"])
    return Counter(LinearLayer(grouped(one.name), *one.sizes, readers=readers.get(one.name, 1)) for one in layers)


def layers_of_step(spec: KernelSpec, device: torch.device) -> Counter[LinearLayer]:
    """Return the linear layers that a step of the user's own calls in its forward pass, and how often; it runs once.
    Raises BrokenCode: the code cannot be imported, or makes no step; OutOfMemory: the step does not fit."""

    assert spec.step_code is not None
    with translate_oom("the step"), torch.compiler.set_stance("force_eager"):
        step = _own_step.maker(spec.step_code, device, spec.arguments)()
        with calls_of(candidates(step.model, model_has_loss=False)) as calls:
            run_step(step.phases, ())
    return Counter(replace(one, name=grouped(one.name.replace("_orig_mod.", ""))) for one in calls)


def _shape(layer: LinearLayer) -> Shape:
    return *layer.sizes, layer.readers


def _times(spec: KernelSpec, layer: LinearLayer, context: OperationContext, trial: Trial) -> dict[str, Times]:
    """Return the times of one layer in bf16 and, if its sizes are allowed, by each recipe: its share of those of
    as many equal layers as read its input."""
    sizes, readers = layer.sizes, layer.readers
    allowed = all(size % FP8_MULTIPLE == 0 for size in sizes)
    found: dict[str, Times] = {}
    for recipe in (BF16, *(spec.recipes if allowed else ())):
        reset_process()
        with translate_oom(f"a linear layer of {' × '.join(map(str, sizes))}"):
            works = product_works(*sizes, recipe, context.device)
            for name in (WHOLE, BETWEEN) if recipe == BF16 else (BETWEEN,):
                works[name] = whole_work(
                    *sizes, recipe, spec.parameter_dtype, context.device, readers=readers, between=name == BETWEEN
                )
            medians: dict[str, float] = {}
            for name, work in works.items():
                timing = context.watch.time(work, warmup=spec.warmup_steps, calls=spec.measure_steps)
                samples = [sample / (1 if name in PRODUCTS else readers) for sample in timing.samples]
                medians[name] = statistics.median(samples)
                interval = median_interval(samples) or (min(samples), max(samples))
                trial.checks += _named(check_timing(timing, context.device), f"{recipe}, {name}, {sizes}")
        if recipe == BF16:
            beside = medians[BETWEEN] - medians[WHOLE]
        products = {name: medians[name] for name in PRODUCTS}
        found[recipe] = Times(products, medians[BETWEEN] - beside, interval)
    return found


def _named(checks: Sequence[Check], what: str) -> list[Check]:
    """Return the checks that failed, with what they are of."""
    return [replace(check, detail=f"{what}: {check.detail}") for check in checks if not check.ok]


def _report(
    spec: KernelSpec,
    found: Counter[LinearLayer],
    measured: Mapping[Shape, Mapping[str, Times]],
    context: OperationContext,
    trial: Trial,
) -> None:
    rows: list[list[Scalar]] = []
    sums = dict.fromkeys((metric.name for metric in metrics(spec)), 0.0)
    pays: dict[str, list[str]] = {recipe: [] for recipe in spec.recipes}
    allowed = any(len(times) > 1 for times in measured.values())
    for layer, count in found.items():
        times = measured[_shape(layer)]
        plain = times[BF16].whole
        for precision in (BF16, *spec.recipes):
            one = times.get(precision)
            head: list[Scalar] = [layer.name, count, *layer.sizes, precision]
            whole = plain if one is None else one.whole
            sums[f"{precision}_ms"] += count * whole
            if precision != BF16:
                # Outside of our models' blocks nothing is compiled.
                may_pay = spec.step_code is not None or layer.name.startswith(f"{BLOCKS}.")
                shown = one is not None and may_pay and one.pays(times[BF16])
                sums[f"planned_{precision}_ms"] += count * (whole if shown else plain)
                if shown and layer.name not in pays[precision]:
                    pays[precision].append(layer.name)
            if one is None:
                rows.append([*head, *(None for _ in PRODUCTS), None, None, None, None])
                continue
            products = [one.products[name] for name in PRODUCTS]
            rows.append([*head, *products, one.casts, whole, plain / whole, count * (plain - whole)])
    columns = Column.parse(
        "layer, layers: integer, tokens: integer, in_features: integer, out_features: integer, precision, "
        "forward_ms: number ms, grad_input_ms: number ms, grad_weight_ms: number ms, casts_ms: number ms, "
        "whole_ms: number ms, speedup: number, saved_ms: number ms"
    )
    context.report.table("linears", columns, rows)
    context.report.table(
        "plan", Column.parse("plan"), [[line] for line in sentences(sums, pays, context.device, allowed=allowed)]
    )
    for name, ms in sums.items():
        emulated = name.startswith("planned") and context.device.type == "cpu"
        trial.values.set(name, None, None if emulated else [ms], EMULATED)


def sentences(
    sums: Mapping[str, float], pays: Mapping[str, Sequence[str]], device: torch.device, *, allowed: bool
) -> list[str]:
    """Say what each recipe would take, with the filter of the layers that pay; `allowed`: any layer's sizes are."""
    lines = [f"The linear layers of a step take {sums[f'{BF16}_ms']:.4g} ms in bf16."]
    if not allowed:
        return [*lines, "No layer can compute in FP8: none has all its sizes in multiples of 16."]
    if device.type == "cpu":
        return [*lines, "A CPU emulates fp8, so its times say nothing of fp8: run the plan on a GPU."]
    for recipe, chosen in pays.items():
        all_ms = sums[f"{recipe}_ms"]
        if not chosen:
            lines.append(f"{recipe}: no layer is shown to pay; all of them would take {all_ms:.4g} ms. Stay with bf16.")
            continue
        planned = sums[f"planned_{recipe}_ms"]
        lines.append(
            f"{recipe}: {planned:.4g} ms with precision=fp8 fp8_recipe={recipe} fp8_filter={','.join(chosen)}, "
            f"{sums[f'{BF16}_ms'] - planned:.4g} ms less; with all layers {all_ms:.4g} ms."
        )
    return lines
