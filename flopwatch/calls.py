"""Checks, from a file's text alone, that a job can call what the user names as its step or implementation, so that a
mistake is noticed before the upload and not when the job starts. Standard library only.

What the text does not tell (a decorator, a name that is bound twice, a class with bases) passes: the job decides.
"""

import ast
import copy
import inspect
from collections.abc import Iterable
from typing import TypeAlias

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
FIRST = {"step": ["device"], "implementation": ["q", "k", "v", "is_causal"]}
"""What a job passes by position to the code of each option."""
SIZES = ["vocab_size", "context_length", "d_model", "num_layers", "num_heads", "d_ff"]
"""What it passes by name to a model."""


def complaint(source: bytes, name: str, option: str, arguments: Iterable[str] | None) -> str | None:
    """Return a sentence for people if a job cannot call the function `name` of a file; None if it can, or if the text
    does not tell.

    Args:
        option: how it is used: "step", "implementation" or "model"; others pass. So do implementations without
            arguments, since operations have inputs of their own, and models unless they need `device` first, as a step.
        arguments: the names of the arguments that the job passes; None: nobody knows.
    """
    found = [node for node in ast.parse(source).body if _binds(node, name)]
    if len(found) != 1 or not isinstance(node := found[0], Function | ast.ClassDef) or node.decorator_list:
        return None
    methods = {each.name: each for each in node.body if isinstance(each, Function)}
    if option == "model":
        made = node if isinstance(node, Function) else methods.get("__init__")
        needed = [] if made is None else [one.arg for one in made.args.args][: -len(made.args.defaults) or None]
        if needed[isinstance(node, ast.ClassDef) :][:1] != FIRST["step"]:
            return None
        return f"a model is called with {', '.join(SIZES)}, and no device; a step, called with device, is --step"
    if isinstance(node, ast.ClassDef):
        called = methods.get("__call__") or methods.get("forward")
        if option != "step" or (called is None and node.bases) or (called and _bound(called, ["self"], []) is None):
            return None
        why = f"{name} is a class whose objects cannot be called without arguments: a step is made by {name}(device)"
        return f"{why}; a model is --model" if "forward" in methods else why
    if option not in FIRST or arguments is None or (not (given := sorted(arguments)) and option == "implementation"):
        return None
    if (error := _bound(node, FIRST[option], given)) is None:
        return None
    call = ", ".join([*FIRST[option], *(f"arguments.{each}" for each in given)])
    why = f"{name}({ast.unparse(node.args)}) is called with {call}: {error}"
    return f"{why}; a model is --model" if option == "step" and _bound(node, [], SIZES) is None else why


def _binds(node: ast.stmt, name: str) -> bool:
    if isinstance(node, Function | ast.ClassDef):
        return node.name == name
    return any(
        (isinstance(each, ast.Name) and each.id == name and isinstance(each.ctx, ast.Store))
        or (isinstance(each, ast.alias) and (each.asname or each.name) in (name, "*"))
        or (isinstance(each, Function | ast.ClassDef) and each.name == name)
        for each in ast.walk(node)
    )


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
