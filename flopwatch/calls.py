"""Checks, from a file's text alone, that a job can call what the user names as its step or implementation, so that a
mistake is noticed before the upload and not when the job starts. Standard library only.

What the text does not tell (a decorator, a name that is bound twice, a class with bases from elsewhere) passes: the job
decides.
"""

import ast
import copy
import difflib
import inspect
from collections.abc import Iterable, Iterator
from typing import TypeAlias

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
INPUTS = ["q", "k", "v", "is_causal"]
STEP = "a step is made by {name}(device, **arguments), which returns a function for one step, without arguments"


def complaint(source: bytes, name: str, option: str, arguments: Iterable[str] | None) -> str | None:
    """Return a sentence for people if a job cannot call `name` of a file; None if it can, or if the text does not tell.

    Args:
        option: how it is used: "step" or "implementation"; others pass.
        arguments: the names of the arguments that the job passes; None: nobody knows.
    """
    module = ast.parse(source)
    found = [node for node in module.body if _binds(node, name)]
    if len(found) != 1 or not isinstance(node := found[0], Function | ast.ClassDef) or node.decorator_list:
        return None
    if option == "implementation":
        if isinstance(node, ast.ClassDef) and not node.bases:
            return f"{name} is a class, and an implementation is a function of its inputs, or a torch.autograd.Function"
        if not arguments or isinstance(node, ast.ClassDef):
            return None
        return _complaint(node, INPUTS, name, INPUTS, arguments)
    if option != "step":
        return None
    step = STEP.format(name=name)
    if isinstance(node, ast.ClassDef):
        called = _method(node, "__call__") or _method(node, "forward")
        if called is None:
            return None if node.bases else f"{name} is a class whose objects cannot be called; {step}"
        if (error := _bound(called, ["self"], [])) is not None:
            return f"{name} is a class whose objects are called with arguments ({error}); {step}"
        maker, first = _method(node, "__init__"), ["self", "device"]
    else:
        maker, first = node, ["device"]
        if isinstance(node, ast.AsyncFunctionDef):
            return f"{name} is asynchronous, and its call makes a coroutine; {step}"
        if not any(isinstance(each, ast.Return | ast.Yield | ast.YieldFrom) for each in _own(node)):
            return f"{name} returns nothing; {step}"
    if maker is None or maker.decorator_list or arguments is None:
        return None
    return _complaint(maker, first, name, ["device"], arguments)


def _complaint(
    function: Function, positional: list[str], name: str, shown: list[str], arguments: Iterable[str]
) -> str | None:
    """Return why a function cannot be called with `positional` and the job's arguments, and what it takes."""
    given = sorted(arguments)
    if (error := _bound(function, positional, given)) is None:
        return None
    ordered = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
    first, takes = ordered[: len(positional)], ordered[len(positional) :]
    takes += [each.arg for each in function.args.kwonlyargs]
    nameless = [each.arg for each in function.args.posonlyargs if each.arg in takes and f"'{each.arg}'" in error]
    unknown = next((each for each in given if each not in takes), "")
    is_short = len(first) < len(positional) and not function.args.vararg
    if is_short or (unknown in first and unknown not in shown) or shown[0] in takes:
        cure = f"let it take {', '.join(shown)} first"
    elif nameless:
        cure = f"put {nameless[0]} behind the `/`, so that it can be given by name"
    elif near := difflib.get_close_matches(unknown, takes, n=1):
        cure = f"did you mean arguments.{near[0]}?"
    elif unknown in shown:
        cure = f"leave arguments.{unknown} out"
    elif takes:
        cure = f"it takes: {', '.join(takes)}; arguments.NAME=VALUE sets one"
    else:
        cure = f"it takes no other arguments: leave arguments.{unknown} out"
    call = ", ".join([*shown, *(f"{each}=" for each in given)])
    return f"it is called as {name}({call}): {error}; {cure}"


def _binds(node: ast.stmt, name: str) -> bool:
    if isinstance(node, Function | ast.ClassDef):
        return node.name == name
    return any(
        (isinstance(each, ast.Name) and each.id == name and isinstance(each.ctx, ast.Store))
        or (isinstance(each, ast.alias) and (each.asname or each.name) in (name, "*"))
        or (isinstance(each, Function | ast.ClassDef) and each.name == name)
        for each in ast.walk(node)
    )


def _method(node: ast.ClassDef, name: str) -> Function | None:
    return next((each for each in node.body if isinstance(each, Function) and each.name == name), None)


def _own(function: Function) -> Iterator[ast.AST]:
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, Function | ast.ClassDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)


def _bound(function: Function, positional: list[str], named: list[str]) -> str | None:
    """Return why a call with these arguments is none that the function takes; None if it takes them."""
    its, nothing = copy.deepcopy(function.args), ast.Constant(None)
    its.defaults = [nothing for _ in its.defaults]
    its.kw_defaults = [None if default is None else nothing for default in its.kw_defaults]
    alike = ast.fix_missing_locations(ast.Expression(ast.Lambda(its, nothing)))
    try:
        # It has the names of the function's arguments, and nothing else of it.
        inspect.signature(eval(compile(alike, "<arguments>", "eval"))).bind(*positional, **dict.fromkeys(named))  # noqa: S307
    except (SyntaxError, TypeError) as error:  # two arguments of one name, or a call that does not fit
        return str(error)
    return None
