"""Users' errors in words, also of those whose own code fails at it."""

import json
import re

import pytest
import torch

from workers.measure.errors import LIMIT, text_of, with_type
from workers.measure.memory import is_out_of_memory, short_message


class Mute(RuntimeError):
    """An error that cannot be shown."""

    def __str__(self) -> str:
        raise SystemExit(0)


class NoText(ValueError):
    def __str__(self) -> str:
        return 3  # type: ignore[return-value]


NOWHERE = type("Nowhere", (Exception,), {"__module__": None})


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (Mute(), "Mute: <its str() raises SystemExit>"),
        (NoText(), "NoText: <its str() raises TypeError>"),
        (NOWHERE("text"), "Nowhere: text"),
        (GeneratorExit(), "GeneratorExit"),
        (ValueError("a\0b \ud800"), "ValueError: a\\0b \\ud800"),
        (ValueError(lambda: 1), "ValueError: <function"),
        (ValueError("word " * 10**7), "ValueError: word word"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_every_error_has_words_that_fit(error: BaseException, words: str) -> None:
    assert with_type(error).startswith(words)
    assert len(text_of(error)) <= LIMIT
    json.dumps(with_type(error)).encode()
    assert len(short_message(error)) <= 201
    assert not is_out_of_memory(error)


def test_what_an_operation_lacks_is_said_without_the_list_of_all_backends() -> None:
    sparse = torch.eye(2).to_sparse()
    with pytest.raises(NotImplementedError) as failed:
        torch.linalg.qr(sparse)
    assert re.fullmatch(
        r"Could not run 'aten::\w+.*' with arguments from the 'SparseCPU' backend\.", text_of(failed.value)
    )
