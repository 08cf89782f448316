"""Runs a whole step as one CUDA graph: the host launches once, instead of once for each kernel.

A graph repeats the same kernels at the same addresses. So each batch is copied into fixed buffers; the graph keeps the
memory that was allocated during its capture (gradients included); the learning rate is a tensor; and the optimizer
counts its steps on the device. Events that are nodes of the graph time its phases.
"""

from collections.abc import Callable, Mapping
from itertools import pairwise

import torch
from torch import Tensor

from kernels.device_events import Event, reset_peaks, synchronize
from workers.model.steps import ForwardStep

WARMUP_STEPS = 3
"""Steps in the capture's stream before the capture. They compile, choose kernels and make the optimizer's state."""


class CannotCapture(Exception):
    """A part of the step cannot be captured in a CUDA graph; the message is CUDA's or torch's."""


class GraphedStep:
    """A step that is captured when it first runs, and then replayed. Phase: graph.

    The first run warms up, captures and replays. Collectives are captured, too: every rank captures, and every rank
    replays; what ranks do in hooks happens at the capture only.

    Args:
        step: The step to capture. Its optimizer is capturable and its learning rate is a tensor.
        stream: Where it is captured; a wrapper with hooks on gradients must have been made in it, since autograd
            accumulates in the stream in which it first saw a parameter. None: a new one.
        warmup_steps: Steps in that stream before the capture.
    """

    def __init__(
        self, step: ForwardStep, stream: torch.cuda.Stream | None = None, warmup_steps: int = WARMUP_STEPS
    ) -> None:
        self.step, self._stream, self._warmup_steps = step, stream, warmup_steps
        self.forget()
        self.phases: dict[str, Callable[[], None]] = {"graph": self.run}
        self.inner_phases = tuple(step.phases)
        """The phases that the graph holds, in order."""
        self.peak_mib = 0.0
        """Peak of the memory allocated during the capture; also the replays' peak, since they allocate nothing."""

    def forget(self) -> None:
        """Drop the graph and its memory: the next run captures the step as it is then."""
        self._graph: torch.cuda.CUDAGraph | None = None
        self._marks: list[Event] = []

    @property
    def loss(self) -> Tensor | None:
        """The last step's loss, in memory that the next one writes again."""
        return getattr(self.step, "loss", None)

    def prepare(self) -> None:
        if self._graph is None:
            self.step.prepare()
            return
        inputs, targets = self.step.next_batch()
        self.step.inputs.copy_(inputs)
        self.step.targets.copy_(targets)

    def run(self) -> None:
        """Replay the step; the first call captures it before. Raises CannotCapture: a part of the step cannot be
        captured."""
        self.capture()
        assert self._graph is not None
        self._graph.replay()

    def capture(self) -> None:
        """Warm up and capture the prepared step, unless that was done. Only `run` computes the step itself. Raises
        CannotCapture: a part of the step cannot be captured."""
        if self._graph is None:
            self._graph = self._captured()

    def inner_times_ms(self) -> Mapping[str, float]:
        """Return the times of the phases in the last replay, which must have ended."""
        times = (start.milliseconds_to(end) for start, end in pairwise(self._marks))
        return dict(zip(self.inner_phases, times, strict=False))

    def _captured(self) -> torch.cuda.CUDAGraph:
        step, stream = self.step, self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        # The buffers that each batch is copied into.
        step.inputs, step.targets = step.inputs.clone(), step.targets.clone()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(self._warmup_steps):
                for work in step.phases.values():
                    work()
                _drop_gradients(step)
        synchronize()
        self.inner_phases = tuple(step.phases)
        self._marks = [Event(external=True) for _ in range(len(self.inner_phases) + 1)]
        graph = torch.cuda.CUDAGraph()
        reset_peaks()
        try:
            # The watchdogs of process groups ask for events in threads of their own.
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                self._marks[0].record()
                for index, work in enumerate(step.phases.values(), start=1):
                    work()
                    self._marks[index].record()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise CannotCapture(f"a CUDA graph cannot hold this step: {_first_line(error)}") from error
        self.peak_mib = torch.cuda.max_memory_allocated() / 2**20
        return graph


def _drop_gradients(step: object) -> None:
    """Set the gradients of a step without an optimizer to None, so that the capture allocates them."""
    module = getattr(step, "module", None)
    if isinstance(module, torch.nn.Module):
        module.zero_grad(set_to_none=True)


def _first_line(error: BaseException) -> str:
    root = error.__context__ or error
    return " ".join(str(root).strip().split("\n")[0].split())
