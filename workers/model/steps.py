"""The work of one step, in phases that are timed separately. Jobs time, profile and record these steps.

A step's `prepare` runs before the clock starts; then its phases run in order.

A step that accumulates gradients splits its batch into micro-batches. Its first phase, `accumulation`, holds the passes
of all micro-batches but the last; `forward` and `backward` are those of the last one. So every phase occurs once in a
step, and `accumulation` is the one phase in which data parallelism does not share gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from workers.model.batches import Batches
from workers.model.generation import sample
from workers.model.loss import cross_entropy
from workers.model.optimizer import clip_gradients
from workers.model.precision import Precision
from workers.model.schedule import cosine_learning_rate

if TYPE_CHECKING:
    from workers.measure.timing import Work
    from workers.model.transformer import TransformerLM

ACCUMULATION = "accumulation"
MAX_LEARNING_RATE = 1e-3
FIRST_PASSES = 5
"""Backward passes in which a parameter may get its first gradient: one pass may leave out an expert, or a layer."""


class Step(Protocol):
    """A unit of repeated work."""

    @property
    def phases(self) -> Work:
        """The work, for `workers.measure.timing.run_step`."""
        ...

    def prepare(self) -> None:
        """Do the work that is not measured: make the next batch."""


class ForwardStep:
    """Forward pass and loss, without gradients. Phase: forward. `model`: maps token ids to logits. `model_has_loss`:
    whether the model computes the loss itself, from `targets`."""

    def __init__(
        self, model: Callable[..., Tensor], batches: Batches, precision: Precision, *, model_has_loss: bool = False
    ) -> None:
        self.model = model
        self.model_has_loss = model_has_loss
        self.batches = batches
        self.precision = precision
        self.device_type = batches.device.type
        self.phases: dict[str, Callable[[], None]] = {"forward": self.forward}

    def prepare(self) -> None:
        self.inputs, self.targets = self.next_batch()

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Make the next step's inputs and targets the present ones, and return them."""
        return self.batches.next()

    def forward(self) -> None:
        with torch.no_grad():
            self.loss = self._loss(self.inputs, self.targets)

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with self.precision.autocast(self.device_type):
            if self.model_has_loss:
                return self.model(inputs, targets=targets)
            return cross_entropy(self.model(inputs), targets)


class BackwardStep(ForwardStep):
    """Forward pass, loss and gradients. Phases: forward, backward; with several micro-batches, accumulation first.
    `module`: has the parameters whose gradients are computed. `micro_batches`: number of equal parts of each batch
    whose gradients are added up to those of their mean loss."""

    def __init__(
        self,
        model: Callable[..., Tensor],
        batches: Batches,
        precision: Precision,
        module: nn.Module,
        *,
        model_has_loss: bool = False,
        micro_batches: int = 1,
    ) -> None:
        super().__init__(model, batches, precision, model_has_loss=model_has_loss)
        self.module = module
        self.micro_batches = micro_batches
        self.earlier: list[Tensor] = []
        """The losses of all micro-batches but the last."""
        # Gradients in fp16 would underflow.
        scaled = precision.compute_dtype == torch.float16
        self.scaler = torch.amp.GradScaler(self.device_type) if scaled else None
        self.without_gradient: list[str] | None = None
        """Names of the trainable parameters to which no pass of the first ones gave any; None before the first."""
        self._looked = 0
        self.phases = {"forward": self.forward, "backward": self.backward}
        if micro_batches > 1:
            self.phases = {ACCUMULATION: self.accumulate, **self.phases}

    def prepare(self) -> None:
        super().prepare()
        self.module.zero_grad(set_to_none=True)

    def accumulate(self) -> None:
        """Run the passes of all micro-batches but the last."""
        self.earlier.clear()
        for index in range(self.micro_batches - 1):
            self.forward_micro_batch(index)
            self.backward()
            self.earlier.append(self.loss.detach())

    def forward(self) -> None:
        self.forward_micro_batch(self.micro_batches - 1)

    def forward_micro_batch(self, micro_batch: int) -> None:
        size = len(self.inputs) // self.micro_batches
        rows = slice(micro_batch * size, (micro_batch + 1) * size)
        self.loss = self._loss(self.inputs[rows], self.targets[rows])

    def backward(self) -> None:
        loss = self.loss if self.micro_batches == 1 else self.loss / self.micro_batches
        if not loss.requires_grad:
            raise ValueError("the loss has no gradient: the model detaches its output, or computes it under no_grad")
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        loss.backward()  # type: ignore[no-untyped-call]
        before = self.without_gradient
        if before is None or (before and self._looked < FIRST_PASSES):
            self._looked += 1
            named = self.module.named_parameters()
            missing = [name for name, one in named if one.requires_grad and one.grad is None]
            self.without_gradient = [name for name in missing if before is None or name in before]


class TrainStep(BackwardStep):
    """A whole training step. Phases: forward, backward, optimizer; with several micro-batches, accumulation first.

    The optimizer's phase holds everything between the gradients and the next step: unscaling, clipping, the learning
    rate of the schedule, the update, and dropping the gradients. A learning rate that is a tensor is set before the
    step instead, since a CUDA graph repeats only what the device does.
    """

    def __init__(
        self,
        model: Callable[..., Tensor],
        batches: Batches,
        precision: Precision,
        module: nn.Module,
        optimizer: Optimizer,
        total_steps: int,
        gradient_clip_norm: float | None = None,
        *,
        model_has_loss: bool = False,
        micro_batches: int = 1,
    ) -> None:
        super().__init__(model, batches, precision, module, model_has_loss=model_has_loss, micro_batches=micro_batches)
        self.optimizer = optimizer
        self.total_steps = total_steps
        self.gradient_clip_norm = gradient_clip_norm
        self.step_number = 0
        self.parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.phases["optimizer"] = self.optimize

    def next_batch(self) -> tuple[Tensor, Tensor]:
        self.step_number += 1
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(self._learning_rate())
        return super().next_batch()

    def optimize(self) -> None:
        for group in self.optimizer.param_groups:
            if not isinstance(group["lr"], Tensor):
                group["lr"] = self._learning_rate()
        if self.gradient_clip_norm is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            clip_gradients(self.parameters, self.gradient_clip_norm)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def _learning_rate(self) -> float:
        return cosine_learning_rate(
            self.step_number,
            max_learning_rate=MAX_LEARNING_RATE,
            min_learning_rate=0.1 * MAX_LEARNING_RATE,
            warmup_steps=max(1, self.total_steps // 10),
            cosine_steps=self.total_steps,
        )


class GenerateStep:
    """Continue a prompt by `new_tokens` tokens. Phases: prefill (first token), decode (the others). `model`, `module`:
    the model as it is called, and its module. `temperature`, `top_k`: see `workers.model.generation.sample`."""

    def __init__(
        self,
        model: TransformerLM,
        module: TransformerLM,
        batches: Batches,
        precision: Precision,
        new_tokens: int,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        seed: int = 0,
    ) -> None:
        self.model = model
        self.module = module
        self.batches = batches
        self.precision = precision
        self.new_tokens = new_tokens
        self.sample = functools.partial(sample, temperature=temperature, top_k=top_k)
        self.seed = seed
        self.generator = torch.Generator(batches.device).manual_seed(seed)
        self.device_type = batches.device.type
        self.first: Tensor | None = None
        """The first prompt."""
        self.made: list[Tensor] = []
        self.phases: dict[str, Callable[[], None]] = {"prefill": self.prefill, "decode": self.decode}

    def prepare(self) -> None:
        self.begin(self.batches.next()[0])

    def begin(self, prompt: Tensor) -> None:
        """Forget what was generated, and take a prompt, (batch, tokens)."""
        self.prompt = prompt
        self.first = prompt if self.first is None else self.first
        self.made = []
        batch_size, length = prompt.shape
        with self.precision.autocast(self.device_type):
            self.cache = self.module.new_cache(batch_size, length + self.new_tokens)

    def prefill(self) -> None:
        self._draw(self.prompt)

    def decode(self) -> None:
        for _ in range(self.new_tokens - 1):
            self._draw(self.made[-1])

    def tokens(self) -> float:
        """Return how many tokens a step makes."""
        return float(self.prompt.shape[0] * self.new_tokens)

    def first_again(self) -> tuple[Tensor, Tensor]:
        """Continue the first prompt once more, with the first draws; return it and the new tokens, (batch, tokens)."""
        assert self.first is not None
        self.generator.manual_seed(self.seed)
        self.begin(self.first)
        self.prefill()
        self.decode()
        return self.first, torch.cat(self.made, dim=-1)

    def _draw(self, token_ids: Tensor) -> None:
        """Draw the token after these, (batch, 1)."""
        with torch.no_grad(), self.precision.autocast(self.device_type):
            logits = self.model(token_ids, cache=self.cache, last_only=True)[:, -1]
            drawn = self.sample(logits, generator=self.generator)
        self.made.append(drawn)
