"""The names that users may import, as the documents write them."""

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGES = ("flopwatch", "kernels", "kernels.attention", "parallel")
PAGES = [f"docs/{page}.md" for page in ("kernels", "parallel", "python-client")]


def names_in(page: str) -> Iterator[str]:
    """Yield the dotted names of our packages that the Python code of a page imports or uses, and that its text has."""
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.Attribute):
                yield ast.unparse(node)
    yield from re.findall(r"`(?:with )?((?:flopwatch|kernels|parallel)(?:\.\w+)+)(?=[`(])", page)


def ours(page: str) -> set[str]:
    """Return those names whose first part is one of our packages, up to the first call."""
    found = {re.match(r"[\w.]*", name)[0].rstrip(".") for name in names_in(page)}  # type: ignore[index]
    return {name for name in found if name.partition(".")[0] in {"flopwatch", "kernels", "parallel"}}


def imported(name: str) -> object:
    """Import a dotted name as a user would: `import PACKAGE`, then attributes; or `from MODULE import NAME`."""
    package, _, rest = name.partition(".")
    found: object = importlib.import_module(package)
    for part in rest.split(".") if rest else ():
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("page", PAGES)
def test_every_name_of_a_page_can_be_imported(root: Path, page: str) -> None:
    # In Python code `flopwatch` is mostly a variable, a client.
    names = {name for name in ours((root / page).read_text(encoding="utf-8")) if not is_method_of_the_client(name)}
    assert names
    for name in sorted(names):
        imported(name)


def is_method_of_the_client(name: str) -> bool:
    from flopwatch import Flopwatch

    package, _, rest = name.partition(".")
    return package == "flopwatch" and hasattr(Flopwatch, rest.partition(".")[0])


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_lists_its_names(package: str) -> None:
    module = importlib.import_module(package)
    assert set(module.__all__) <= set(dir(module))
    for name in module.__all__:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = module.no_such_name


@pytest.mark.parametrize("package", PACKAGES)
def test_importing_a_package_imports_nothing_slow(package: str, root: Path) -> None:
    slow = "{'torch', 'triton', 'httpx', 'pandas', 'pydantic', 'fastapi', 'sqlalchemy'}"
    code = f"import sys, {package}; dir({package}); print(*{slow} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert found.stdout == "\n"


def test_code_takes_only_names_that_a_package_lists(sources: list[Path], root: Path) -> None:
    """Others are there only once something has imported them: in the tests all is, but not in a job's process."""
    for path in (one for one in sources if one.suffix == ".py" and one.relative_to(root).parts[0] != "tests"):
        nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
        whole = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        for node in nodes:
            if isinstance(node, ast.Attribute) and (name := ast.unparse(node.value)) in whole & {*PACKAGES}:
                assert node.attr in importlib.import_module(name).__all__, f"{path}:{node.lineno}"
