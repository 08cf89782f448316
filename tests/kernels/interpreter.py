"""Lets Triton's interpreter do once what it does at every call of a function: half of its time goes there.

What a kernel computes is not touched.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import triton.language as tl
from triton.runtime import interpreter


@contextmanager
def fast_interpreter() -> Iterator[None]:
    """Speed the interpreter up while inside."""
    patch_language, numpy_dtype = interpreter._patch_lang, interpreter._get_np_dtype
    nothing_to_restore = interpreter._LangPatchScope()
    scopes: list[Any] = []
    of_name: dict[str, Any] = {}

    def patch_once(_function: Any) -> Any:
        """Stay patched. Triton looks at all of its language at each call, also of functions that kernels call."""
        if not scopes:
            scopes.append(patch_language(SimpleNamespace(__globals__={"tl": tl, "core": tl.core})))
        return nothing_to_restore

    @functools.wraps(numpy_dtype)
    def numpy_dtype_from_table(dtype: Any) -> Any:
        name = dtype.name
        if name not in of_name:
            of_name[name] = numpy_dtype(dtype)
        return of_name[name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", patch_once)
        patch.setattr(interpreter, "_get_np_dtype", numpy_dtype_from_table)
        # Each sum and product of int32 would be computed in int64, too. Tests' tensors are far too small to overflow.
        patch.setattr(interpreter.InterpreterOptions, "sanitize_overflow", False)
        options = interpreter.interpreter_builder.options
        object.__setattr__(options, "sanitize_overflow", False)
        try:
            yield
        finally:
            object.__setattr__(options, "sanitize_overflow", True)
            for scope in scopes:
                scope.restore()
