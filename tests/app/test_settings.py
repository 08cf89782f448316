"""What users are told of settings that make no sense."""

from __future__ import annotations

import pytest

from app.errors import CannotRunHere
from app.settings import Settings


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("FLOPWATCH_API_TOKEN", "", "is empty, which protects nothing: set a token, or unset the variable"),
        ("FLOPWATCH_API_TOKEN", " abc", "begins or ends with a blank, which no client can send"),
        ("FLOPWATCH_PERFETTO_URL", "ui", "must be an address such as https://ui.perfetto.dev, or empty"),
    ],
)
def test_a_message_has_the_variable_and_our_words_only(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, told: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(CannotRunHere) as caught:
        Settings.from_environment()
    assert caught.value.detail == f"{name}: {told}"
