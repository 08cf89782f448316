"""Writes cases in words, from their coordinates. Standard library only: the command line reads it too."""

import re
from collections.abc import Mapping
from typing import Any

ARROW = " → "
"""Arrow between the baseline's and the candidate's value, in the summary of a comparison."""
MAX_LISTED = 4
"""Largest number of values of a coordinate that a summary lists; for more values it gives their number."""
_VALUES = re.compile(r"[^/@]+@.+?\.py(?=/|$)|[^/]+")
"""The values that a text joins by slashes. A function in a file of one's own, "step@src/train.py", is one."""


def in_use(value: Any) -> Any:
    """Return a coordinate's value, with null in place of False.

    For example, one case cannot be compiled (null) and another was not (False): no table needs a column for that
    difference.
    """
    return None if value is False else value


def case_text(coordinates: Mapping[str, Any]) -> str:
    """Write a case in words: texts unchanged, flags and numbers by name ("triton, causal, head_dim=64").

    A coordinate of a whole job lists its values ("16/32/64"), or their number if they are many ("13 implementations").
    A coordinate in which the sides of a comparison differ has its name before it ("precision=fp32 → bf16"), and so have
    a text that was there before and a data type other than the precision ("bf16, parameter_dtype=bf16").
    """
    words: list[str] = []
    for name, value in coordinates.items():
        if value is not None:
            text = _coordinate(name, value)
            words.append(f"{name}={text}" if text in words else text)
    return ", ".join(words)


def _coordinate(name: str, value: Any) -> str:
    if value is True:
        return name
    if isinstance(value, str) and ARROW in value:
        return f"{name}={ARROW.join(map(_part, value.split(ARROW)))}"
    if name in ("arguments", "script") or name.endswith(".file"):  # paths, whose slashes join no values
        return str(value)
    parts = [_part(part) for part in (_VALUES.findall(value) if isinstance(value, str) else [value])]
    if len(parts) > MAX_LISTED:
        return f"{len(parts)} {name.replace('_', ' ')}s"
    text = "/".join(parts)
    # A bare "bf16" is the precision, and a bare hash is nothing.
    return f"{name}={text}" if name.endswith(("_dtype", "version")) or all(map(_is_number_or_flag, parts)) else text


def _part(value: Any) -> str:
    text = str(value)
    return text.lower() if text in ("True", "False", "None") else text


def _is_number_or_flag(text: str) -> bool:
    return text in ("true", "false") or text.lstrip("-").replace(".", "", 1).isdecimal()
