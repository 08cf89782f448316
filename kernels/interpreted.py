"""Makes Triton's interpreter (TRITON_INTERPRET=1) work with a recent NumPy.

Triton 3.6 turns loop bounds, arrays of one element, into integers by int(), which NumPy 2.4 refuses to do. And it keeps
bfloat16 as the integers of its bits, which its products multiply as such.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np


@functools.cache
def mend_interpreter() -> None:
    """Let arrays of one element count as integers, and products take bfloat16, if kernels are interpreted."""
    import triton
    import triton.language as tl

    if not triton.knobs.runtime.interpret:
        return
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_and_index

    create_dot = interpreter.InterpreterBuilder.create_dot

    def create_dot_of_numbers(self: Any, a: Any, b: Any, *arguments: Any) -> Any:
        return create_dot(self, _widened(a), _widened(b), *arguments)

    def _widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    interpreter.InterpreterBuilder.create_dot = create_dot_of_numbers
