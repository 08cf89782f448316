"""Runs Triton kernels in Triton's interpreter (TRITON_INTERPRET=1) also beside a recent NumPy.

Triton 3.6 turns loop bounds, arrays of one element, into integers by int(), which NumPy 2.4 refuses to do.
"""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def mend_interpreter() -> None:
    """Make arrays of one element count as integers. Does nothing where kernels are compiled."""
    import triton

    if not triton.knobs.runtime.interpret:
        return
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_and_index
