"""Numbers and other values as people read them."""

from typing import Any

import pytest

from flopwatch.text.numbers import number


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"), (0.12345, "0.1235"), (999.96, "1000"), (1234.5, "1,234"), (1234567, "1234567"), ("nan", "nan"),
        (True, "true"), (False, "false"),
    ],
)  # fmt: skip
def test_values_for_people(value: Any, text: str) -> None:
    assert number(value) == text
