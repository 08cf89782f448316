"""The spec of `script`."""

import pytest
from pydantic import ValidationError

from app.specs._code import RUNS_CODE, CodeSpec
from app.specs.script import ScriptSpec

CODE = CodeSpec(sha256="0" * 64, function="__main__")


def test_arguments_are_those_of_a_shell() -> None:
    assert ScriptSpec(arguments="--name 'two words' --lr=1e-3").words() == ["--name", "two words", "--lr=1e-3"]
    with pytest.raises(ValidationError, match="No closing quotation"):
        ScriptSpec(arguments="--name 'open")


def test_a_script_needs_a_worker_that_runs_uploaded_code() -> None:
    assert RUNS_CODE in ScriptSpec(script_code=CODE).requirements()
    assert RUNS_CODE not in ScriptSpec().requirements()


def test_tables_name_the_file() -> None:
    assert ScriptSpec(script_code=CODE.model_copy(update={"file": "train.py"})).case().labels == {"script": "train.py"}


def test_where_it_runs_is_no_part_of_the_case() -> None:
    spec = ScriptSpec(script_code=CODE, arguments="--lr 1")
    assert spec.case().key == ScriptSpec(script_code=CODE, arguments="--lr 1", device="cpu").case().key
    assert spec.case().key != ScriptSpec(script_code=CODE).case().key
