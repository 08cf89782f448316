"""Imports the code that users have uploaded for their jobs, in the process of a unit.

The agent writes a job's files to a folder of the job, each as `uploaded_<SHA-256>.py`, and names the folder in the
variable FOLDER, which the processes that a unit starts inherit. Of an uploaded folder, that file is a link to the one
that is meant. Only agents started with --allow-code do so.
"""

import builtins
import hashlib
import importlib.util
import inspect
import io
import linecache
import os
import re
import stat
import sys
import traceback
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from types import CodeType, ModuleType
from typing import Any

from app.specs._code import CodeSpec
from flopwatch.imports import clash, other_modules, own_modules
from flopwatch.packages import cure
from flopwatch.packing import MAX_BYTES, MAX_FILES, check_name, is_packed
from kernels.registry import DEVICES, DTYPES, FEATURES, Implementation
from workers import working_directory
from workers.measure import position
from workers.measure.errors import text_of
from workers.outcome import InvalidEnvironment, RunnerError, describe_error

FOLDER = "UPLOADED_CODE"
"""Variable: the folder of the job's uploaded files. It has no prefix of settings, which units do not inherit."""
UNPACKING_ERRORS = (zipfile.BadZipFile, zlib.error, ValueError, RuntimeError)  # a RuntimeError: it is encrypted
FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
"""A line of faulthandler's."""
STACK = re.compile(r"^Current thread 0x[0-9a-f]+.*\(most recent call first\):\n((?:  .*\n?)*)", re.MULTILINE)
"""The stack of the thread that got the signal, or crashed, as faulthandler writes it: others are waiting for it."""
NO_GPU = re.compile("Torch not compiled with CUDA|Found no NVIDIA driver|No CUDA GPUs are available")
SITES = frozenset(("site-packages", "dist-packages"))
"""Folders of installed packages. An installation that is none of them is of a checkout."""


class BrokenCode(RunnerError):
    """The uploaded code cannot be imported, or is not of the right kind. The job fails, since nothing else is at
    fault."""

    code = "failed"


def write(folder: Path, contents: Iterable[bytes]) -> dict[str, str]:
    """Write files where `load` finds them, folders unpacked; returns the variables to set for that. Raises BrokenCode:
    a packed folder is damaged, too large, or has files outside of itself."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    unpacked: dict[bytes, Path] = {}
    for content in contents:
        sha256 = hashlib.sha256(content).hexdigest()
        if is_packed(content):
            _unpack(content, folder / sha256, unpacked)
        else:
            (folder / f"{_name(sha256)}.py").write_bytes(content)
    return {FOLDER: str(folder)}


def _unpack(content: bytes, folder: Path, unpacked: dict[bytes, Path]) -> None:
    """Unpack a folder, or link it to the one of `unpacked` that differs in the file that is meant alone: a process
    imports its modules once."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            entries, entry_file = archive.infolist(), archive.comment.decode()
            if len(entries) > MAX_FILES or sum(entry.file_size for entry in entries) > MAX_BYTES:
                raise BrokenCode(f"the folder of code has more than {MAX_FILES} files or {MAX_BYTES >> 20} MiB")
            same = unpacked.setdefault(content[: -2 - len(archive.comment)], folder)
            if same != folder:
                folder.symlink_to(same)
            for entry in entries if same == folder else ():
                _check_place(entry)
                target = folder / entry.filename
                target.parent.mkdir(parents=True, exist_ok=True)
                # It reads no more than the size that was added up above, or raises.
                target.write_bytes(archive.read(entry))
    except UNPACKING_ERRORS as error:
        raise BrokenCode(f"the folder of code cannot be unpacked: {error}") from error
    except (FileExistsError, IsADirectoryError, NotADirectoryError):
        raise BrokenCode("the folder of code has a file and a folder of one name") from None
    if entry_file not in {entry.filename for entry in entries}:
        raise BrokenCode("the folder of code does not say which of its files is meant")
    (folder.parent / f"{_name(folder.name)}.py").symlink_to(folder / entry_file)


def _check_place(entry: zipfile.ZipInfo) -> None:
    """Raise BrokenCode or ValueError if a file of a folder would not be in it, or is no plain file, packed as
    `flopwatch.packing` packs."""
    check_name(entry.filename)
    if stat.S_IFMT(entry.external_attr >> 16) not in (0, stat.S_IFREG):
        raise BrokenCode(f"the folder of code has a link or a device: {entry.filename!r}")
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # others unpack more than is asked for
        raise BrokenCode(f"the folder of code is packed by another method than deflate: {entry.filename!r}")


def load(code: CodeSpec) -> Any:
    """Return the function or class, from its file, which this process imports once. Raises BrokenCode: the file cannot
    be imported, has no such name, or has something there that cannot be called; InvalidEnvironment: this process has no
    such file."""
    module = _module(code)
    try:
        loaded = getattr(module, code.function)
    except AttributeError:
        raise BrokenCode(f"{code.label()}: the file has no {code.function!r}") from None
    if not callable(loaded) and not isinstance(loaded, Implementation):
        raise BrokenCode(f"{code.label()}: {code.function!r} is of type {type(loaded).__name__}, and cannot be called")
    return loaded


def implementation(code: CodeSpec, of: str = "attention") -> Implementation:
    """Return an uploaded implementation of attention, or of another operation: a function, a torch.autograd.Function,
    or an Implementation that says what it takes. Raises BrokenCode, InvalidEnvironment: as `load`; or it is a class of
    another kind."""
    import torch

    loaded = load(code)
    if isinstance(loaded, Implementation):
        return replace(loaded, name=code.label(), of=of)
    if isinstance(loaded, type):
        if not issubclass(loaded, torch.autograd.Function):
            takes = "(q, k, v, is_causal)" if of == "attention" else "its inputs"
            raise BrokenCode(
                f"{code.label()}: {code.function!r} is a class, and {of} is a function of {takes}, or a "
                "torch.autograd.Function"
            )
        loaded = loaded.apply
    everywhere = dict.fromkeys(DEVICES, DTYPES)
    return Implementation(code.label(), loaded, dtypes=everywhere, features=_features(loaded), of=of)


def _features(function: Any) -> frozenset[str]:
    """Return the options of attention that a function has arguments for: all, if it ends with `**options`. Inputs with
    fewer key heads need none."""
    try:
        kinds = {name: argument.kind for name, argument in inspect.signature(function).parameters.items()}
    except (TypeError, ValueError):  # one in another language has no signature
        kinds = {}
    # (*args, **kwargs) is what any callable has that has no signature of its own, as Function.apply.
    if inspect.Parameter.VAR_KEYWORD in kinds.values() and inspect.Parameter.VAR_POSITIONAL not in kinds.values():
        return FEATURES
    documents = {"document_lengths"} if "document_ends" in kinds else set()
    return FEATURES & (kinds.keys() | documents | {"num_kv_heads"})


def content(code: CodeSpec) -> bytes:
    """Return the uploaded file. Raises InvalidEnvironment if this process has no such file."""
    try:
        found = path(code).read_bytes()
    except OSError as error:
        raise InvalidEnvironment(f"{code.label()}: its file is not here: {error.strerror}") from error
    if _folder(code).is_dir():
        return found  # its hash was that of the folder, which was unpacked for this job alone
    if hashlib.sha256(found).hexdigest() != code.sha256:
        raise InvalidEnvironment(f"{code.label()}: its file has changed since it was uploaded")
    return found


def run_as_main(source: bytes, name: str, arguments: Sequence[str], file: Path | None = None) -> None:
    """Run a script as `python NAME ARGUMENTS` would in its folder; it may end itself with exit code 0. Raises
    BrokenCode: it is not Python, or has ended itself with another exit code; Exception: whatever it raises. `name`: its
    name for people; its last part is `sys.argv[0]`. `file`: where it is, for what lies beside it and for processes that
    it spawns; None: nowhere."""
    module = ModuleType("__main__")
    before, sys.argv = sys.argv, [PurePosixPath(name).name, *arguments]
    module.__file__ = name if file is None else str(file)
    main, sys.modules["__main__"] = sys.modules["__main__"], module
    try:
        compiled = compile(source, name, "exec", dont_inherit=True)
        _remember_lines(Path(name), source)
        _execute(compiled, module)
    except SystemExit as end:
        if end.code not in (None, 0):
            how = f"with exit code {end.code}" if isinstance(end.code, int) else f"and said: {end.code}"
            raise BrokenCode(f"{name} has ended itself {how}") from end
    except SyntaxError as error:
        raise BrokenCode(f"{name}: {_describe(error, Path(name))}") from error
    finally:
        sys.argv, sys.modules["__main__"] = before, main


def path(code: CodeSpec) -> Path:
    """Return the uploaded file, or the one that is meant of an uploaded folder."""
    return (_files() / f"{_name(code.sha256)}.py").resolve()


def _shown(code: CodeSpec) -> Path:
    """Return the path by which stacks and tracebacks name the file: with the name that its author gave it."""
    if code.file is None or _folder(code).is_dir():
        return path(code)
    return _files() / code.sha256[:8] / PurePosixPath(code.file).name


def own_name(file: str, code: Sequence[CodeSpec]) -> str | None:
    """Return the name that the author gave to a file of uploaded code: `train.py`, or its path in the folder; None for
    any other file."""
    for one in code:
        folder = _folder(one)
        for root in {folder, folder.resolve()}:
            if folder.is_dir() and Path(file).is_relative_to(root):
                return Path(file).relative_to(root).as_posix()
        if file in (str(_shown(one)), str(path(one))):
            return path(one).name if one.file is None else PurePosixPath(one.file).name
    return None


def describe(error: BaseException, text: str | None = None) -> str:
    """Return an error, by default with its own text, with `place_of`, the step in which it was raised, and what to do
    about it."""
    here, place = position.here(), place_of(error)
    step = f", {here}" if here.inside else ""
    return describe_error(error, text) + place + step + (lacking_file(error) or (_advice(error) if place else ""))


def place_of(error: BaseException) -> str:
    """Return the innermost place of the user's code in an error's traceback: " (train.py:12, in step)"; "": none is."""
    code = getattr(error, "code", None)  # of a NoStep, whose code has not run
    if isinstance(code, CodeType) and FOLDER in os.environ and (own := _name_below(code.co_filename, _files())):
        return f" ({own}:{code.co_firstlineno}, in {code.co_name})"
    for frame, line in reversed([*traceback.walk_tb(error.__traceback__)]):
        name: str | None = (file := frame.f_code.co_filename)
        if frame.f_globals.get("__name__") != "__main__":  # a script has its author's name already
            name = _name_below(file, _files()) if FOLDER in os.environ else None
        if name is not None:
            return f" ({name}:{line}, in {frame.f_code.co_name})"
    return ""


def places_in(stacks: Iterable[tuple[str, str]], files: Path | None = None) -> str:
    """Return the innermost places of the user's code in stacks that faulthandler wrote: " (rank 0: train.py:12, in
    step)"; "": none is. `stacks`: for each process a name, "rank 0: ", and a text, of which the last stacks count.
    `files`: the folder of the uploaded files; None: that of this process."""
    places = [name + place for name, text in stacks if (place := _place_in(text, files or _files()))]
    return f" ({'; '.join(places)})" if places else ""


def _place_in(text: str, files: Path) -> str | None:
    *_, stack = ["", *STACK.findall(text)]
    for file, line, function in FRAME.findall(stack):
        is_of_script = not file.startswith("<") and not Path(file).is_absolute()
        if name := file if is_of_script else _name_below(file, files):
            return f"{name}:{line}, in {function}"
    return None


def _name_below(file: str, files: Path) -> str | None:
    """Return the name of a file in the folder of uploaded ones as its author gave it; None for any other file."""
    # Generated code has no path, and resolving one needs the working folder, which may be gone.
    if not Path(file).is_absolute() or not (path := Path(file).resolve()).is_relative_to(root := files.resolve()):
        return None
    return "/".join(path.relative_to(root).parts[1:]) or path.name


def _name(sha256: str) -> str:
    """Return the module's name. By it the processes that the code spawns import the module again."""
    return f"uploaded_{sha256}"


def _files() -> Path:
    return Path(os.environ.get(FOLDER, ""))


def _folder(code: CodeSpec) -> Path:
    return _files() / code.sha256


def settle(code: CodeSpec) -> None:
    """Let this process import and find files as `python FILE` does in the file's folder: of an uploaded folder, that
    place is the working directory."""
    let_import(code)
    _enter(code)


def _enter(code: CodeSpec) -> None:
    if _folder(code).is_dir():
        working_directory.enter(path(code).parent)


def let_import(code: CodeSpec) -> None:
    """Put an uploaded folder first on sys.path, before it the folder of its file, as Python does for a script, and
    after it the `src` from which it imports; the folder of uploaded files last. Raises BrokenCode: the code imports a
    module of its folder, and Python would give it another one of that name, and measure that."""
    folder, file = _folder(code).resolve(), path(code)
    if folder.is_dir():
        own = own_modules(folder, str(file.relative_to(folder)))
        src = [folder / "src"] if "src" in own.values() else []
        for place in dict.fromkeys(map(str, (*src, folder, file.parent))):
            if place not in sys.path:
                sys.path.insert(0, place)
        found = {name: _found(folder / own[name], name) for name in sorted(own)}
        clashing = {name: each for name, each in found.items() if each is not None and _is_elsewhere(name, folder)}
        if clashing:
            files = [str(each.relative_to(folder)) for each in clashing.values()]
            raise BrokenCode(clash(code.label(), [*clashing], files))
    if (uploads := str(_files())) not in sys.path:
        sys.path.append(uploads)


def _found(place: Path, name: str) -> Path | None:
    """Return the file or the folder of a module in a folder; None of a folder without an __init__.py, which Python
    takes last."""
    package = place / name
    if (package / "__init__.py").is_file():
        return package
    return file if (file := place / f"{name}.py").is_file() else None


def _is_elsewhere(name: str, folder: Path) -> bool:
    """Return whether Python gives, by this name, no module of the folder: one that is loaded, or that the finder of an
    installation gives before those on sys.path."""
    file = _file_of(name)
    return file is None or not file.is_relative_to(folder)


def _file_of(name: str) -> Path | None:
    """Return the file of the module that Python gives by a name; None of none, or of one that is built in."""
    module = sys.modules.get(name)
    spec = importlib.util.find_spec(name) if module is None else None
    file = getattr(module, "__file__", None) if spec is None else spec.origin
    return None if file is None else Path(file).resolve()


def check_installed(code: CodeSpec) -> None:
    """Raise BrokenCode if the code imports what is installed of a checkout, and its folder has a module of that name
    where Python does not look: each version would measure the checkout."""
    folder, file = _folder(code).resolve(), path(code)
    if not folder.is_dir():
        return
    for name in sorted(other_modules(folder, str(file.relative_to(folder)))):
        own = next((each for end in (".py", "/__init__.py") for each in folder.rglob(f"{name}{end}")), None)
        used = _file_of(name) if own is not None else None
        if own is None or used is None or used.is_relative_to(folder) or SITES & {*used.parts}:
            continue
        place = os.path.relpath(own.parents[own.name == "__init__.py"], file.parent)
        raise BrokenCode(
            f"{code.label()} imports {name!r}, which Python finds in {used.parent}, and not {own.relative_to(folder)} "
            f"of its folder: begin the file with `import sys; sys.path.insert(0, {place!r})`"
        )


def _lacking(error: BaseException) -> str | None:
    """Return what to do about a module that is not there; None if the error is another one."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return None
    module = error.name.partition(".")[0]
    in_folder = "put it into the folder that goes along, and let git track it"
    own = in_folder if any(_files().glob("*/")) else "send its folder along with --code FOLDER"
    return cure(module, own) or f"install {module!r} for the worker, or if it is yours {own}"


def _advice(error: BaseException) -> str:
    """Return what to do about an error of the user's code that has a known cause: "; …", or ""."""
    advice = _lacking(error)
    if NO_GPU.search(text_of(error)):
        advice = "the job has no GPU: let the code use the device that it is given, or submit it with device=cuda"
    return f"; {advice}" if advice else ""


def lacking_file(error: BaseException) -> str:
    """Return what to do about a file that is not where uploaded code has looked for it: "; …", or "" if it looked
    outside of its working directory, or for none."""
    file = error.filename if isinstance(error, FileNotFoundError) and FOLDER in os.environ else None
    if not isinstance(file, str) or (Path(file).is_absolute() and not Path(file).is_relative_to(_files().parent)):
        return ""
    if any(_files().glob("*/")):
        return (
            "; the job runs in a copy of the folder that went along, which of a git repository has the tracked files "
            "only: name others, such as data, by absolute paths"
        )
    return "; the job runs in an empty folder: send yours along with --code FOLDER, or name files by absolute paths"


def _module(code: CodeSpec) -> ModuleType:
    name = _name(code.sha256)
    if name in sys.modules:
        _enter(code)  # other code of this process may have been loaded since
        return sys.modules[name]
    shown, source = _shown(code), content(code)
    settle(code)
    spec = importlib.util.spec_from_file_location(name, path(code))
    assert spec is not None
    # Registered before it runs, as Python does: dataclasses and pickles look for their module there.
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        # The very bytes whose hash was checked: the loader would read the file a second time.
        compiled = compile(source, str(shown), "exec", dont_inherit=True)
        _remember_lines(shown, source)
        _execute(compiled, module)
        check_installed(code)
    except BrokenCode:
        del sys.modules[name]
        raise
    except Exception as error:
        del sys.modules[name]
        traceback.print_exception(error)
        broken = BrokenCode if _lacking(error) is None else InvalidEnvironment
        raise broken(f"{code.label()} cannot be imported: {_describe(error, shown)}") from error
    return module


def _execute(compiled: CodeType, module: ModuleType) -> None:
    """Run a module's code. Without builtins of its own it would get this module's, whose `__import__` finds ours."""
    module.__dict__["__builtins__"] = builtins
    exec(compiled, vars(module))  # noqa: S102  # only under --allow-code


def _remember_lines(path: Path, content: bytes) -> None:
    """Give tracebacks and `inspect.getsource` the lines that run, whatever becomes of the file."""
    # As Python counts lines: `splitlines` would also end them at form feeds and other separators inside of them.
    lines = io.StringIO(importlib.util.decode_source(content)).readlines()
    # An entry without a time of modification is never compared to the file's.
    linecache.cache[str(path)] = len(content), None, lines, str(path)


def _describe(error: Exception, path: Path) -> str:
    """Return the error with the line of the uploaded file in which it was raised."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f"{type(error).__name__}: {error.msg}, line {error.lineno}"
    return describe(error)
