"""Builds the model and its step from a spec, or the step of the user's own."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from app.specs._training import WITH_BACKWARD, ModelSpec, TrainingSpec
from kernels.registry import ATTENTION, Implementation
from workers import uploaded
from workers.jobs import _own_step
from workers.jobs._training import fp8
from workers.measure.warmup import min_calls
from workers.model.accounting import Shape
from workers.model.registry import MODELS
from workers.outcome import Unsupported
from workers.torch_host import as_runner_error, choose_device, load, seed_everything, set_precision

if TYPE_CHECKING:
    import torch

    from workers.measure.memory import MemoryMeter
    from workers.measure.own_step import OwnStep
    from workers.measure.returned import ReturnedNumbers
    from workers.model.batches import Batches
    from workers.model.float8 import LinearLayer
    from workers.model.graphed import GraphedStep
    from workers.model.steps import ForwardStep, Step
    from workers.model.transformer import TransformerLM

Maker = Callable[[], Any]
"""Builds the model that a spec names, or the user's own step (workers.measure.own_step.OwnStep)."""
STEPS = 10
"""Steps that are measured by default, on a CPU at least."""


@dataclass(frozen=True)
class Training:
    """A model on its device, and the step that is repeated."""

    spec: TrainingSpec
    device: torch.device
    model: torch.nn.Module
    step: Step
    meter: MemoryMeter
    """Measures from before the model was made."""
    graphed: GraphedStep | None = None
    own: OwnStep | None = None
    linear_layers: Sequence[LinearLayer] = ()
    """With precision fp8, those of the model."""

    @property
    def modules(self) -> torch.nn.Module:
        """The model; of a step of the user's own, what has parameters or buffers so far."""
        return self.model if self.own is None else self.own.model

    @property
    def trainable(self) -> int | None:
        """The number of trainable parameters; None if a step of the user's own has none that are known."""
        if self.own is not None:
            return self.own.trainable
        return sum(one.numel() for one in self.model.parameters() if one.requires_grad)

    def returned(self) -> object:
        """Return what the last step has returned, or our own step's loss."""
        if self.own is not None:
            return self.own.returned
        loss = getattr(self.step, "loss", None)
        return None if loss is None else {"loss": loss}

    def take_returned(self, numbers: ReturnedNumbers, *, last: bool = False) -> None:
        """Let `numbers` read what the last step has returned, between steps, and then drop it."""
        numbers.take()
        if self.own is not None:
            self.own.returned, self.own.keeps_returned = None, numbers.wants_next and not last

    @property
    def phases(self) -> tuple[str, ...]:
        """The phases of a step, in order; those of a step of the user's own once it has run."""
        return self.spec.step_phases() if self.own is None else self.own.phase_names


def prepare(spec: TrainingSpec) -> tuple[torch.device, Maker]:
    """Make this process ready for a spec. Returns its device, and a function that builds the model or the step there.
    Raises Unsupported: the device, model or attention does not exist here, or cannot run this spec; InvalidEnvironment:
    something is wrong with this host."""
    device = choose_device(spec.device, spec.precision)
    _own_step.hear_ranges()
    if spec.step_code is not None:
        set_precision(spec.precision)
        return device, _own_step.maker(spec.step_code, device, spec.arguments)
    if spec.cuda_graph and device.type != "cuda":
        raise Unsupported("cuda_graph: this worker's process sees no GPU, and a CPU has no CUDA graphs")
    build_model = choose_model(spec, device)
    set_precision(spec.precision)
    return device, build_model


def choose_model(spec: TrainingSpec, device: torch.device) -> Callable[[], torch.nn.Module]:
    """Return a function that builds the spec's model with its attention on the current default device. Raises
    Unsupported: the model or attention does not exist here, or does not support the spec's options; InvalidEnvironment:
    an installed model or attention is broken; BrokenCode: the job's uploaded one is broken."""
    import torch

    from workers.model.precision import PARAMETER_DTYPES, PRECISIONS

    model_class = load(MODELS, spec.model.name) if spec.code is None else uploaded.load(spec.code)
    attention = attention_of(spec)
    dtype = str(PRECISIONS[spec.precision].compute_dtype).removeprefix("torch.")
    problem = shape_of(spec.model, spec.longest).problem
    if reason := attention.why_not(device.type, dtype, backward=spec.mode in WITH_BACKWARD, problem=problem):
        raise Unsupported(reason)
    if spec.fused:
        check_fused(device)
    arguments: dict[str, Any] = {
        "vocab_size": spec.model.vocab_size,
        "context_length": spec.longest,
        **spec.model.shape(),
        **options_of(model_class, spec, attention.function),
    }

    no_model = Unsupported if spec.code is None else uploaded.BrokenCode

    def make() -> torch.nn.Module:
        try:
            model = model_class(**arguments)
        except TypeError as error:
            if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
                raise  # from inside of it; a decorator may add arguments that its signature lacks
            takes = f"is called with {', '.join(arguments)}, and more that it names, such as attention"
            raise no_model(f"model {name_of(spec)!r} {takes} (docs/how-to-add-a-model.md): {error}") from error
        if not isinstance(model, torch.nn.Module):
            raise no_model(f"model {name_of(spec)!r} is of type {type(model).__name__}, and no torch.nn.Module")
        check_parameters(model)
        if spec.mode == "generate" and not hasattr(model, "new_cache"):
            raise Unsupported(f"model {name_of(spec)!r} has no key-value cache, which mode generate needs")
        if spec.model_has_loss and "targets" not in inspect.signature(model.forward).parameters:
            field = "fused_linear_cross_entropy" if spec.fused_linear_cross_entropy else "fused linear_cross_entropy"
            raise Unsupported(
                f"model {name_of(spec)!r} does not compute its loss: its forward() takes no argument 'targets', which "
                f"{field} needs"
            )
        return model

    def check_parameters(model: torch.nn.Module) -> None:
        if any(one.is_meta for one in model.parameters()):
            raise no_model(f"model {name_of(spec)!r} makes parameters on the meta device, where nothing is computed")
        made = {one.dtype for one in model.parameters() if one.is_floating_point()}
        for dtype in made - {torch.float32, PARAMETER_DTYPES[spec.parameter_dtype]}:
            or_bf16 = ", or set parameter_dtype=bf16 (with precision=bf16)" if dtype == torch.bfloat16 else ""
            raise no_model(
                f"model {name_of(spec)!r} makes parameters in {dtype}, and the job measures it with parameter_dtype "
                f"{spec.parameter_dtype}: make them in float32{or_bf16}"
            )

    return make


def attention_of(spec: TrainingSpec) -> Implementation:
    """Return the model's attention: an installed one, or the job's own code. Raises Unsupported, InvalidEnvironment,
    BrokenCode: it does not exist here, or is broken."""
    if spec.attention_code is not None:
        return uploaded.implementation(spec.attention_code)
    implementation: Implementation = load(ATTENTION, spec.attention)
    return implementation


def check_fused(device: torch.device) -> None:
    """Check that Triton's kernels run on a device. Raises Unsupported: they do not."""
    if device.type != "cuda":
        raise Unsupported("fused: this worker's process sees no GPU, and Triton has no kernels for a CPU: leave it out")
    if importlib.util.find_spec("triton") is None:
        raise Unsupported("fused: Triton is not installed: install triton, or leave fused out")


def shape_of(model: ModelSpec, tokens: int) -> Shape:
    """Return the sizes of a model for sequences of so many tokens, as `workers.model.accounting` takes them."""
    window, documents = model.masks(tokens)
    return Shape(
        vocab_size=model.vocab_size,
        **model.shape(),
        num_kv_heads=model.num_kv_heads,
        window=window,
        document_lengths=None if documents is None else tuple(documents),
    )


def name_of(spec: TrainingSpec) -> str:
    """Return the name of the model's class, for messages."""
    return spec.model.name if spec.code is None else spec.code.label()


def options_of(model_class: Callable[..., Any], spec: TrainingSpec, attention: Callable[..., Any]) -> dict[str, Any]:
    """Return the optional constructor arguments that a model takes, with the spec's values.

    A model that was written before an option existed lacks it, and still works if the spec does not set that option.
    Raises Unsupported: the spec needs an option that the model lacks.
    """
    fields, shape = type(spec).model_fields, shape_of(spec.model, spec.longest)
    of_shape = ("num_kv_heads", "window", "document_lengths")
    of_checkpoints = ("checkpoint_scope", "checkpoint_layers", "checkpoint_blocks")
    of_spec = ("activation_checkpointing", *of_checkpoints)
    options = {
        "rope_theta": spec.model.rope_theta,
        **{name: getattr(shape, name) for name in of_shape},
        "attention": attention,
        **{name: getattr(spec, name) for name in of_spec},
        "fused": tuple(sorted(spec.fused)),
    }
    defaults = {"rope_theta": type(spec.model).model_fields["rope_theta"].default, **dict.fromkeys(of_shape)}
    defaults |= {name: fields[name].default for name in of_spec} | {"fused": ()}
    if spec.attention_code is None and spec.attention == fields["attention"].default:
        defaults["attention"] = attention
    if not spec.activation_checkpointing:
        defaults |= {name: options[name] for name in of_checkpoints}
    try:
        parameters = inspect.signature(model_class).parameters
    except (TypeError, ValueError):  # a constructor in another language has no signature
        return options
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    is_set = {name for name, value in options.items() if value != defaults.get(name)}
    if not takes_all and (missing := [name for name in options if name in is_set and name not in parameters]):
        raise Unsupported(f"model {name_of(spec)!r} takes no argument {missing[0]!r}, which this job sets")
    # One with `**kwargs` may hand them to a class that has no such argument.
    taken = {*parameters, *(is_set | {"attention"} if takes_all else ())}
    return {name: value for name, value in options.items() if name in taken}


def build(spec: TrainingSpec, device: torch.device, build_model: Maker, *, batches: Batches | None = None) -> Training:
    """Build the model and its step, for these batches; None: random ones. Raises OutOfMemory: the model does not fit;
    Unsupported: the model does not expose its blocks, which compiling them needs."""

    from workers.measure.memory import memory_meter, translate_oom
    from workers.model.graphed import GraphedStep
    from workers.model.precision import set_parameter_dtype

    if device.type == "cpu" and (spec.mode == "train_step" or spec.activation_checkpointing):
        # Optimizers and checkpointing import it: 70 MiB that do not belong to the model. Forks of the warm parent have
        # it already.
        importlib.import_module("torch._dynamo")
    with translate_oom("making the model"):
        seed_everything(spec.seed)
        meter = memory_meter(device)
        if spec.step_code is not None:
            own: OwnStep = build_model()
            return Training(spec, device, own.model, own, meter, own=own)
        with device:
            model = build_model()
        set_parameter_dtype(model, spec.parameter_dtype)
        layers = fp8.to_float8(spec, device, model)
        step = build_step(spec, device, model, batches)
    if not spec.cuda_graph:
        return Training(spec, device, model, step, meter, linear_layers=layers)
    graphed = GraphedStep(cast("ForwardStep", step))
    return Training(spec, device, model, graphed, meter, graphed, linear_layers=layers)


def build_step(
    spec: TrainingSpec, device: torch.device, model: torch.nn.Module, batches: Batches | None = None
) -> Step:
    """Build the step that is repeated, not yet captured in a CUDA graph; `batches` as for `build`."""
    import torch

    from workers.model import steps
    from workers.model.batches import RandomBatches
    from workers.model.optimizer import make_optimizer
    from workers.model.precision import PRECISIONS

    call: Any = compiled(spec, model)
    fused, micro_batches = spec.model_has_loss, spec.accumulation_steps
    sequences = micro_batches * spec.batch_size
    batches = batches or RandomBatches(spec.model.vocab_size, sequences, spec.context_length, device, spec.seed)
    precision = PRECISIONS[spec.precision]
    match spec.mode:
        case "forward":
            return steps.ForwardStep(call, batches, precision, model_has_loss=fused)
        case "forward_backward":
            return steps.BackwardStep(
                call, batches, precision, model, model_has_loss=fused, micro_batches=micro_batches
            )
        case "train_step":
            rate = torch.tensor(steps.MAX_LEARNING_RATE, device=device) if spec.cuda_graph else steps.MAX_LEARNING_RATE
            options = {"capturable": spec.cuda_graph, "master_weights": spec.master_weights}
            optimizer = make_optimizer(spec.optimizer, model, rate, **options)
            # The steps of the schedule affect only the learning rate, so further steps do no harm.
            total = min_calls(spec.warmup_steps) + (spec.measure_steps or STEPS)
            clip = spec.gradient_clip_norm
            return steps.TrainStep(
                *(call, batches, precision, model, optimizer, total, clip),
                model_has_loss=fused,
                micro_batches=micro_batches,
            )
        case "generate":
            return steps.GenerateStep(
                call, cast("TransformerLM", model), batches, precision, spec.new_tokens, **spec.sampling()
            )


def compiled(spec: TrainingSpec, model: torch.nn.Module, *, inside_hooks: bool = False) -> Any:
    """Return the model for the step to call, compiled if the spec asks for it; see `compile_blocks` for the hooks."""
    from workers.model.compiled import NoBlocks, compile_blocks, compile_model

    if not spec.compile:
        return model
    if spec.compile_scope == "model":
        return compile_model(model)
    try:
        return compile_blocks(model, inside_hooks=inside_hooks)
    except NoBlocks as error:
        raise Unsupported(f"model {name_of(spec)!r}: {error}") from error


@contextmanager
def known_errors() -> Iterator[None]:
    """Turn known errors of torch and of our steps into the errors that decide the job's outcome. Raises Unsupported,
    InvalidEnvironment: the meaning of the error that occurred inside."""
    from workers.model.graphed import CannotCapture

    try:
        yield
    except CannotCapture as error:
        raise Unsupported(f"cuda_graph: {error}") from error
    except RuntimeError as error:
        if meaning := as_runner_error(error):
            raise meaning from error
        raise
