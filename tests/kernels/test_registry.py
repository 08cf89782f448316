import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.attention.problem import AttentionProblem
from kernels.attention.reference import attention
from kernels.registry import ATTENTION, BrokenEntryPoint, DuplicateName, Implementation, Registry, UnknownName

GROUP = "flopwatch.test_registry"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Installs a distribution with entry points, for real: a module and its metadata on sys.path."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(distribution: str, entry_points: dict[str, str], modules: dict[str, str] | None = None) -> None:
        for name, source in (modules or {}).items():
            (tmp_path / f"{name}.py").write_text(source)
        metadata = tmp_path / f"{distribution}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        lines = [f"[{GROUP}]", *(f"{name} = {value}" for name, value in entry_points.items())]
        (metadata / "entry_points.txt").write_text("\n".join(lines))

    return install


def test_an_unknown_name_lists_the_known_ones() -> None:
    registry = Registry("thing", GROUP, {"ours": "math:sqrt", "another": "math:cos"})
    with pytest.raises(UnknownName, match=r"unknown thing 'os'; known are another, ours"):
        registry.load("os")
    with pytest.raises(UnknownName, match=r"; known are another, ours; did you mean ours\?$"):
        registry.load("ors")


def test_an_entry_point_is_listed_unimported(install) -> None:
    install("plugin-a", {"theirs": "plugin_a:value"}, {"plugin_a": "value = 42"})
    registry = Registry("thing", GROUP, {"ours": "math:sqrt"})
    assert registry.names() == ("ours", "theirs")
    assert "plugin_a" not in sys.modules
    assert registry.load("theirs") == 42
    del sys.modules["plugin_a"]


def test_a_broken_entry_point_is_named_and_harms_no_other(install) -> None:
    install("plugin-b", {"broken": "plugin_b:value", "gone": "no_such_module:x"}, {"plugin_b": "1 / 0"})
    registry = Registry("thing", GROUP, {"ours": "math:sqrt"})
    assert registry.names() == ("broken", "gone", "ours")
    with pytest.raises(BrokenEntryPoint, match=r"thing 'broken' \(entry point 'plugin_b:value'.*ZeroDivisionError"):
        registry.load("broken")
    with pytest.raises(BrokenEntryPoint, match=r"'gone'.*No module named 'no_such_module'"):
        registry.load("gone")
    assert registry.load("ours")(4) == 2


def test_an_object_of_another_kind_is_broken(install) -> None:
    install("plugin-c", {"number": "math:pi"})
    registry = Registry("thing", GROUP, {}, ATTENTION._check)
    with pytest.raises(BrokenEntryPoint, match=r"'number'.*expected a kernels.registry.Implementation, not float"):
        registry.load("number")


def implementation(name: str = "theirs", dtypes: Any = None, **fields: Any) -> Implementation:
    return Implementation(name, max, {"cpu": frozenset({"float32"})} if dtypes is None else dtypes, **fields)


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (implementation("ours"), "its name is 'ours'.* name it as its entry point"),
        *((implementation(dtypes=wrong), "dtypes must map cpu, cuda to sets of bfloat16, float16, float32, .*, not ")
          for wrong in ({"float32"}, {}, {"gpu": {"float32"}}, {"cpu": ["float32"]}, {"cpu": {torch.float32}})),
    ],
)  # fmt: skip
def test_an_implementation_that_makes_no_sense_is_broken(install, monkeypatch, theirs, message) -> None:
    monkeypatch.setattr("math.theirs", theirs, raising=False)
    install("plugin-e", {"theirs": "math:theirs"})
    registry = Registry("thing", GROUP, {}, ATTENTION._check)
    with pytest.raises(BrokenEntryPoint, match=f"thing 'theirs'.* could not be loaded: TypeError: .*{message}"):
        registry.load("theirs")


def test_the_example_of_the_documentation_runs_on_a_cpu() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to-add-an-attention.md").read_text()
    names: dict[str, Any] = {}
    exec(page.partition("```python\n")[2].partition("```")[0], names)
    example = names["implementation"]
    ATTENTION._check("windowed", example)
    assert example.why_not("cpu", "float32", backward=True) is None
    q, k, v = (torch.randn(2, 3, 20, 8) for _ in range(3))
    problem = AttentionProblem(window=3)
    assert example.why_not("cpu", "float32", backward=True, problem=problem) is None
    for is_causal, options in itertools.product((False, True), ({}, problem.options("cpu"))):
        right = attention(q, k, v, is_causal, **options)
        torch.testing.assert_close(example.function(q, k, v, is_causal, **options), right)


def test_duplicates_fail_loudly(install) -> None:
    install("plugin-d", {"ours": "math:cos"})
    with pytest.raises(DuplicateName, match=r"two things are called 'ours': 'math:sqrt' and 'math:cos'"):
        Registry("thing", GROUP, {"ours": "math:sqrt"}).names()
