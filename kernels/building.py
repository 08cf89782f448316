"""Builds C++ libraries on first use, with torch's own machinery, and keeps them in a cache.

A library's name in the cache is a hash of everything that determines its content, so a host builds each version once,
in one process at a time.
"""

import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import threading
from dataclasses import dataclass
from pathlib import Path

import torch

BUILD = "import json, sys; from torch.utils import cpp_extension; cpp_extension.load(**json.loads(sys.argv[1]))"

_building = threading.Lock()
"""One build at a time in this process; a file lock excludes builds of other processes."""


class BuildError(RuntimeError):
    """A C++ library could not be built on this host; the message says why."""


class CompilerMissing(BuildError):
    """There is no C++ compiler."""


@dataclass(frozen=True)
class Library:
    """C++ sources in a folder, and how they are built."""

    name: str
    """The built file's name, without `.so`."""
    sources: Path
    """The folder: each *.cpp in it is compiled, and a change of any file in it leads to another build."""
    what: str
    """The library's purpose: a plural that messages start with, such as "the cpu_* attention implementations"."""
    compiler_flags: tuple[str, ...]
    linker_flags: tuple[str, ...] = ()
    include_folders: tuple[str, ...] = ()
    """Folders of other projects' headers. A change of a file that lies directly in one leads to another build, too."""

    def file(self) -> Path:
        """Return the built file; build it now if the cache has none.

        Raises:
            CompilerMissing: no compiler (`c++`, or what CXX names).
            BuildError: the compiler or ninja failed; the message ends with their output.
            OSError: the sources cannot be read, or the cache (TORCH_EXTENSIONS_DIR, or ~/.cache/flopwatch) not written.
        """
        with _building:
            return self._built(cache_folder())

    def _built(self, cache: Path) -> Path:
        """Return the library's file in the cache; a build moves it there when it is complete."""
        compiler = hashlib.sha256(self._compiler().encode()).hexdigest()[:8]
        folder = cache / f"{self.name}-{self._digest()}-{compiler}"
        file = folder / f"{self.name}.so"
        if file.exists():
            return file
        cache.mkdir(parents=True, exist_ok=True)
        # The operating system releases this lock when its holder dies. torch's own lock file would stay, and block
        # other processes.
        with folder.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not file.exists():
                scratch = folder.with_suffix(".building")
                shutil.rmtree(scratch, ignore_errors=True)  # left by a build that was killed: we hold its lock
                scratch.mkdir()
                try:
                    self._build(scratch, lock.fileno())
                    folder.mkdir(exist_ok=True)
                    next(scratch.glob("*.so")).replace(file)
                finally:
                    shutil.rmtree(scratch)
        return file

    def _compiler(self) -> str:
        """Return the compiler's version text, since another version builds another library. Raises CompilerMissing;
        BuildError: the compiler does not answer."""
        if shutil.which(_compiler_name()) is None:
            raise CompilerMissing(
                f"{self.what} are C++ and there is no compiler {_compiler_name()!r} on this host: "
                "install one (Debian: g++), or name it in CXX"
            )
        command = [_compiler_name(), "--version"]
        try:
            return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        except (OSError, subprocess.SubprocessError) as error:
            raise BuildError(f"building {self.what} failed: {error}") from error

    def _build(self, folder: Path, lock: int) -> None:
        settings = {
            "name": self.name,
            "sources": [str(source) for source in sorted(self.sources.glob("*.cpp"))],
            "extra_cflags": self.compiler_flags,
            "extra_ldflags": self.linker_flags,
            "extra_include_paths": self.include_folders,
            "build_directory": str(folder),
            "with_cuda": False,
            "is_python_module": False,
        }
        # In a process of its own, since torch remembers builds by name, even interrupted ones. That process also holds
        # the lock, since it continues if this one is killed. It imports no modules of the current folder (-P), and gets
        # ninja from this interpreter's folder, even if the environment is not active.
        path = os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])
        command = [sys.executable, "-P", "-c", BUILD, json.dumps(settings)]
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "PATH": path}, pass_fds=(lock,), check=False
        )
        if done.returncode:
            raise BuildError(f"building {self.what} failed: {done.stdout}{done.stderr}")

    def _digest(self) -> str:
        """Hash everything that determines the library except the compiler: the sources, the flags, torch, Python's
        binary interface (extension modules depend on it) and the CPU (-march=native). Headers count by their content,
        so that environments share a build."""
        digest = hashlib.sha256()
        for folder in (self.sources, *map(Path, self.include_folders)):
            for file in sorted(path for path in folder.iterdir() if path.is_file()):
                digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
        flags = (self.compiler_flags, self.linker_flags)
        host = (torch.__version__, sysconfig.get_config_var("SOABI"), platform.machine(), _processor())
        digest.update(repr((flags, host)).encode())
        return digest.hexdigest()[:16]


def cache_folder() -> Path:
    """Return the folder of built libraries: in TORCH_EXTENSIONS_DIR if that is set, as for torch's own extensions."""
    if extensions := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(extensions)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flopwatch"


def _compiler_name() -> str:
    return os.environ.get("CXX") or "c++"


def _processor() -> str:
    """Return the CPU's features, as Linux lists them; hosts with different CPUs may share a cache in a home folder."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("flags", "Features")):
            return line
    return ""
