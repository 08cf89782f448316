"""Values of fields and coordinates as people type and read them. Standard library only: commands and clients use it."""

import json
import math
from typing import Any

PYTHON_CONSTANTS = {"True": True, "False": False, "None": None}


def parse_value(text: str) -> Any:
    """Parse a value: 128 → number, true → boolean, [1, 2] → list, tiny → text; Python's True, False and None are
    understood, too."""
    if text in PYTHON_CONSTANTS:
        return PYTHON_CONSTANTS[text]
    try:
        return parse_json(text)
    except ValueError:
        return text


def parse_json(text: str) -> Any:
    """Parse JSON that the API takes. Raises ValueError with the reason."""
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeEncodeError as half:
        character = half.object[half.start].encode("unicode_escape").decode()
        raise ValueError(f"{character} is an unpaired surrogate") from None
    return value


def _no_constant(name: str) -> Any:
    # JSON has no NaN and no Infinity, although Python's parser accepts them.
    raise ValueError(f"{name} is no number")


def _finite(digits: str) -> float:
    if not math.isfinite(number := float(digits)):
        raise ValueError(f"{digits} is too large")
    return number


def value_text(value: Any) -> str:
    """Write a value as people type it: "fp32", "128", "true", "none". Of objects and lists the values are written, as
    {"size": "tiny"} is "tiny"."""
    if isinstance(value, dict | list):
        return "/".join(map(value_text, value.values() if isinstance(value, dict) else value))
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else str(value)
