"""Importing uploaded code: what is wrong with it is said in one sentence, with the line."""

import errno
import functools
import hashlib
import importlib.util
import io
import json
import os
import re
import stat
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.specs._code import CodeSpec
from kernels.registry import FEATURES
from workers import uploaded
from workers.measure import position
from workers.outcome import InvalidEnvironment
from workers.uploaded import BrokenCode

Put = Callable[..., CodeSpec]


@pytest.fixture
def put(upload) -> Put:
    """Upload a source, and name a function in it."""
    return lambda source, function="attention": CodeSpec(**upload(source, function))


@pytest.mark.parametrize(
    ("source", "function", "words"),
    [
        ("def attention(:\n", "attention", "SyntaxError: invalid syntax, line 1"),
        ("x = 1\n\n\ny = x / 0\n", "attention", "ZeroDivisionError: division by zero (mine.py:4, in <module>)"),
        ("def mine():\n    pass\n", "attention", "the file has no 'attention'"),
        ("attention = 7\n", "attention", "is of type int, and cannot be called"),
        ("class attention:\n    pass\n", "attention", "is a class, and attention is a function"),
    ],
    ids=["syntax", "raises", "misspelt", "number", "class"],
)
def test_broken_code_fails_with_the_reason(put: Put, source: str, function: str, words: str) -> None:
    with pytest.raises(BrokenCode, match=re.escape(words)) as caught:
        uploaded.implementation(put(source, function))
    assert caught.value.code == "failed"


def test_a_module_that_is_not_there_is_named_with_what_to_do(put: Put) -> None:
    with pytest.raises(InvalidEnvironment, match=r"No module named 'not_there' \(mine.py:2, in <module>\)") as caught:
        uploaded.load(put("import math\nimport not_there.inside\n"))
    assert "; install 'not_there' for the worker, or if it is yours send its folder along" in str(caught.value)


@pytest.mark.parametrize(
    ("body", "advice"),
    [
        ("import not_there", "; install 'not_there' for the worker, or if it is yours send its folder along"),
        ("raise AssertionError('Torch not compiled with CUDA enabled')", "; the job has no GPU: let the code use the"),
        ("raise RuntimeError('No CUDA GPUs are available')", "; the job has no GPU"),
    ],
)
def test_an_error_in_a_step_has_what_to_do_and_the_step(put: Put, body: str, advice: str) -> None:
    step = uploaded.load(put(f"def step():\n    {body}\n", "step"))
    position.step_begins(6)
    try:
        with pytest.raises(Exception, match=r"not_there|CUDA") as caught:
            step()
        described = uploaded.describe(caught.value)
    finally:
        position.step_ends()
    assert f"(mine.py:2, in step), in step 6{advice}" in described
    assert "in step 6" not in uploaded.describe(caught.value), "the step is over"


def packed(files: dict[str, str], comment: str = "pkg/train.py", method: int = 0, **mode: int) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, text in files.items():
            entry = zipfile.ZipInfo(name)
            entry.external_attr = mode.get("mode", stat.S_IFREG | 0o644) << 16
            archive.writestr(entry, text, method)
        archive.comment = comment.encode()
    return content.getvalue()


def load_folder(content: bytes, folder: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """Unpack a folder and load the function in it; nothing of it stays."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    monkeypatch.chdir(folder.parent)
    monkeypatch.setenv("PWD", "")
    for name, value in uploaded.write(folder, [content]).items():
        monkeypatch.setenv(name, value)
    return uploaded.load(CodeSpec(sha256=hashlib.sha256(content).hexdigest(), function="step"))


def test_a_folder_is_unpacked_and_its_imports_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = "import beside_it\nfrom of_the_root.deep import value\ndef step(): return beside_it.value + value\n"
    files = {"pkg/train.py": train, "pkg/beside_it.py": "value = 1", "of_the_root/deep.py": "value = 2"}
    loaded = load_folder(packed(files), tmp_path, monkeypatch)
    assert loaded() == 3


def test_what_is_installed_of_a_project_does_not_stand_in_for_its_src(tmp_path, monkeypatch) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site/my_net.py").write_text("value = 1")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])
    files = {
        "pyproject.toml": "",
        "pkg/train.py": "def step():\n    from my_net import value\n    return value\n",
        "src/my_net.py": "value = 2",
    }
    loaded = load_folder(packed(files), tmp_path / "code", monkeypatch)
    assert loaded() == 2


def test_a_module_that_an_installations_finder_gives_before_that_of_the_folder_is_refused(
    tmp_path, monkeypatch
) -> None:
    def find_spec(name, path=None, target=None):
        found = tmp_path / "checkout.py"
        return importlib.util.spec_from_file_location(name, found) if name == "my_net" else None

    monkeypatch.setattr(sys, "meta_path", [SimpleNamespace(find_spec=find_spec), *sys.meta_path])
    files = {"pkg/train.py": "def step():\n    import my_net\n", "my_net.py": ""}
    with pytest.raises(BrokenCode, match=r"rename my_net\.py"):
        load_folder(packed(files), tmp_path / "code", monkeypatch)


@pytest.mark.parametrize("first", ["", "import sys; sys.path.insert(0, '../python')\n"], ids=["installed", "its own"])
def test_a_checkout_does_not_stand_in_for_the_module_of_the_folder(first, tmp_path, monkeypatch) -> None:
    (tmp_path / "checkout/my_net").mkdir(parents=True)
    (tmp_path / "checkout/my_net/__init__.py").write_text("value = 1")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "checkout")])
    train = f"{first}def step():\n    from my_net import value\n    return value\n"
    content = packed({"pkg/train.py": train, "python/my_net/__init__.py": "value = 2"})
    if first:
        assert load_folder(content, tmp_path / "code", monkeypatch)() == 2
    else:
        with pytest.raises(
            BrokenCode, match=r"checkout/my_net, and not python/my_net/__init__\.py .* '\.\./python'\)`$"
        ):
            load_folder(content, tmp_path / "code", monkeypatch)


def test_two_files_of_one_folder_share_its_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    files = dict.fromkeys(("one.py", "other.py"), "import shared_size\ndef step():\n    return shared_size")
    contents = [packed({**files, "shared_size.py": ""}, comment=name) for name in files]
    monkeypatch.setenv(uploaded.FOLDER, uploaded.write(tmp_path, contents)[uploaded.FOLDER])
    codes = [CodeSpec(sha256=hashlib.sha256(content).hexdigest(), function="step") for content in contents]
    one, other = map(uploaded.load, codes)
    assert one() is other()
    assert one.__code__.co_filename != other.__code__.co_filename


def test_the_place_of_a_folders_file_is_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = (
        "import os\nfrom pathlib import Path\nhere, text = os.getcwd(), Path('beside.txt').read_text()\n"
        "def step(): return here, text\n"
    )
    loaded = load_folder(packed({"pkg/train.py": train, "pkg/beside.txt": "found"}), tmp_path / "code", monkeypatch)
    here, text = loaded()
    assert (Path(here).name, text) == ("pkg", "found")
    assert os.environ["PWD"] == here


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("open('data.bin')\ndef step(): pass", "which of a git repository has the tracked files only"),
        ("open(__file__ + 'x')\ndef step(): pass", "name others, such as data, by absolute paths"),
        ("open('/not/there')\ndef step(): pass", None),
        ("1 / 0\ndef step(): pass", None),
    ],
    ids=["relative", "beside", "elsewhere", "other error"],
)
def test_a_file_that_did_not_go_along_is_said_to_be_missing(source, words, tmp_path, monkeypatch) -> None:
    with pytest.raises(BrokenCode) as caught:
        load_folder(packed({"pkg/train.py": source}), tmp_path / "code", monkeypatch)
    assert words in str(caught.value) if words else "copy of the folder" not in str(caught.value)


def test_without_a_folder_files_are_said_to_need_one(put: Put) -> None:
    with pytest.raises(BrokenCode, match=r"runs in an empty folder: send yours along with --code FOLDER"):
        uploaded.load(put("open('data.bin')\ndef attention(): pass\n"))


@pytest.mark.parametrize(
    ("files", "names"),
    [
        ({"train.py": "import turtle, beside\n", "turtle.py": "", "beside.py": ""}, None),
        ({"train.py": "import queue\n", "queue.py": ""}, ("queue", "queue.py")),
        (
            {"pkg/train.py": "import beside\n", "pkg/beside.py": "import torch.x\n", "torch/__init__.py": ""},
            ("torch", "torch"),
        ),
        (
            {"pkg/train.py": "def data():\n    try:\n        from queue import mine\n    finally:\n        pass\n",
             "pkg/queue.py": ""},
            ("queue", "pkg/queue.py"),
        ),
        ({"train.py": "import json\n", "other.py": "import queue\n", "queue.py": ""}, None),
        ({"train.py": "import beside\n", "beside.py": "", "queue/data.txt": ""}, None),
    ],
    ids=["its own", "standard library", "of a module that it imports", "in a function", "not imported", "no module"],
)  # fmt: skip
def test_a_module_by_whose_name_another_is_loaded_is_refused(files, names, tmp_path, monkeypatch) -> None:
    """Python would give the code the one that is loaded, and it would be measured. The client cannot see all names."""
    train = next(name for name in files if name.endswith("train.py"))
    content = packed({**files, train: f"{files[train]}def step():\n    pass\n"}, comment=train)
    if names is None:
        assert callable(load_folder(content, tmp_path, monkeypatch))
    else:
        with pytest.raises(BrokenCode) as refused:
            load_folder(content, tmp_path, monkeypatch)
        name, file = names
        assert f"step@uploaded imports '{name}' of its folder, and a job has loaded another module" in str(
            refused.value
        )
        assert str(refused.value).endswith(f"before any code of yours runs: rename {file}.")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (packed({"pkg/train.py": "", "../out.py": ""}), "inside of it: '../out.py'"),
        (packed({"pkg/train.py": "", "/out.py": ""}), "inside of it: '/out.py'"),
        (packed({"pkg/train.py": "/etc/passwd"}, mode=stat.S_IFLNK | 0o777), "a link or a device"),
        (packed({"pkg/other.py": ""}), "does not say which of its files"),
        (packed({"pkg/train.py": "x", "pkg/train.py/more": "x"}), "a file and a folder of one name"),
        (packed({"pkg/train.py": "x" * 100})[:-40], "cannot be unpacked"),
        (packed({"pkg/train.py": "", "d/" * 2000 + "x.py": "x"}), r"inside of it: '(d/)+'…$"),
        (
            packed({"pkg/train.py": "x" * 100}).replace(
                b"PK\x01\x02\x14\x03\x14\x00\x00", b"PK\x01\x02\x14\x03\x14\x00\x01"
            ),
            "encrypted",
        ),
        (packed({"pkg/train.py": "x" * 100}, method=zipfile.ZIP_BZIP2), "another method than deflate"),
        (packed({"pkg/train.py": "", **{f"{number}.py": "" for number in range(10_000)}}), "more than 10000 files"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_folder_must_not_hold_is_refused(content, words, tmp_path, monkeypatch) -> None:
    with pytest.raises(BrokenCode, match=words) as caught:
        load_folder(content, tmp_path / "code", monkeypatch)
    assert str(tmp_path) not in str(caught.value)
    assert not (tmp_path / "out.py").exists()
    assert not Path("/out.py").exists()


def test_a_folder_that_unpacks_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploaded, "MAX_BYTES", 1 << 20)
    with pytest.raises(BrokenCode, match="1 MiB"):
        load_folder(packed({"pkg/train.py": "x" * ((1 << 20) + 1)}), tmp_path, monkeypatch)


def test_a_full_disk_is_not_the_codes_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_path: Path, _content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(OSError, match="No space"):
        uploaded.write(tmp_path / "code", [packed({"pkg/train.py": ""})])


def test_a_missing_or_changed_file_is_not_the_codes_fault(put: Put, tmp_path: Path) -> None:
    code = put("def attention():\n    pass\n")
    with pytest.raises(InvalidEnvironment, match="its file is not here"):
        uploaded.load(CodeSpec(sha256="0" * 64, function="attention"))
    (tmp_path / "code" / f"uploaded_{code.sha256}.py").write_text("def attention():\n    return 1\n")
    with pytest.raises(InvalidEnvironment, match="has changed"):
        uploaded.load(code)


@pytest.mark.parametrize("runs", ["file", "folder", "script"])
def test_an_error_ends_with_its_innermost_place_in_the_users_code(tmp_path, monkeypatch, put: Put, runs: str) -> None:
    source = "import json\n\n\ndef attention():\n    return json.loads('?')\n"
    name = "mine.py"
    code: Any = functools.partial(uploaded.run_as_main, f"{source}\n\nattention()\n".encode(), name, [])
    if runs == "file":
        code = uploaded.load(put(source))
    elif runs == "folder":
        name = "pkg/beside.py"
        entry = "import beside\n\n\ndef step():\n    beside.attention()\n"
        code = load_folder(packed({"pkg/train.py": entry, name: source}), tmp_path / "code", monkeypatch)
    with pytest.raises(json.JSONDecodeError) as caught:
        code()
    assert uploaded.describe(caught.value, "words") == f"JSONDecodeError: words ({name}:5, in attention)"
    assert uploaded.describe(ValueError("elsewhere")) == "ValueError: elsewhere"


def test_an_autograd_function_and_an_implementation_will_do(put: Put) -> None:
    source = (
        "import torch\nfrom kernels.registry import Implementation\n\n\n"
        "class Mine(torch.autograd.Function):\n"
        "    @staticmethod\n    def forward(ctx, q, k, v, is_causal):\n        return v.clone()\n\n\n"
        'declared = Implementation("any", Mine.apply, {"cuda": frozenset({"float32"})}, has_backward=False)\n'
    )
    import torch

    own = uploaded.implementation(put(source, "Mine"))
    q = torch.ones(1, 1, 2, 2)
    assert torch.equal(own.function(q, q, q, False), q)
    assert own.features == {"num_kv_heads"}
    wrapper = "\ndef wrapper(q, k, v, is_causal, **options):\n    return Mine.apply(q, k, v, is_causal)\n"
    assert uploaded.implementation(put(source + wrapper, "wrapper")).features == FEATURES
    assert own.devices == {"cpu", "cuda"}
    declared = uploaded.implementation(put(source, "declared"))
    assert declared.name.startswith("declared@")
    assert set(declared.devices) == {"cuda"}
    assert not declared.has_backward


SPAWNING = """
import multiprocessing


class Item:
    pass


def length(item):
    return len(type(item).__name__)


def spawn():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(length, (Item(),))
"""


def test_processes_that_the_code_spawns_find_it(put: Put) -> None:
    assert uploaded.load(put(SPAWNING, "spawn"))() == len("Item")
