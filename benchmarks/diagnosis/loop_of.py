"""Makes the training loop of a script a step: one turn of the innermost loop that calls `.step()`. The script's text
stays as it is, and so do its lines. It is uploaded beside the script:

    flopwatch why loop_of.py:make_step --code . arguments.script=train.py arguments.argv="--compile=False"
"""

from __future__ import annotations

import ast
import importlib.util
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

FOUND = "found_of_loop"
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, ast.ListComp, ast.SetComp, ast.DictComp,
          ast.GeneratorExp)  # fmt: skip
LOOPS = (ast.For, ast.While)


class Found(BaseException):
    """The script has come to its loop."""


def make_step(device: Any, script: str, argv: str = "", loop_in: str | None = None) -> Callable[[], object]:
    """Run a script up to its training loop, and return a function that does one turn of it.

    Args:
        device: Not used: the script chooses its own.
        script: The file, in the folder of this one.
        argv: The script's arguments.
        loop_in: The file of a module that has the loop, if the script itself has none.

    Raises:
        ValueError: no loop calls `.step()`.
    """
    here, steps = Path(__file__).parent, list[Callable[[], object]]()

    def found(step: Callable[[], object]) -> None:
        steps.append(step)
        raise Found

    sys.argv = [script, *shlex.split(argv)]
    names: dict[str, Any] = {"__name__": "__main__", "__file__": script, FOUND: found, "endless_of_loop": endless}
    path = here / script
    if loop_in is not None:
        name = loop_in.removesuffix(".py").replace("/", ".")
        spec = importlib.util.spec_from_file_location(name, here / loop_in)
        assert spec is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        vars(module).update(names, __name__=name)
        exec(with_step(here / loop_in), vars(module))
    code = with_step(path) if loop_in is None else compile(path.read_text(), str(path), "exec")
    try:
        exec(code, names)
    except Found:
        return steps[0]
    raise ValueError(f"{script} has not come to a loop that calls .step()")


def endless(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield a loader's batches again and again."""
    while True:
        yield from batches


def with_step(path: Path) -> CodeType:
    """Compile a file whose training loop hands out a function for one of its turns in place of running."""
    tree = ast.parse(path.read_text())
    loops = [node for node in ast.walk(tree) if isinstance(node, LOOPS) and _steps(node)]
    innermost = [one for one in loops if not any(inner in loops for inner in ast.walk(one) if inner is not one)]
    if len(innermost) != 1:
        raise ValueError(f"{path.name} has {len(innermost)} loops that call .step(), not 1")
    return compile(ast.fix_missing_locations(_Replace(innermost[0]).visit(tree)), str(path), "exec")


def _steps(loop: ast.AST) -> bool:
    calls = (node.func for node in ast.walk(loop) if isinstance(node, ast.Call))
    return any(isinstance(one, ast.Attribute) and one.attr == "step" for one in calls)


def _bound(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the names that statements bind, without those of scopes inside."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        if isinstance(node, ast.ExceptHandler) and node.name:
            found.add(node.name)
        if not isinstance(node, SCOPES):
            found |= _bound(ast.iter_child_nodes(node))
    return found


class _Replace(ast.NodeTransformer):
    """Puts a function for one turn of a loop in its place."""

    def __init__(self, loop: ast.For | ast.While) -> None:
        self._loop, self._inside = loop, False

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        outside, self._inside = self._inside, True
        self.generic_visit(node)
        self._inside = outside
        return node

    def visit(self, node: ast.AST) -> Any:
        if node is not self._loop:
            return super().visit(node)
        names = sorted(_bound([node]))
        shared = f"{'nonlocal' if self._inside else 'global'} {', '.join(names)}" if names else "pass"
        bind = "".join(f"{name} = " for name in names) + "None"  # never runs, but makes them the function's own
        made = ast.parse(
            f"batches_of_loop = endless_of_loop(())\ndef one_turn():\n {shared}\n while True:\n  break\n"
            f" return {'loss' if 'loss' in names else 'None'}\nif False:\n {bind}\n{FOUND}(one_turn)\n"
        )
        for part in ast.walk(made):
            if isinstance(part, ast.stmt | ast.expr):
                part.lineno = part.end_lineno = self._loop.lineno
        first: Any = made.body[0]
        turn: Any = made.body[1]
        while_: Any = turn.body[1]
        body = list(self._loop.body)
        if isinstance(self._loop, ast.For):
            first.value.args = [self._loop.iter]
            fetch: Any = ast.parse("target = next(batches_of_loop)").body[0]
            for part in ast.walk(fetch):
                ast.copy_location(part, self._loop.target)
            fetch.targets = [self._loop.target]
            body.insert(0, fetch)
        while_.body = [*body, *while_.body]
        return made.body
