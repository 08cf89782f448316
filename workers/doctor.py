"""Examines what a worker needs on this host, for `flopwatch doctor`. Prints each finding at once, as a line of JSON.

Nothing here may be assumed to be installed, and each check stands alone: what one finds broken, the next may not need.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from app.checkup import Finding, absent, broken, works
from kernels.registry import ATTENTION, RegistryError
from workers import tools
from workers.installed import NEEDED
from workers.outcome import Unsupported
from workers.torch_host import as_runner_error

COMPILED = ("compiled", "flex")
"""Attention implementations that torch.compile makes, which takes long."""
TOLERANCE = 3e-2
OFTEN_NEWER = ("torch", "triton")
"""What an environment often has a newer version of than Flopwatch was tested with; that is no fault."""
NEW_ENVIRONMENT = "install Flopwatch into an environment of its own: python -m venv .venv; .venv/bin/pip install …"
INSTALL_COMPILER = "install one (Debian: apt-get install g++), or name it in CXX and CC"


def main(slurm_settings: Path | None = None) -> None:
    """Examine this host; if there is a file with settings for Slurm, that cluster, too."""
    checks: list[Callable[[], Iterator[Finding]]] = [_requirements, _compiler, _driver, _tools, _torch]
    if slurm_settings is not None:
        checks.append(functools.partial(_slurm, slurm_settings))
    for check in checks:
        try:
            for finding in check():
                print(json.dumps(finding.as_json()), flush=True)
        except Exception as error:  # noqa: BLE001 - a broken installation can raise anything
            name = getattr(check, "__name__", "slurm").strip("_")
            finding = broken(name, f"{type(error).__name__}: {error}", NEW_ENVIRONMENT)
            print(json.dumps(finding.as_json()), flush=True)


def _slurm(file: Path) -> Iterator[Finding]:
    from workers.slurm.check import examine

    return examine(file)


def _requirements() -> Iterator[Finding]:
    """Compare the installed versions with those that Flopwatch and torch ask for."""
    from packaging.requirements import Requirement

    fit = True
    owners = [("flopwatch", {"", "worker", "triton", "fp8"}), ("torch", {""})]
    for owner, extras in owners:
        try:
            asked = importlib.metadata.requires(owner) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for requirement in map(Requirement, asked):
            marker = requirement.marker
            if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in extras):
                continue
            try:
                version = importlib.metadata.version(requirement.name)
            except importlib.metadata.PackageNotFoundError:
                continue  # below, where it matters
            name, asked_for = requirement.name, requirement.specifier
            if asked_for.contains(version, prereleases=True):
                continue
            cure = f"pip install '{name}{asked_for}'"
            is_newer = all(one.operator == "<" or one.contains(version, prereleases=True) for one in asked_for)
            if owner == "flopwatch" and name in OFTEN_NEWER and is_newer:
                found = f"{version} is newer than the versions that Flopwatch was tested with ({asked_for})"
                yield absent(name, found, f"if something fails with it: {cure}")
                continue
            fit = False
            yield broken(name, f"{name} {version} is installed, and {owner} needs {asked_for}", cure)
    lacking = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if lacking:
        found = f"no {', '.join(lacking)}: this host can run a server, and no worker"
        yield absent("worker", found, "pip install 'flopwatch[worker]'")
    elif fit:
        yield works("worker", f"Python {platform.python_version()}, and what a worker needs")


def _compiler() -> Iterator[Finding]:
    """C++ kernels, Triton and torch.compile need one; a server does not."""
    if importlib.util.find_spec("torch") is None:
        return
    cxx, cc = os.environ.get("CXX") or "c++", os.environ.get("CC")
    found = {"C++": _first_line(cxx), "C": _first_line(*([cc] if cc else ["gcc", "clang", "cc"]))}
    missing = [language for language, line in found.items() if line is None]
    if missing:
        without = "cpu_* attention, Triton kernels and torch.compile do not run"
        yield broken("compiler", f"no {' and no '.join(missing)} compiler: {without}", INSTALL_COMPILER)
    else:
        yield works("compiler", str(found["C++"]))


def _first_line(*commands: str) -> str | None:
    for command in commands:
        path = shutil.which(command.split()[0])
        if path is not None and (answer := tools.version_text(path)) is not None:
            return next(iter(answer.splitlines()), command)
    return None


def _driver() -> Iterator[Finding]:
    if importlib.util.find_spec("pynvml") is None:
        return
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        yield absent("driver", f"no NVIDIA GPU can be seen ({error}): jobs run on the CPU")
        return
    version, cuda = pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlSystemGetCudaDriverVersion_v2()
    handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
    names = [pynvml.nvmlDeviceGetName(handle) for handle in handles]
    gpus = ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names)) or "no GPU"
    yield works("driver", f"{version}, for CUDA up to {cuda // 1000}.{cuda % 1000 // 10}: {gpus}")


def _tools() -> Iterator[Finding]:
    found = tools.installed()
    text = ", ".join(f"{tool.name} {tool.version or ''}".strip() for tool in found.values())
    if text:
        yield works("profilers", text)
    else:
        cure = "for jobs that ask for nsys or ncu, install Nsight Systems and Nsight Compute"
        yield absent("profilers", "neither nsys nor ncu", cure)


def _torch() -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    from workers.devices.discovery import has_gpu

    built_for = torch.version.cuda
    if torch.cuda.is_available():
        capability = "{}.{}".format(*torch.cuda.get_device_capability())
        yield works("cuda", f"torch {torch.__version__} for CUDA {built_for}; compute capability {capability}")
    elif has_gpu():
        if built_for is None:
            found, cure = f"torch {torch.__version__} is a CPU build, and here is a GPU", "install torch for CUDA"
        else:
            found = f"torch {torch.__version__} for CUDA {built_for} sees no GPU"
            cure = "update the driver, or install torch for an older CUDA; is CUDA_VISIBLE_DEVICES empty?"
        yield broken("cuda", found, cure)
    else:
        yield absent("cuda", f"torch {torch.__version__}: no GPU")
    distributed: Any = torch.distributed
    nccl: Any = torch.cuda.nccl
    if distributed.is_available() and distributed.is_nccl_available() and torch.cuda.is_available():
        yield works("nccl", ".".join(map(str, nccl.version())))
    elif torch.cuda.is_available():
        yield broken("nccl", "torch has none: ddp and collective need it on GPUs", "install torch from its own wheels")
    else:
        yield absent("nccl", "no GPU: ddp and collective run over gloo")
    yield from _triton(torch)
    yield from _torchao()
    yield from _attention(torch)


def _triton(torch: Any) -> Iterator[Finding]:
    from kernels.versions import attention_kernels, why_not_hopper

    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        yield absent("triton", "not installed: kernels in Triton do not run", "pip install 'flopwatch[triton]'")
        return
    if not torch.cuda.is_available():
        yield absent("triton", f"{version}: without a GPU its kernels do not run")
        return
    device = torch.device("cuda", torch.cuda.current_device())
    why = why_not_hopper(device)
    if why is not None:
        yield absent("triton", why, "for the faster kernels, install a torch that brings a verified Triton")
    else:
        yield works("triton", f"{version}: attention `triton` runs the kernels `{attention_kernels(device)}`")


def _torchao() -> Iterator[Finding]:
    from workers.model.float8 import NoFloat8, float8

    try:
        float8()
    except NoFloat8 as error:
        yield absent("torchao", f"precision fp8 {error}")
    else:
        yield works("torchao", f"{importlib.metadata.version('torchao')}: precision fp8")


def _attention(torch: Any) -> Iterator[Finding]:
    """Run each implementation once, and compare it with plain attention."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (torch.randn(1, 2, 128, 64, device=device, generator=generator).to(dtype) for _ in range(3))
    expected = torch.softmax(q.float() @ k.float().mT / 64**0.5, -1) @ v.float()
    run, elsewhere, told = [], [], set()
    for name in ATTENTION.names():
        if name in COMPILED and device.type == "cpu":
            continue  # minutes of compiling, which tell no more than the compiler's own finding
        finding = _tried(name, (q, k, v), expected)
        if finding is None:
            run.append(name)
        elif finding.state == "absent":
            elsewhere.append(finding.found)
        elif finding.found not in told:  # without a compiler, several say the same
            told.add(finding.found)
            yield finding
    if elsewhere:
        yield absent("attention", "do not run here: " + "; ".join(elsewhere))
    if run:
        yield works("attention", f"on {device.type} these run, and are right: {', '.join(run)}")
    else:
        yield broken("attention", f"no implementation runs on {device.type}", NEW_ENVIRONMENT)


def _tried(name: str, inputs: Sequence[Any], expected: Any) -> Finding | None:
    """Return why an implementation does not run, or is wrong; None if it runs and is right."""
    from kernels.building import BuildError

    device, dtype = inputs[0].device.type, str(inputs[0].dtype).removeprefix("torch.")
    try:
        implementation = ATTENTION.load(name)
        if implementation.why_not(device, dtype, backward=False) is not None:
            return absent(name, name)
        error = (implementation.function(*inputs, False).float() - expected).abs().max().item()
    except BuildError as missing:
        return broken(name, str(missing), INSTALL_COMPILER)
    except (RegistryError, ImportError, NotImplementedError, ValueError) as missing:
        return absent(name, f"{name} ({missing})")
    except Exception as failed:  # noqa: BLE001 - a kernel can raise anything
        runner_error = as_runner_error(failed)
        if isinstance(runner_error, Unsupported):
            return absent(name, f"{name} ({runner_error})")
        return broken(name, f"attention {name} fails: {type(failed).__name__}: {failed}", NEW_ENVIRONMENT)
    if not error <= TOLERANCE:
        return broken(name, f"attention {name} is wrong: its largest error is {error:.3g}", NEW_ENVIRONMENT)
    return None
