"""Makes Triton's interpreter (TRITON_INTERPRET=1) work with a recent NumPy.

Triton 3.6 converts loop bounds, arrays of one element, by int(), which NumPy 2.4 refuses. It also stores bfloat16 as
the integers of its bits, multiplies these integers in products, and truncates float32 to bfloat16 where devices round.
"""

import functools
from typing import Any

import numpy as np


@functools.cache
def patch_interpreter() -> None:
    """In the interpreter, let arrays of one element be integers, and round and multiply bfloat16 as devices do."""
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

    cast = interpreter.InterpreterBuilder.cast_impl

    def cast_as_devices_do(self: Any, source: Any, kind: Any) -> Any:
        of, to = source.dtype.scalar, kind.scalar
        source = source if of == to else _widened(source)
        if to == tl.bfloat16 != of:
            return interpreter.TensorHandle(_rounded_to_bfloat16(source.data), to)
        return cast(self, source, kind)

    interpreter.InterpreterBuilder.cast_impl = cast_as_devices_do

    create_dot = interpreter.InterpreterBuilder.create_dot

    def create_dot_in_float32(self: Any, a: Any, b: Any, *arguments: Any) -> Any:
        return create_dot(self, _widened(a), _widened(b), *arguments)

    def _widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    interpreter.InterpreterBuilder.create_dot = create_dot_in_float32


def _rounded_to_bfloat16(values: Any) -> Any:
    """Return the bits of float32 numbers rounded to the nearest bfloat16, ties to even."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)
