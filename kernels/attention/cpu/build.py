"""Builds the C++ of this folder on first use, with torch's own machinery, and loads it.

The library is plain C functions over pointers: neither Python's nor torch's headers are needed, and it builds in
seconds. A cache keeps it under a name made of all that determines its content, so each host builds a version once, in
one process at a time; a host with a filled cache needs no compiler.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

SOURCES = Path(__file__).with_name("source")
NAME = "flopwatch_cpu_attention"
COMPILER_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-Wall", "-Wextra")
"""Flags of all implementations. No -ffast-math: NaN and infinity must come through."""
LINKER_FLAGS = ("-fopenmp",)

_building = threading.Lock()


class BuildError(RuntimeError):
    """The C++ implementations of attention could not be built on this host; the message says why."""


class CompilerMissing(BuildError):
    """There is no C++ compiler, and no library in the cache."""


class Problem(ctypes.Structure):
    """`Problem` of source/problem.h: the same fields in the same order; `_check_problem` checks that."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("batch", "heads", "key_heads", "queries", "keys", "head_dim", "br", "bc", "is_causal", "threads")
    ]


@functools.cache
def library() -> ctypes.CDLL:
    """Return the library, with its functions' types set; build it now if the cache has none.

    Raises:
        CompilerMissing: no compiler (`c++`, or what CXX names).
        BuildError: the compiler or ninja failed; the message ends with their output.
        OSError: the cache (TORCH_EXTENSIONS_DIR, or ~/.cache/flopwatch) cannot be written.
    """
    with _building:
        loaded = ctypes.CDLL(str(_built(cache_folder())))
    _check_problem(loaded)
    pointer, problem = ctypes.c_void_p, ctypes.POINTER(Problem)
    for name, tensors in {"naive": 5, "blocked": 5, "fused": 5, "flash": 6, "flash_backward": 10}.items():
        function, scratch = getattr(loaded, name), getattr(loaded, f"{name}_scratch")
        function.argtypes, function.restype = [problem, *[pointer] * tensors], None
        scratch.argtypes, scratch.restype = [problem], ctypes.c_int64
    return loaded


def _check_problem(loaded: ctypes.CDLL) -> None:
    """Check that C++ and Python have the same layout of a Problem.

    Raises:
        BuildError: the layouts differ, so that every call would read wrong sizes.
    """
    loaded.problem_fields.restype, loaded.problem_bytes.restype = ctypes.c_char_p, ctypes.c_int64
    theirs = loaded.problem_fields().decode().split(), loaded.problem_bytes()
    ours = [name for name, *_ in Problem._fields_], ctypes.sizeof(Problem)
    if theirs != ours:
        raise BuildError(f"Problem is {theirs} in source/problem.h and {ours} in build.py: make them the same")


def cache_folder() -> Path:
    """Return the folder of built libraries: in TORCH_EXTENSIONS_DIR if that is set, as for torch's own extensions."""
    if extensions := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(extensions)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flopwatch"


def _built(cache: Path) -> Path:
    """Return the library's file in the cache; a build moves it there when it is complete."""
    compiler = _compiler()
    if compiler is None:
        return _built_by_any_compiler(cache)
    folder = cache / f"{NAME}-{_digest()}-{hashlib.sha256(compiler.encode()).hexdigest()[:8]}"
    file = folder / f"{NAME}.so"
    if file.exists():
        return file
    cache.mkdir(parents=True, exist_ok=True)
    # The operating system releases this lock when its holder dies. torch's own lock file would stay, and others would
    # wait for it.
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            scratch = folder.with_suffix(".building")
            shutil.rmtree(scratch, ignore_errors=True)  # left by a build that was killed: we hold its lock
            scratch.mkdir()
            try:
                _build(scratch)
                folder.mkdir(exist_ok=True)
                next(scratch.glob("*.so")).replace(file)
            finally:
                shutil.rmtree(scratch)
    return file


def _built_by_any_compiler(cache: Path) -> Path:
    """Return the newest library in the cache that differs only in its compiler.

    Raises:
        CompilerMissing: there is none, and no compiler to build one.
    """
    files = cache.glob(f"{NAME}-{_digest()}-*/{NAME}.so")
    newest = max(files, key=lambda file: file.stat().st_mtime_ns, default=None)
    if newest is None:
        raise CompilerMissing(
            f"the cpu_* attention implementations are C++ and there is no compiler {_compiler_name()!r} on this host: "
            "install one (Debian: g++), or name it in CXX"
        )
    return newest


def _compiler_name() -> str:
    return os.environ.get("CXX") or "c++"


def _compiler() -> str | None:
    """Return the compiler's version text, since another version builds another library. None if there is no compiler.

    Raises:
        BuildError: the compiler does not answer.
    """
    if shutil.which(_compiler_name()) is None:
        return None
    command = [_compiler_name(), "--version"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"building the cpu_* attention implementations failed: {error}") from error


def _build(folder: Path) -> None:
    # Imported here, since the import looks for CUDA's toolkit, and only a first use needs it.
    from torch.utils import cpp_extension

    with _ninja_on_path():
        try:
            cpp_extension.load(
                name=NAME,
                sources=[str(source) for source in sorted(SOURCES.glob("*.cpp"))],
                extra_cflags=list(COMPILER_FLAGS),
                extra_ldflags=list(LINKER_FLAGS),
                build_directory=str(folder),
                with_cuda=False,
                is_python_module=False,
            )
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:  # ninja's carries the compiler's output
            raise BuildError(f"building the cpu_* attention implementations failed: {error}") from error


@contextmanager
def _ninja_on_path() -> Iterator[None]:
    """Let torch find the ninja that is installed beside this interpreter, also if its environment is not active."""
    former = os.environ.get("PATH", os.defpath)
    os.environ["PATH"] = os.pathsep.join([former, str(Path(sys.executable).parent)])
    try:
        yield
    finally:
        os.environ["PATH"] = former


def _digest() -> str:
    """Hash all that determines the library except the compiler: sources, flags, torch, and the CPU (-march=native)."""
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    about = (COMPILER_FLAGS, LINKER_FLAGS, torch.__version__, platform.machine(), _processor())
    digest.update(repr(about).encode())
    return digest.hexdigest()[:16]


def _processor() -> str:
    """Return the CPU's features, as Linux lists them; hosts with different CPUs may share a cache in a home folder."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("flags", "Features")):
            return line
    return ""
