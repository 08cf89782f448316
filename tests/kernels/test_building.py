"""How C++ is built: once for each content and compiler, by one process, and with errors that say what failed."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest

from kernels import building
from kernels.building import BuildError, CompilerMissing, Library

ROOT = Path(__file__).parents[2]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(folder))
    return folder


@pytest.fixture
def library(tmp_path: Path) -> Library:
    sources = tmp_path / "source"
    sources.mkdir()
    (sources / "answer.h").write_text("#define ANSWER 42\n")
    (sources / "answer.cpp").write_text('#include "answer.h"\nextern "C" int answer() { return ANSWER; }\n')
    return Library("answers", sources, "the answers", ("-O0",))


ANSWER = """
import ctypes, os, sys
from pathlib import Path
from kernels.building import BuildError, Library, cache_folder

library = Library("answers", Path(sys.argv[1]), "the answers", ("-O0",))

def answer():
    try:
        os.write(1, f"{ctypes.CDLL(str(library.file())).answer()}\\n".encode())
    except BuildError as error:
        os.write(1, f"{type(error).__name__} {error}\\n".encode())

def start():
    # A fork, since importing torch takes longer than building. This process has one thread, and computes nothing.
    if (pid := os.fork()) == 0:
        answer()
        os._exit(0)
    return pid

for count in (2, 1):
    for pid in [start() for _ in range(count)]:
        os.waitpid(pid, 0)
    print([file.stat().st_mtime_ns for file in cache_folder().glob("*/*.so")], flush=True)
"""


COUNTED = """#!/bin/sh
case " $* " in *" -shared "*) echo linked >> '{log}' ;; esac
exec c++ "$@"
"""
"""A compiler that counts the libraries it makes."""


def test_it_is_built_once(library: Library, cache: Path, tmp_path: Path) -> None:
    compiler, log = tmp_path / "counted-c++", tmp_path / "log"
    compiler.write_text(COUNTED.format(log=log))
    compiler.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", ANSWER, str(library.sources)],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "CXX": str(compiler),
            "OPENBLAS_NUM_THREADS": "1",  # NumPy's would start threads when it is imported
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    *racing, built, later, same = done.stdout.splitlines()
    assert [*racing, later] == ["42"] * 3
    assert len(json.loads(built)) == 1
    assert same == built
    assert log.read_text().splitlines() == ["linked"], "the one that waited takes what the other built"
    assert sorted(path.suffix for path in cache.iterdir()) == ["", ".lock"]  # nothing half-built is left


def make_empty_library(_library: Library, folder: Path, _lock: int) -> None:
    """In a build's place."""
    assert list(folder.iterdir()) == [], "nothing of another build"
    (folder / "library.so").touch()


def test_files_of_a_killed_build_are_removed(library: Library, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Library, "_build", make_empty_library)
    built = library.file().parent
    built.rename(built.with_suffix(".building"))
    assert library.file().exists()
    assert sorted(path.suffix for path in cache.iterdir()) == ["", ".lock"]


@pytest.mark.usefixtures("cache")
def test_another_version_of_the_compiler_builds_anew(library, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(Library, "_build", make_empty_library)
    compiler = tmp_path / "c++"
    monkeypatch.setenv("CXX", str(compiler))
    files = []
    for version in ("12.2.0", "12.2.0", "14.1.0"):
        compiler.write_text(f"#!/bin/sh\necho g++ {version}\n")
        compiler.chmod(0o755)
        files.append(library.file())
    assert files[0] == files[1] != files[2]


@pytest.mark.usefixtures("cache")
def test_without_a_compiler_the_error_says_so(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(CompilerMissing, match=r"(?s)^the answers are C\+\+.*'no-such-compiler'.*g\+\+"):
        library.file()


def test_a_failed_build_says_what_failed_and_leaves_nothing(library, cache, tmp_path, monkeypatch) -> None:
    compiler = tmp_path / "c++"  # answers questions about itself, and compiles nothing
    compiler.write_text(f'#!/bin/sh\n[ $# -gt 2 ] || exec {shutil.which("c++")} "$@"\necho out of order >&2\nexit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(BuildError, match=r"(?s)building the answers failed.*out of order"):
        library.file()
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_the_cache_is_by_all_that_determines_a_build(library, tmp_path, monkeypatch) -> None:
    """Headers of other projects count by their content, so that environments share a build."""

    def with_header(folder: str, header: str) -> str:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "other.h").write_text(header)
        return replace(library, include_folders=(str(tmp_path / folder),))._digest()

    copy = replace(library, sources=shutil.copytree(library.sources, tmp_path / "copy"))
    assert copy._digest() == library._digest()
    assert with_header("here", "old") == with_header("there", "old")
    (copy.sources / "answer.h").write_text("changed")
    others = [copy, replace(library, compiler_flags=("-O1",)), replace(library, linker_flags=("-lm",))]
    digests = [one._digest() for one in (library, *others)] + [with_header("older", "old"), with_header("newer", "new")]
    monkeypatch.setattr(sysconfig, "get_config_var", {"SOABI": "cpython-39-x86_64-linux-gnu"}.__getitem__)
    digests.append(library._digest())
    monkeypatch.setattr(building, "_processor", lambda: "flags: another")
    digests.append(library._digest())
    assert len(set(digests)) == len(digests)
