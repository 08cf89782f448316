"""The form of tokens and the order of their scopes."""

import pytest

from app import tokens


def test_a_token_has_its_id() -> None:
    token_id, text = tokens.mint()
    assert tokens.id_of(text) == token_id
    assert text.startswith(f"fw_{token_id}_")
    assert tokens.mint()[1] != text


@pytest.mark.parametrize("text", ["", "fw_", "secret", "fw_0123456789_" + "0" * 72, "fw_0123456789_" + "é" * 72])
def test_other_texts_are_no_tokens(text: str) -> None:
    assert tokens.id_of(text) is None


def test_every_mistyped_character_is_noticed() -> None:
    _, text = tokens.mint()
    for place, character in enumerate(text):
        other = "1" if character == "0" else "0"
        assert tokens.id_of(text[:place] + other + text[place + 1 :]) is None
    assert (tokens.id_of(text[:-1]), tokens.id_of(f"{text}\n")) == (None, None)
