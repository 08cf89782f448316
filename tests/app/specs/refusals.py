"""What specs refuse."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from pydantic import ValidationError

from app.specs import spec_adapter


def assert_refused(kind: str, fields: Mapping[str, Any], field: str, words: str) -> None:
    """These fields have one error, which blames this field in these words."""
    with pytest.raises(ValidationError) as caught:
        spec_adapter.validate_json(json.dumps({"kind": kind, **fields}))
    (error,) = caught.value.errors()
    assert words in error["msg"]
    assert field == error.get("ctx", {}).get("field", ".".join(map(str, error["loc"][1:]))), error


def refusals(kind: str, *rows: tuple[Mapping[str, Any], str, str], **always: Any) -> Callable[..., None]:
    """Make a test of fields, each with the field that its error blames and words of it; `always` goes with all."""

    @pytest.mark.parametrize(("fields", "field", "words"), rows)
    def test(fields: Mapping[str, Any], field: str, words: str) -> None:
        assert_refused(kind, {**always, **fields}, field, words)

    return test
