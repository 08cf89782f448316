"""The spec of `attention`: its grid, and what it refuses."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from app.specs._base import MAX_CELLS
from app.specs.attention import AttentionSpec


def spec(**fields: Any) -> AttentionSpec:
    return AttentionSpec.model_validate_json(json.dumps(fields))


def test_cells_with_one_oracle_follow_each_other() -> None:
    lists = {
        "implementations": ["eager", "triton"],
        "head_dims": [16, 32],
        "sequence_lengths": [512, 256],
        "dtypes": ["fp32", "bf16"],
        "causal": [False, True],
    }
    cells = spec(**lists).cells()
    assert len(cells) == len(set(cells)) == 2**5
    assert [cell.implementation for cell in cells[:4]] == ["eager", "triton", "eager", "triton"]
    assert [cell.sequence_length for cell in cells[:4]] == [256, 256, 512, 512], "the shortest first"
    assert {(cell.br, cell.bc) for cell in cells} == {(None, None)}


def test_block_sizes_are_axes_of_some_implementations() -> None:
    cells = spec(
        implementations=["cpu_naive", "cpu_blocked", "cpu_flash"], sequence_lengths=[64], br=[16, 32], bc=[8, 64]
    ).cells()
    assert [(cell.implementation, cell.br, cell.bc) for cell in cells] == [
        ("cpu_naive", None, None),
        ("cpu_blocked", 16, None),
        ("cpu_blocked", 32, None),
        ("cpu_flash", 16, 8),
        ("cpu_flash", 16, 64),
        ("cpu_flash", 32, 8),
        ("cpu_flash", 32, 64),
    ]


def test_without_block_sizes_a_cell_has_the_librarys_own() -> None:
    cells = spec(implementations=["cpu_naive", "cpu_blocked", "cpu_flash"], sequence_lengths=[64], bc=[8]).cells()
    assert [(cell.br, cell.bc) for cell in cells] == [(None, None), (32, None), (32, 8)]
    (flash,) = spec(implementations=["cpu_flash"], sequence_lengths=[64]).cells()
    assert (flash.br, flash.bc) == (32, 128)


def test_cells_are_counted_and_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep validates up to ten thousand specs, each of up to ten thousand cells."""
    lists = {"head_dims": list(range(1, 101)), "sequence_lengths": list(range(1, 101)), "implementations": ["eager"]}
    with monkeypatch.context() as patched:
        patched.setattr(AttentionSpec, "cells", lambda _: pytest.fail("a cell was made"))
        assert spec(**lists).number_of_cells() == MAX_CELLS
    assert len(spec(**lists).cells()) == MAX_CELLS
    blocks = spec(implementations=["eager", "cpu_flash", "cpu_blocked"], sequence_lengths=[8, 9], br=[1, 2, 4])
    assert blocks.number_of_cells() == len(blocks.cells()) == 2 * (1 + 3 + 3)


@pytest.mark.parametrize("name", AttentionSpec.presets)
def test_presets_of_sizes_for_a_gpu_ask_for_one(name: str) -> None:
    assert spec(**AttentionSpec.presets[name]).resources().device_type == ("cpu" if name == "cpu" else "cuda")


def test_few_queries_are_another_case() -> None:
    fields = {"implementations": ["eager"], "sequence_lengths": [64, 128], "causal": [False]}
    square, single, same = ([case.key for case in spec(**fields, query_length=n).cases()] for n in (None, 1, 128))
    assert not set(square) & set(single)
    assert square[1] == same[1]
    assert square[0] != same[0]
    assert "query_length" not in spec(**fields).cases()[0].canonical, "results measured before keep their keys"


def test_masks_that_hide_nothing_are_no_part_of_the_case() -> None:
    fields: dict[str, Any] = {"implementations": ["eager"], "sequence_lengths": [8, 16]}
    plain = [case.key for case in spec(**fields).cases()]
    windowed = spec(**fields, window=8)
    assert [case.key == key for case, key in zip(windowed.cases(), plain, strict=True)] == [True, False]
    assert (windowed.without_effect(), spec(**fields, window=16).without_effect()) == ([], ["window"])
    fields["sequence_lengths"] = [8]
    assert spec(**fields, document_lengths=[0, 8]).cases()[0].key == plain[0]
    packed, long, short = (spec(**fields, document_lengths=[3, 5], window=n).cases()[0].key for n in (None, 5, 4))
    assert packed == long != short
    few = {**fields, "query_length": 12, "causal": [False]}
    assert spec(**few, window=11).cases()[0].key != spec(**few, window=12).cases()[0].key == spec(**few).cases()[0].key


def test_a_long_list_of_documents_is_its_number_and_a_hash() -> None:
    packed = spec(implementations=["eager"], sequence_lengths=[8], document_lengths=[1, 2, 2, 2, 1])
    assert packed.cases()[0].coordinates["document_lengths"] == "5 document lengths (6defb76e)"


def test_bottom_right_matters_to_masks_of_few_queries() -> None:
    few = {"implementations": ["eager"], "sequence_lengths": [8], "causal": [False], "query_length": 2}
    keys = [[case.key for case in spec(**few, bottom_right=right).cases()] for right in (False, True)]
    assert keys[0] == keys[1], "without a mask there is nothing to align"
    windows = [spec(**few, window=3, bottom_right=right).cases()[0].key for right in (False, True)]
    assert len({*windows, *keys[0]}) == 3
    assert spec(**{**few, "causal": [True]}, bottom_right=True).cases()[0].coordinates["bottom_right"] is True


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"implementations": []}, "nothing to measure"),
        ({"dtypes": ["tf32"], "device": "cpu"}, "tf32 is a GPU format"),
        ({"do_bench": True, "device": "cpu"}, "times GPUs only"),
        ({"autotune": True}, "was removed"),
        ({"query_length": 1}, r"set causal to \[false\], or bottom_right to true"),
        ({"num_heads": 6, "num_kv_heads": 4}, r"must divide num_heads \(6\)"),
        ({"sequence_lengths": [8, 16], "document_lengths": [3, 5]}, "8 tokens together, and a sequence length is 16"),
        (
            {"sequence_lengths": [8], "document_lengths": [3, 5], "query_length": 8, "causal": [False]},
            "have as many queries as keys: leave them out, or query_length",
        ),
        (
            {"sequence_lengths": list(range(1, 101)), "head_dims": list(range(1, 101)), "causal": [True, False]},
            f"a job has at most {MAX_CELLS}",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_makes_no_sense_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        spec(**fields)
