"""Chooses a job's device, sets its precision, loads installed code by name, translates torch's errors, cleans up."""

from __future__ import annotations

import gc
import os
import random
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kernels.registry import Registry, RegistryError, UnknownName
from workers.measure.errors import causes_of, text_of
from workers.measure.host_memory import bound_memory
from workers.outcome import Crashed, InvalidEnvironment, RunnerError, Unsupported

if TYPE_CHECKING:
    import torch


NO_COMPILER = {"InvalidCxxCompiler", "TritonMissing", "GPUTooOldForTriton"}
"""Names of torch.compile's errors on a host that lacks what it needs."""
TOO_SMALL = {"OutOfResources"}
"""Name of Triton's error on a device with too little shared memory."""
MARK = "FLOPWATCHED_BY"
"""Variable of the processes of an agent's jobs."""
UNSUPPORTED_DTYPE = re.compile(r"not implemented for '\w+'")
"""Part of torch's error for an operation that a device does not have for a data type: 'Half', 'BFloat16', …"""
NOT_BUILT = {"BuildError", "CompilerMissing"}
"""Names of the errors of our own C++."""


def seed_everything(seed: int) -> None:
    """Seed what code may draw from: `torch`, on every device, `random`, and NumPy's global generator."""
    import numpy as np
    import torch

    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)


def choose_device(device_type: str, precision: str = "fp32") -> torch.device:
    """Choose the device of this process, which sees only the job's devices. Raises Unsupported: there is no device of
    that type, or it lacks the precision; InvalidEnvironment: the job has a GPU that CUDA does not see. `device_type`:
    "auto", "cpu" or "cuda". `precision`: "fp32", "tf32", "bf16", "fp16" or "fp8", which the device must support."""
    import torch

    import kernels.device_events  # noqa: F401 - before the user's code, which may replace what it holds

    on_gpu = device_type != "cpu" and torch.cuda.is_available()
    if device_type != "cpu" and not on_gpu and MARK in os.environ and os.environ.get("CUDA_VISIBLE_DEVICES"):
        # The agent gave it one: it must not measure on the CPU instead.
        raise InvalidEnvironment("the job's process sees no GPU, although it has one")
    if device_type == "cuda" and not on_gpu:
        raise Unsupported("device cuda: this worker's process sees no GPU")
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    if reason := why_no_precision(device, precision):
        raise Unsupported(reason)
    if device.type == "cpu" and MARK in os.environ:
        bound_memory()
    return device


def why_no_precision(device: torch.device, precision: str) -> str | None:
    """Say why the device cannot compute in "fp32", "tf32", "bf16", "fp16" or "fp8"; None if it can."""
    import torch

    if device.type == "cpu":
        return "precision tf32 is a GPU format, and the job runs on a CPU" if precision == "tf32" else None
    if precision in {"tf32", "bf16"} and torch.cuda.get_device_capability(device) < (8, 0):
        return f"precision {precision} needs compute capability 8.0 or later"
    if precision == "fp8" and torch.cuda.get_device_capability(device) < (8, 9):
        return "precision fp8 needs compute capability 8.9 or later (Ada, Hopper): choose bf16"
    return None


def set_precision(precision: str) -> None:
    """Make this process compute in a precision; fail if the environment would override it. Raises InvalidEnvironment:
    the environment overrides the precision."""
    from workers.model.precision import PRECISIONS

    if precision == "tf32" and os.environ.get("NVIDIA_TF32_OVERRIDE") == "0":
        raise InvalidEnvironment("NVIDIA_TF32_OVERRIDE=0 is set, so that nothing here can compute in tf32")
    try:
        PRECISIONS[precision].apply()
    except RuntimeError as error:
        raise InvalidEnvironment(str(error)) from error


def load(registry: Registry, name: str) -> Any:
    """Load the implementation or model that `name` stands for. Raises Unsupported: this worker has no such name;
    InvalidEnvironment: an installed entry point is broken."""
    try:
        return registry.load(name)
    except UnknownName as error:
        raise Unsupported(str(error)) from error
    except RegistryError as error:
        raise InvalidEnvironment(str(error)) from error


def as_runner_error(error: BaseException) -> RunnerError | None:
    """Return the job's error for an error of torch, if its meaning is known."""
    from kernels.attention.library import NO_KERNEL

    causes = list(causes_of(error))
    if any(NO_KERNEL in text_of(cause) for cause in causes):
        return Unsupported(f"there is no such kernel for these inputs: {text_of(error)}")
    for cause in causes:
        if isinstance(cause, RuntimeError) and UNSUPPORTED_DTYPE.search(text_of(cause)):
            return Unsupported(f"torch lacks an operation for this data type on this device: {text_of(cause)}")
        if type(cause).__name__ in NO_COMPILER:
            return InvalidEnvironment(f"torch.compile does not work on this host: {text_of(cause)}")
        if type(cause).__name__ in TOO_SMALL:
            return Unsupported(f"this device is too small for it: {text_of(cause)}")
        if type(cause).__name__ in NOT_BUILT:
            return InvalidEnvironment(text_of(cause))
    return None


def check_device_answers(device: torch.device) -> None:
    """Check after an error that the device still computes. Raises Crashed: an illegal memory access, or the like, took
    this process's context with it."""
    from kernels.device_events import synchronize

    if device.type != "cuda":
        return
    try:
        synchronize(device)
    except RuntimeError as error:
        raise Crashed(" ".join(str(error).split("\n")[0].split())) from error


@contextmanager
def frozen_objects() -> Iterator[None]:
    """Keep the garbage collector from visiting the objects that live now."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def reset_process() -> None:
    """Free the memory and code that measuring left in this process, so that it does not affect what comes next.

    It frees garbage and cached memory, and compiled code with its guards: the compiler keeps only a few of these before
    it gives up or turns to dynamic shapes. Garbage that `gc.freeze` has hidden stays, until the caller unfreezes it.
    """
    gc.collect()
    if "torch" not in sys.modules:
        return
    import torch

    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    torch.cuda.empty_cache()
